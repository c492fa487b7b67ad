"""An interrupt at any instruction of the engine finds a request wholly committed or wholly undone.

A trace function raises at the n-th line or instruction executed in prism_core, for every n that a request has. That is
stricter than signals, which Python delivers between fewer instructions.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import prism_core
from prism_core import Generation, TemperatureSampler

from .fixture import SCENARIOS, Bench

ENGINE = str(Path(prism_core.__file__).parent)


class Interrupt(BaseException):
    """What a signal handler raises."""


class RaiseAt:
    """Raises at event `at` of the engine's frames; counts them all if it never comes to that."""

    def __init__(self, at: int, event: str) -> None:
        self.at, self.event, self.seen = at, event, 0

    def __enter__(self) -> RaiseAt:
        self.outer = sys.gettrace()
        sys.settrace(self.enter_frame)
        return self

    def __exit__(self, *_) -> None:
        sys.settrace(self.outer)

    def enter_frame(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(ENGINE):
            return None
        frame.f_trace_opcodes = self.event == "opcode"
        return self.in_frame

    def in_frame(self, frame, event, argument):
        if event == self.event:
            self.seen += 1
            if self.seen == self.at:
                raise Interrupt
        return self.in_frame


def prepare(retention: str) -> Bench:
    bench = Bench(retention=retention)
    for prompt in SCENARIOS["O4"].earlier:
        bench.ask(prompt)
    return bench


def ask(bench: Bench) -> None:
    bench.ask([1, 1, 3, 4, 5], Generation(2), block=2, save_at=(3,))


def state(bench: Bench) -> tuple:
    return (list(bench.runtime.tokens), list(bench.decoder.state), bench.sampler.asked, list(bench.sampler.history))


@pytest.mark.parametrize(("event", "stride"), [("line", 1), ("opcode", 3)])
@pytest.mark.parametrize("retention", ["fifo", "lru"])
def test_an_interrupt_at_any_instruction_leaves_all_or_nothing(event, stride, retention):
    bench = prepare(retention)
    before = state(bench)
    with RaiseAt(0, event) as counting:
        ask(bench)
    after = state(bench)
    outcomes = set()
    for at in range(1, counting.seen + 1, stride):
        bench = prepare(retention)
        with pytest.raises(Interrupt), RaiseAt(at, event):
            ask(bench)
        now = state(bench)
        assert now in (before, after), at
        outcomes.add(now == after)
        assert not bench.runtime.is_faulted
        if now == before:
            ask(bench)
        assert state(bench) == after
        assert retention == "lru" or bench.runtime.checkpoint_count == 4
    assert False in outcomes


def temperature(bench: Bench) -> TemperatureSampler:
    return TemperatureSampler(seed=3, presence_penalty=0.5).resume([1, 2])


@pytest.mark.parametrize("sampler_of", [lambda bench: bench.sampler, temperature], ids=["plain", "restoring"])
@pytest.mark.parametrize("event", ["line", "opcode"])
def test_an_interrupt_at_any_instruction_of_a_recovery_leaves_it_done_or_latched(event, sampler_of):
    """Either way the sampler is as it was."""

    def fail(bench: Bench, sampler) -> None:
        bench.ask([1, 1, 3, 4, 5], Generation(2), sampler=sampler, emit=lambda token: 1 // 0)

    def drawn(sampler) -> object:
        return in_order(sampler) if isinstance(sampler, TemperatureSampler) else list(sampler.history)

    bench = prepare("fifo")
    before, sampler = state(bench), sampler_of(bench)
    undrawn = drawn(sampler)
    with pytest.raises(ZeroDivisionError), RaiseAt(0, event) as counting:
        fail(bench, sampler)
    latched = 0
    for at in range(counting.seen * 2 // 3, counting.seen + 1):
        bench = prepare("fifo")
        sampler = sampler_of(bench)
        with pytest.raises((Interrupt, ZeroDivisionError)), RaiseAt(at, event):
            fail(bench, sampler)
        assert bench.runtime.tokens == before[0]
        assert drawn(sampler) == undrawn, at
        if bench.runtime.is_faulted:
            latched += 1
            bench.trace.clear()
            bench.runtime.reset()
            bench.ask([1])
        else:
            assert bench.decoder.state == before[1]
    assert latched > 0


def test_an_interrupt_at_any_instruction_of_a_reset_leaves_it_done_or_latched():
    bench = prepare("fifo")
    with RaiseAt(0, "opcode") as counting:
        bench.runtime.reset()
    for at in range(1, counting.seen + 1):
        bench = prepare("fifo")
        before = list(bench.runtime.tokens)
        with pytest.raises(Interrupt), RaiseAt(at, "opcode"):
            bench.runtime.reset()
        if not bench.runtime.is_faulted:
            assert bench.decoder.state in (before, [])
            assert bench.runtime.tokens == bench.decoder.state
        bench.runtime.reset()
        bench.ask([1])


def in_order(sampler: TemperatureSampler) -> tuple:
    """What a sampler would draw next; drawing it shows that its buffers are sound."""
    rows = np.arange(24, dtype=np.float32).reshape(3, 8) % 5
    twin = sampler.copy()
    return (sampler.draws, [twin.sample(row) for row in rows])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 0, "top_p": 1.0},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "temperature": 5.0},
        {"temperature": 0, "presence_penalty": 1.0},
    ],
    ids=repr,
)
@pytest.mark.parametrize("before", [0, 1, 63])
def test_an_interrupt_at_any_line_leaves_the_sampler_as_it_was_and_fit_to_go_on(options, before):
    def made() -> TemperatureSampler:
        return TemperatureSampler(seed=3, **options).resume([at % 8 for at in range(before)])

    bench, sampler = Bench(), made()
    with RaiseAt(0, "line") as counting:
        bench.ask([1], Generation(2), sampler=sampler)
    after = (list(bench.runtime.tokens), in_order(sampler))
    for at in range(1, counting.seen + 1):
        bench, sampler = Bench(), made()
        with pytest.raises(Interrupt), RaiseAt(at, "line"):
            bench.ask([1], Generation(2), sampler=sampler)
        if bench.runtime.tokens == []:
            assert in_order(sampler) == in_order(made()), at
            bench.ask([1], Generation(2), sampler=sampler)
        assert (bench.runtime.tokens, in_order(sampler)) == after, at
