"""Expiry, cancellation and exceptions after, inside and between every two operations of the six golden requests.

Each is followed by the same request again, which must find everything as it was: the same trace, the same answer.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prism_core import Cancelled, DeadlineExceeded, RestoreFailed, RuntimeFaulted

from .fixture import SCENARIOS, Bench, Scenario, Trace, raising


class Stop(BaseException):
    """What a job timeout may raise: no Exception."""


ERRORS = [RuntimeError("no"), MemoryError(), DeadlineExceeded("mine"), KeyboardInterrupt(), SystemExit(3), Stop()]
BROKEN = OSError("the restore failed")
OPERATIONS = [(name, at) for name, scenario in SCENARIOS.items() for at in range(len(scenario.operations))]
CHECKS = [(name, at) for name, scenario in SCENARIOS.items() for at in range(scenario.trace.split().count("."))]
each_operation = pytest.mark.parametrize(("name", "at"), OPERATIONS)
each_check = pytest.mark.parametrize(("name", "at"), CHECKS)
each_error = pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
restore_works_or_not = pytest.mark.parametrize("breaks", [False, True], ids=["restored", "restore fails"])


def prove_intact(bench: Bench, scenario: Scenario) -> None:
    """The same request, undisturbed, does and answers what it would have without the failed one."""
    bench.trace.clear()
    bench.emitted.clear()
    assert scenario.ask(bench) == scenario.completion
    assert str(bench.trace) == scenario.trace
    assert bench.runtime.tokens == bench.decoder.state == scenario.history


def prove_latched(bench: Bench, before: list[int]) -> None:
    """Nothing works but a reset; until then the history is that of the last commit."""
    assert bench.runtime.is_faulted
    assert bench.runtime.tokens == before
    bench.trace.clear()
    bench.trace.cancellation.cancel()
    with pytest.raises(RuntimeFaulted):
        bench.ask([1])
    with pytest.raises(RuntimeFaulted):
        bench.ask([])
    assert bench.trace.entries == []
    bench.runtime.reset()
    assert bench.trace.operations == ["R"]
    assert not bench.runtime.is_faulted
    assert (bench.runtime.tokens, bench.runtime.checkpoint_count) == ([], 0)
    prove_intact(bench, SCENARIOS["O1"])


def disturb(
    scenario: Scenario,
    plan: Callable[[Trace], None],
    expected: type[BaseException] | BaseException,
    *,
    breaks: bool,
    recovers: bool = True,
) -> list[str]:
    """Runs a golden request under `plan`, expects the error, proves the state, and returns the operations done."""
    bench = scenario.prepare()
    before, saved = list(bench.runtime.tokens), bench.runtime.checkpoint_count
    sampler = (bench.sampler.asked, list(bench.sampler.history))
    plan(bench.trace)
    bench.decoder.restore_errors = {tuple(before): BROKEN} if breaks else {}
    latches = breaks and recovers
    with pytest.raises(RestoreFailed if latches else _kind(expected)) as caught:
        scenario.ask(bench)
    bench.decoder.restore_errors = {}
    error = caught.value
    if latches:
        assert error.__cause__ is BROKEN
        assert error.__context__ is error.original
        error = error.original
    assert error is expected if isinstance(expected, BaseException) else type(error) is expected
    assert bench.runtime.checkpoint_count == saved
    assert (bench.sampler.asked, bench.sampler.history) == sampler
    operations = bench.trace.operations
    if latches:
        prove_latched(bench, before)
    else:
        assert not bench.runtime.is_faulted
        assert bench.runtime.tokens == bench.decoder.state == before
        prove_intact(bench, scenario)
    return operations


def _kind(expected: type[BaseException] | BaseException) -> type[BaseException]:
    return expected if isinstance(expected, type) else type(expected)


@restore_works_or_not
@pytest.mark.parametrize("expected", [DeadlineExceeded, Cancelled])
@each_operation
def test_expiry_and_cancellation_after_an_operation_undo_the_request(name, at, expected, breaks):
    def plan(trace: Trace) -> None:
        trace.after[at] = trace.expire if expected is DeadlineExceeded else trace.cancellation.cancel

    operations = disturb(SCENARIOS[name], plan, expected, breaks=breaks)
    assert operations == operations_until_noticed(SCENARIOS[name], at) + ([] if breaks else ["S"])


@restore_works_or_not
@pytest.mark.parametrize("expected", [DeadlineExceeded, Cancelled])
@each_check
def test_every_check_notices_expiry_and_cancellation(name, at, expected, breaks):
    def plan(trace: Trace) -> None:
        if expected is DeadlineExceeded:
            trace.at_check[at] = trace.expire
        elif at == 0:
            trace.cancellation.cancel()
        else:  # set while the check before reads the clock, which is the last thing that one does
            trace.at_check[at - 1] = trace.cancellation.cancel

    done = operations_before_check(SCENARIOS[name], at)
    operations = disturb(SCENARIOS[name], plan, expected, breaks=breaks, recovers=at >= 3)
    assert operations == done + (["S"] if at >= 3 and not breaks else [])


@restore_works_or_not
@each_error
@each_check
def test_an_error_of_the_clock_at_any_check_is_raised_unchanged(name, at, error, breaks):
    scenario = SCENARIOS[name]
    done = operations_before_check(scenario, at)
    if at == scenario.trace.split().count(".") - 2 and isinstance(error, Exception):
        # The check before the optional snapshot's checkpoint is a part of that snapshot.
        prove_an_optional_snapshot_may_fail(scenario, lambda trace: trace.at_check.update({at: raising(error)}))
        return
    operations = disturb(
        scenario, lambda trace: trace.at_check.update({at: raising(error)}), error, breaks=breaks, recovers=at >= 3
    )
    assert operations == done + (["S"] if at >= 3 and not breaks else [])


@restore_works_or_not
@each_error
@each_operation
def test_an_error_inside_an_operation_undoes_the_request_and_is_raised_unchanged(name, at, error, breaks):
    scenario = SCENARIOS[name]
    if at == len(scenario.operations) - 1 and isinstance(error, Exception):
        bench = prove_an_optional_snapshot_may_fail(scenario, lambda trace: trace.instead.update({at: raising(error)}))
        assert bench.trace.operations == scenario.operations[:-1]
        return
    operations = disturb(
        scenario, lambda trace: trace.instead.update({at: raising(error)}), error, breaks=breaks, recovers=at > 0
    )
    assert operations == scenario.operations[:at] + (["S"] if at > 0 and not breaks else [])


def prove_an_optional_snapshot_may_fail(scenario: Scenario, plan: Callable[[Trace], None]) -> Bench:
    """The request succeeds under this plan, and saves nothing."""
    bench = scenario.prepare()
    saved = bench.runtime.checkpoint_count
    plan(bench.trace)
    assert scenario.ask(bench) == scenario.completion
    assert bench.runtime.tokens == bench.decoder.state == scenario.history
    assert bench.runtime.checkpoint_count == saved
    return bench


@restore_works_or_not
@each_error
@each_operation
def test_an_error_after_an_operation_undoes_the_request_and_is_raised_unchanged(name, at, error, breaks):
    scenario = SCENARIOS[name]
    if at == len(scenario.operations) - 1 and isinstance(error, Exception):
        bench = prove_an_optional_snapshot_may_fail(scenario, lambda trace: trace.after.update({at: raising(error)}))
        assert bench.trace.operations == scenario.operations
        return
    operations = disturb(
        scenario, lambda trace: trace.after.update({at: raising(error)}), error, breaks=breaks, recovers=at > 0
    )
    assert operations == scenario.operations[: at + 1] + (["S"] if at > 0 and not breaks else [])


def operations_until_noticed(scenario: Scenario, at: int) -> list[str]:
    """Those up to the first check after operation `at`: the fixture's blocks make none of their own."""
    entries = scenario.trace.split()
    position = [index for index, entry in enumerate(entries) if entry != "."][at]
    return [entry for entry in entries[: entries.index(".", position)] if entry != "."]


