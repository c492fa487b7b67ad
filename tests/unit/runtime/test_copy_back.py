"""The caller's sampler gets its state back on any error, in its own object, and keeps it on success."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from prism_core import (
    Cancelled,
    DeadlineExceeded,
    Generation,
    InvalidRequest,
    RestoreFailed,
    RuntimeFaulted,
    TemperatureSampler,
)
from prism_core.sampling import give_back

from .fixture import ONE, Bench, raising


class Plain:
    """State in `__dict__` only; `copy` scribbles into the original, to show that step 0 is undone as well."""

    def __init__(self):
        self.draws = []
        self.copies = 0

    def sample(self, logits):
        self.draws.append(int(np.argmax(logits)))
        self.extra = len(self.draws)
        return self.draws[-1]

    def copy(self):
        twin = type(self)()
        twin.draws, twin.copies = list(self.draws), self.copies
        if hasattr(self, "extra"):
            twin.extra = self.extra
        self.copies += 1
        return twin

    @property
    def state(self):
        return (list(self.draws), self.copies, getattr(self, "extra", None))


class Slotted:
    """State in slots, one of them private, one unset, in two classes."""

    __slots__ = ("__weakref__", "draws", "extra")

    def __init__(self):
        self.draws = []

    def sample(self, logits):
        self.draws.append(int(np.argmax(logits)))
        self.extra = len(self.draws)
        return self.draws[-1]

    def copy(self):
        twin = type(self)()
        twin.draws = list(self.draws)
        if hasattr(self, "extra"):
            twin.extra = self.extra
        return twin

    @property
    def state(self):
        return (list(self.draws), getattr(self, "extra", None))


class SlottedChild(Slotted):
    __slots__ = ("__secret", "only")

    def __init__(self):
        super().__init__()
        self.__secret = 0
        self.only = "x"

    def sample(self, logits):
        self.__secret += 1
        return super().sample(logits)

    def copy(self):
        twin = super().copy()
        twin.__secret = self.__secret
        return twin

    @property
    def state(self):
        return (*super().state, self.__secret)


class Both(Slotted):
    """Slots and a `__dict__`."""

    def sample(self, logits):
        self.free = getattr(self, "free", 0) + 1
        return super().sample(logits)

    def copy(self):
        twin = super().copy()
        twin.__dict__.update(self.__dict__)
        return twin

    @property
    def state(self):
        return (*super().state, dict(self.__dict__))


class Restoring(Plain):
    """Has its own way back."""

    restored = 0

    def restore(self, copy):
        assert type(copy) is Restoring
        self.draws, self.copies = list(copy.draws), copy.copies
        self.__dict__.pop("extra", None)
        if hasattr(copy, "extra"):
            self.extra = copy.extra
        type(self).restored += 1


@dataclass(frozen=True)
class Frozen:
    """One that refuses ordinary assignment."""

    draws: tuple = ()

    def sample(self, logits):
        object.__setattr__(self, "draws", (*self.draws, int(np.argmax(logits))))
        return self.draws[-1]

    def copy(self):
        return Frozen(self.draws)

    @property
    def state(self):
        return self.draws


class Seeded(TemperatureSampler):
    """The library's own, with penalties, whose state is what it would draw next."""

    def __init__(self):
        super().__init__(seed=5, temperature=50.0, frequency_penalty=0.5)

    @property
    def state(self):
        probe = self.copy()
        return (self.draws, [probe.sample(np.zeros(8, dtype=np.float32)) for _ in range(20)])


SAMPLERS = [Plain, Slotted, SlottedChild, Both, Restoring, Frozen, Seeded]
each_sampler = pytest.mark.parametrize("kind", SAMPLERS)


