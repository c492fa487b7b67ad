"""A Runtime runs one request: a second call, from wherever, is refused at once and touches nothing."""

from __future__ import annotations

import threading

import pytest

from prism_core import Generation, InvalidRequest, PrismError

from .fixture import ONE, Bench, raising

CALLS = {
    "generate": lambda bench, sampler: bench.ask([1], sampler=sampler, emit=None),
    "reset": lambda bench, sampler: bench.runtime.reset(),
}


class Watched:
    """A sampler on which any use is remembered."""

    def __init__(self):
        self.used = []

    def sample(self, logits):
        self.used.append("sample")
        return 0

    def copy(self):
        self.used.append("copy")
        return Watched()

    def restore(self, copy):
        self.used.append("restore")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("at", range(8))
def test_a_call_from_inside_an_operation_is_refused_and_the_outer_request_goes_on(call, at):
    bench = Bench()
    refused = []
    bench.ask([1])
    bench.trace.clear()

    def again():
        other = Watched()
        entries = list(bench.trace.entries)
        with pytest.raises(InvalidRequest, match=rf"{call}\(\) was called while the Runtime is running a request"):
            CALLS[call](bench, other)
        assert other.used == []
        assert bench.trace.entries == entries
        assert bench.runtime.tokens == [1, 1]
        refused.append(at)

    bench.trace.after[at] = again
    bench.ask([2, 3])
    assert refused == [at]
    assert bench.trace.operations == ["C", "R", "I2", "E3", "P", "E5", "emit5", "C"]
    assert bench.runtime.tokens == [2, 3, 5]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("where", ["emit", "sampler", "stop_when", "on_prefix", "decoder"])
def test_a_call_from_another_thread_is_refused_not_queued(call, where):
    bench = Bench()
    errors = []

    def elsewhere(*_):
        def run():
            try:
                CALLS[call](bench, Watched())
            except PrismError as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
        return 0

    class Sampler(Watched):
        def sample(self, logits):
            return elsewhere()

    arguments = {
        "emit": {"emit": elsewhere},
        "sampler": {"sampler": Sampler()},
        "stop_when": {"stop_when": elsewhere},
        "on_prefix": {"on_prefix": elsewhere},
        "decoder": {},
    }[where]
    if where == "decoder":
        bench.trace.after[2] = elsewhere
    bench.ask([1], **arguments)
    (error,) = errors
    assert isinstance(error, InvalidRequest)
    assert len(bench.runtime.tokens) == 2


def test_a_call_during_a_reset_is_refused():
    bench = Bench()
    refused = []

    def again():
        for call in CALLS.values():
            with pytest.raises(InvalidRequest):
                call(bench, Watched())
            refused.append(call)

    bench.trace.after[0] = again
    bench.runtime.reset()
    assert len(refused) == 2
    bench.ask([1])


def test_a_call_during_a_recovery_is_refused():
    bench = Bench()
    refused = []

    def again():
        with pytest.raises(InvalidRequest):
            bench.runtime.reset()
        refused.append(bench.trace.operations[-1])

    bench.trace.instead[2] = raising(ValueError())
    bench.trace.after[2] = again
    with pytest.raises(ValueError):
        bench.ask([1])
    assert refused == ["S"]
    bench.ask([1])


def test_a_refused_call_that_is_not_caught_rolls_the_request_back():
    bench = Bench()
    with pytest.raises(InvalidRequest, match="runs one at a time"):
        bench.ask([1], emit=lambda token: bench.ask([1]))
    assert bench.runtime.tokens == []
    assert bench.trace.operations[-1] == "S"


@pytest.mark.parametrize("failing", [True, False])
def test_the_runtime_is_free_again_after_a_request_and_after_a_failed_one(failing):
    bench = Bench()
    for _ in range(3):
        if failing:
            with pytest.raises(ZeroDivisionError):
                bench.ask([1], emit=lambda token: 1 // 0)
        else:
            bench.ask([1], Generation(2))
    bench.runtime.reset()
    bench.ask([1])


def test_of_many_threads_that_start_at_once_the_refused_ones_change_nothing():
    bench = Bench()
    barrier = threading.Barrier(8)
    outcomes = []

    def run(token):
        barrier.wait(30)
        try:
            bench.runtime.generate([token], ONE)
            outcomes.append("done")
        except InvalidRequest:
            outcomes.append("refused")

    threads = [threading.Thread(target=run, args=(token,)) for token in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(outcomes) == 8
    assert bench.runtime.checkpoint_count == min(4, outcomes.count("done"))
    assert bench.decoder.state == bench.runtime.tokens
    assert not bench.runtime.is_faulted