def operations_before_check(scenario: Scenario, at: int) -> list[str]:
    entries = scenario.trace.split()
    position = [index for index, entry in enumerate(entries) if entry == "."][at]
    return [entry for entry in entries[:position] if entry != "."]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), SystemExit(1), Stop()])
def test_an_interrupt_inside_the_restore_passes_through_and_leaves_the_latch_on(interrupt):
    scenario = SCENARIOS["O2"]
    bench = scenario.prepare()
    bench.trace.after[2] = bench.trace.expire
    bench.decoder.restore_errors = {(1, 1): interrupt}
    with pytest.raises(type(interrupt)) as caught:
        scenario.ask(bench)
    bench.decoder.restore_errors = {}
    assert caught.value is interrupt
    assert isinstance(interrupt.__context__, DeadlineExceeded)
    prove_latched(bench, [1, 1])


def test_recovery_ignores_cancellation_and_the_deadline():
    bench = SCENARIOS["O2"].prepare()
    bench.trace.after[2] = bench.trace.expire
    bench.trace.after[1] = bench.trace.cancellation.cancel
    with pytest.raises(Cancelled):
        bench.ask([2, 3])
    assert bench.trace.operations == ["C", "R", "S"]
    assert str(bench.trace).endswith("R S")  # the check that raised saw the cancellation before it read the clock


def test_the_latch_is_on_during_a_recovery():
    bench = SCENARIOS["O2"].prepare()
    seen = []
    bench.trace.after[1] = bench.trace.expire
    bench.trace.after[2] = lambda: seen.append((bench.trace.operations[-1], bench.runtime.is_faulted))
    assert not bench.runtime.is_faulted
    with pytest.raises(DeadlineExceeded):
        bench.ask([2, 3])
    assert seen == [("S", True)]
    assert not bench.runtime.is_faulted


def test_the_latch_is_off_while_a_request_runs():
    bench = SCENARIOS["O2"].prepare()
    seen = []
    for at in range(8):
        bench.trace.after[at] = lambda: seen.append(bench.runtime.is_faulted)
    bench.ask([2, 3])
    assert seen == [False] * 8