def fail_in_every_way(bench: Bench):
    """(a description, the error, what to do before, arguments)."""
    trace = bench.trace
    yield "invalid", InvalidRequest, lambda: None, {"prompt": []}
    yield "cancelled", Cancelled, lambda: trace.cancellation.cancel(), {}
    yield "expired", DeadlineExceeded, trace.expire, {}
    yield "no snapshot", OSError, lambda: trace.instead.update({0: raising(OSError())}), {}
    yield "reset", OSError, lambda: trace.instead.update({1: raising(OSError())}), {}
    yield "evaluation after two draws", OSError, lambda: trace.instead.update({6: raising(OSError())}), {}
    yield "interrupt", KeyboardInterrupt, lambda: trace.instead.update({6: raising(KeyboardInterrupt())}), {}
    yield "expired at the end", DeadlineExceeded, lambda: trace.after.update({7: trace.expire}), {}
    yield "emit", ZeroDivisionError, lambda: None, {"emit": lambda token: 1 // 0}
    yield "stop_when", ZeroDivisionError, lambda: None, {"stop_when": lambda: 1 // 0}


@each_sampler
@pytest.mark.parametrize("way", range(10))
def test_the_samplers_state_is_given_back_in_every_failing_path(kind, way):
    bench = Bench()
    sampler = kind()
    bench.ask([2], Generation(2), sampler=sampler)
    bench.trace.clear()
    _, error, prepare, arguments = list(fail_in_every_way(bench))[way]
    before = sampler.state
    prepare()
    call = {"prompt": [2, 3], "emit": None, **arguments}
    with pytest.raises(error):
        bench.ask(call.pop("prompt"), Generation(3), sampler=sampler, **call)
    assert sampler.state == before


@each_sampler
def test_a_failed_recovery_and_a_faulted_refusal_give_the_state_back_too(kind):
    bench = Bench()
    sampler = kind()
    before = sampler.state
    bench.decoder.restore_errors[()] = OSError("restore")
    bench.trace.instead[4] = raising(ValueError())
    with pytest.raises(RestoreFailed):
        bench.ask([1], sampler=sampler)
    assert sampler.state == before
    with pytest.raises(RuntimeFaulted):
        bench.ask([1], sampler=sampler)
    assert sampler.state == before


@each_sampler
def test_on_success_the_sampler_keeps_its_state(kind):
    bench = Bench()
    sampler = kind()
    before = sampler.state
    bench.ask([1], sampler=sampler)
    assert sampler.state != before


def test_a_stop_tokens_draw_stays_in_the_sampler():
    bench = Bench()
    sampler = Plain()
    bench.ask([1], Generation(3, (2,)), sampler=sampler)
    assert sampler.draws == [1, 2]


def test_the_sampler_is_copied_before_even_the_latch_test():
    bench = Bench()
    sampler = Plain()
    bench.decoder.reset_error = OSError()
    with pytest.raises(OSError):
        bench.runtime.reset()
    with pytest.raises(RuntimeFaulted):
        bench.ask([1], sampler=sampler)
    assert sampler.copies == 0  # the copy was taken first, so the mark that copying leaves is undone as well


def test_an_error_of_copy_is_raised_before_anything_else_happens():
    class Uncopyable(Plain):
        def copy(self):
            raise OSError("no copy")

    bench = Bench()
    bench.trace.cancellation.cancel()
    with pytest.raises(OSError, match="no copy"):
        bench.ask([], sampler=Uncopyable())
    assert bench.trace.entries == []


def test_a_sampler_whose_copy_is_itself_is_left_alone():
    class Stateless:
        setting = 3

        def __init__(self):
            self.bias = 1

        def sample(self, logits):
            return self.bias

        def copy(self):
            return self

    sampler = Stateless()
    bench = Bench()
    with pytest.raises(InvalidRequest):
        bench.ask([], sampler=sampler)
    assert sampler.bias == 1
    bench.ask([1], sampler=sampler)


def test_restore_is_called_once_for_an_error_and_never_on_success():
    bench = Bench()
    sampler = Restoring()
    Restoring.restored = 0
    bench.ask([1], sampler=sampler)
    assert Restoring.restored == 0
    with pytest.raises(InvalidRequest):
        bench.ask([], sampler=sampler)
    assert Restoring.restored == 1


def test_an_error_of_restore_is_raised_with_the_requests_error_behind_it():
    class Broken(Plain):
        def restore(self, copy):
            raise OSError("sampler")

    bench = Bench()
    with pytest.raises(OSError, match="sampler") as caught:
        bench.ask([1], ONE, sampler=Broken(), emit=lambda token: 1 // 0)
    assert isinstance(caught.value.__context__, ZeroDivisionError)
    assert bench.runtime.tokens == bench.decoder.state == []
    assert not bench.runtime.is_faulted


@pytest.mark.parametrize("half_way", [True, False])
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), TimeoutError("the job's")], ids=repr)
def test_an_interrupt_inside_restore_is_raised_and_the_state_is_given_back_all_the_same(interrupt, half_way):
    class Interrupted(Restoring):
        def copy(self):
            twin = Restoring()
            twin.draws, twin.copies = list(self.draws), self.copies
            return twin

        def restore(self, copy):
            self.draws.clear()
            if not half_way:
                super().restore(copy)
            if interrupts:
                raise interrupts.pop()
            super().restore(copy)

    bench, sampler, interrupts = Bench(), Interrupted(), [interrupt]
    bench.ask([1], Generation(2), sampler=sampler)
    before = sampler.draws[:]
    with pytest.raises(type(interrupt)) as caught:
        bench.ask([1, 1], Generation(2), sampler=sampler, emit=lambda token: 1 // 0)
    assert caught.value is interrupt
    assert isinstance(interrupt.__context__, ZeroDivisionError)
    assert (sampler.draws, interrupts) == (before, [])
    assert not bench.runtime.is_faulted


def test_the_given_back_state_is_the_callers_alone():
    """Two failures in a row: the second must not find what the first one's copy shared."""
    bench = Bench()
    for kind in SAMPLERS:
        sampler = kind()
        before = sampler.state
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                bench.ask([1], Generation(2), sampler=sampler, emit=lambda token: 1 // 0)
            assert sampler.state == before


def test_slots_that_the_copy_has_unset_become_unset():
    one, two = SlottedChild(), SlottedChild()
    one.extra = 5
    del one.only
    two.draws.append(3)
    give_back(one, two)
    assert not hasattr(one, "extra")
    assert (one.only, one.draws) == ("x", [3])
    give_back(one, two)
    assert not hasattr(one, "extra")
