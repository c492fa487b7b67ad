"""Section 12: what a request and a Runtime can do beyond the original contract, each off by default."""

from __future__ import annotations

from dataclasses import fields

import pytest

from prism_core import (
    Completion,
    DeadlineExceeded,
    Finish,
    Generation,
    InvalidRequest,
    Limits,
    RestoreFailed,
    RuntimeFaulted,
    Timings,
)

from .fixture import ONE, Bench, raising
from .test_prefixes import bench_with, saved

LONG = [2, 3, 4, 5, 6, 7, 0]


def test_a_prefix_is_saved_at_each_position_in_order_before_the_completed_one():
    bench = Bench()
    bench.ask(LONG, save_at=(2, 5))
    assert saved(bench) == [LONG[:2], LONG[:5], [*LONG, 3]]
    assert " ".join(bench.trace.operations) == "C R I2 I3 C I4 I5 I6 C I7 E0 P E3 emit3 C"
    assert " I3 . . C . . . I4 . " in str(bench.trace)


@pytest.mark.parametrize(
    ("block", "runs"),
    [
        (1, ["I2", "I3", "C", "I4", "I5", "I6", "C", "I7"]),
        (2, ["I2 I3", "C", "I4 I5", "I6", "C", "I7"]),
        (4, ["I2 I3", "C", "I4 I5 I6", "C", "I7"]),
        (512, ["I2 I3", "C", "I4 I5 I6", "C", "I7"]),
    ],
)
def test_blocks_are_cut_at_save_positions(block, runs):
    bench = Bench()
    bench.ask(LONG, block=block, save_at=(2, 5))
    middle = str(bench.trace).split(" R ")[1].split(" E0 ")[0]
    assert [run.strip() for run in middle.split(".") if run.strip()] == runs
    assert bench.runtime.tokens == [*LONG, 3]


def test_a_position_at_the_last_prompt_token_is_saved_too():
    bench = Bench()
    bench.ask(LONG, save_at=(6,), block=4)
    assert saved(bench) == [LONG[:6], [*LONG, 3]]


def test_positions_already_reused_are_skipped():
    bench = Bench()
    bench.ask([2, 3])  # 2 3 5
    bench.ask([2, 3, 5, 1, 1, 1], save_at=(2, 3, 4))
    assert saved(bench) == [[2, 3, 5], [2, 3, 5, 1], [2, 3, 5, 1, 1, 1, 5]]
    bench.ask([2, 3, 5, 1, 1, 1, 5], save_at=(1, 6))
    assert saved(bench)[3:] == [[2, 3, 5, 1, 1, 1, 5, 2]]


def test_a_prefix_without_logits_serves_only_longer_prompts():
    bench = Bench()
    bench.ask(LONG, save_at=(2,))
    bench.ask([1])
    bench.trace.clear()
    assert bench.ask([2, 3, 7]).reused_tokens == 2
    assert bench.trace.operations[:3] == ["C", "S", "E7"]
    bench.ask([1])
    bench.trace.clear()
    assert bench.ask([2, 3]).reused_tokens == 0
    assert bench.trace.operations[:2] == ["C", "R"]


def test_a_prefix_without_logits_of_an_equal_prompt_leaves_the_shorter_one_in_its_place():
    bench = Bench()
    bench.ask(LONG, save_at=(2, 5))
    bench.ask([1])
    assert bench.ask(LONG[:5]).reused_tokens == 2


def test_prefixes_held_aside_are_dropped_if_the_request_fails():
    bench = Bench()
    bench.ask([1])
    with pytest.raises(ZeroDivisionError):
        bench.ask(LONG, save_at=(2, 5), emit=lambda token: 1 // 0)
    assert saved(bench) == [[1, 1]]
    assert bench.decoder.state == [1, 1]


@pytest.mark.parametrize("at", range(14))
def test_expiry_after_any_operation_of_a_request_that_saves_on_its_way_undoes_it(at):
    bench = Bench()
    bench.ask([1])
    bench.trace.clear()
    bench.trace.after[at] = bench.trace.expire
    with pytest.raises(DeadlineExceeded):
        bench.ask(LONG, save_at=(2, 5))
    assert len(bench.trace.operations) == at + 2
    assert bench.trace.operations[-1] == "S"
    assert (bench.runtime.tokens, saved(bench)) == ([1, 1], [[1, 1]])


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError()])
def test_a_failure_of_a_snapshot_on_the_way_is_swallowed_and_the_others_are_kept(error):
    bench = Bench()
    bench.trace.instead[4] = raising(error)
    bench.ask(LONG, save_at=(2, 5))
    assert saved(bench) == [LONG[:5], [*LONG, 3]]


def test_an_interrupt_in_a_snapshot_on_the_way_undoes_the_request():
    bench = Bench()
    bench.trace.instead[4] = raising(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        bench.ask(LONG, save_at=(2, 5))
    assert bench.trace.operations[-1] == "S"
    assert saved(bench) == []


@pytest.mark.parametrize(
    ("size", "after"),
    [
        (175, []),
        (176, [LONG[:2]]),
        (295, [LONG[:2]]),
        (296, [LONG[:2], LONG[:5]]),
        (471, [LONG[:2], LONG[:5]]),
        (472, [LONG[:2], LONG[:5], [*LONG, 3]]),
    ],
)
def test_the_reserve_is_the_rollback_and_everything_held_aside(size, after):
    # rollback 80; at 2: 4 * 2 + 8 + 80 = 96; at 5: 4 * 5 + 20 + 80 = 120; completed: 4 * (8 + 8) + 32 + 80 = 176
    bench = bench_with(size)
    bench.ask(LONG, save_at=(2, 5))
    assert saved(bench) == after


def test_snapshots_on_the_way_evict_the_oldest_and_evictions_stay():
    bench = bench_with(430)
    bench.ask([1])  # 128
    bench.trace.clear()
    with pytest.raises(ZeroDivisionError):
        bench.ask(LONG, save_at=(2, 5), emit=lambda token: 1 // 0)  # 128 + 96 + 120 + 128 is over 430
    assert saved(bench) == []


def test_with_no_checkpoints_allowed_nothing_is_saved_on_the_way():
    bench = bench_with(checkpoints=0)
    bench.ask(LONG, save_at=(2, 5), block=512)
    assert " ".join(bench.trace.operations) == "C R I2 I3 I4 I5 I6 I7 E0 P E3 emit3"
    assert saved(bench) == []


def test_the_count_limit_drops_the_oldest_of_those_held_aside_as_well():
    bench = bench_with(checkpoints=2)
    bench.ask([1])
    bench.ask(LONG, save_at=(2, 5, 6))
    assert saved(bench) == [LONG[:6], [*LONG, 3]]


def test_a_template_that_drops_earlier_text_still_reuses_the_point_before_the_answer():
    bench = bench_with(checkpoints=8)
    system, question, mark = [6, 6], [1, 2], [7]
    first = [*system, *question, *mark]
    bench.ask(first, Generation(3), save_at=(2, 4))
    following = [*system, *question, 5, 5, 3, *mark]  # the answer as the template shows it later
    assert bench.ask(following, Generation(3), save_at=(2, 7)).reused_tokens == 4
    assert bench.ask([*system, 3, 3, *mark]).reused_tokens == 2


def test_lru_reuse_refreshes_a_saved_prefix():
    bench = bench_with(checkpoints=3, retention="lru")
    bench.ask([1])
    bench.ask([2])
    with pytest.raises(ZeroDivisionError):
        bench.ask([1, 1, 3], emit=lambda token: 1 // 0)
    assert saved(bench) == [[2, 2], [1, 1]]
    bench.ask([3])
    bench.ask([4])
    assert saved(bench) == [[1, 1], [3, 3], [4, 4]]


def test_lru_replaces_a_reused_prefix_by_the_longer_one_that_grew_from_it():
    bench = bench_with(checkpoints=3, retention="lru")
    bench.ask([1])
    bench.ask([2])
    assert bench.ask([1, 1, 3]).reused_tokens == 2
    assert saved(bench) == [[2, 2], [1, 1, 3, 5]]
    assert bench.ask([1, 1, 3, 5]).reused_tokens == 4  # the live state, which equals a saved prefix
    assert saved(bench) == [[2, 2], [1, 1, 3, 5, 2]]


def test_fifo_replaces_nothing():
    bench = bench_with(checkpoints=3)
    bench.ask([1])
    bench.ask([2])
    bench.ask([1, 1, 3])
    bench.ask([1, 1, 3, 5])
    assert saved(bench) == [[2, 2], [1, 1, 3, 5], [1, 1, 3, 5, 2]]


def test_lru_keeps_a_reused_prefix_that_is_no_proper_prefix_of_the_new_one():
    bench = bench_with(checkpoints=3, retention="lru")
    bench.ask([1])
    bench.ask([2])
    bench.ask([1, 1], Generation(1, (2,)))
    assert bench.runtime.tokens == [1, 1]
    assert saved(bench) == [[2, 2], [1, 1], [1, 1]]
    bench.ask([1, 1, 4])  # from the live state: both equal ones are replaced
    assert saved(bench) == [[2, 2], [1, 1, 4, 6]]


def test_lru_keeps_a_reused_prefix_if_the_new_one_could_not_be_saved():
    bench = bench_with(checkpoints=3, retention="lru")
    bench.ask([1])
    bench.ask([2])
    bench.trace.clear()
    bench.trace.instead[6] = raising(MemoryError())
    bench.ask([1, 1, 3])
    assert bench.trace.operations == ["C", "S", "E3", "P", "E5", "emit5"]
    assert saved(bench) == [[2, 2], [1, 1]]


@pytest.mark.parametrize("checkpoints", [3, 8])
@pytest.mark.parametrize("save_at", [(), (1,), (2,), (1, 2), (2, 3), (1, 2, 3)])
@pytest.mark.parametrize("live", [False, True])
def test_lru_replaces_a_reused_prefix_whatever_positions_the_request_asks_to_save(live, save_at, checkpoints):
    """Those up to what is reused are skipped: they neither save anything nor keep the reused prefix."""
    bench = bench_with(checkpoints=checkpoints, retention="lru")
    bench.ask([6, 6, 1], Generation(1, (5,)), save_at=(2,))
    assert saved(bench) == [[6, 6], [6, 6, 1]]
    if live:
        assert bench.ask([6, 6, 1, 4], save_at=save_at).reused_tokens == 3
        assert saved(bench) == [[6, 6], [6, 6, 1, 4, 1]]
        return
    assert bench.ask([6, 6, 2, 3], save_at=save_at).reused_tokens == 2
    on_the_way = [[6, 6, 2]] if 3 in save_at else []
    assert saved(bench) == [[6, 6, 1], *on_the_way, [6, 6, 2, 3, 1]]


def test_lru_saves_a_position_anew_once_the_prefix_that_reached_it_was_replaced():
    bench = bench_with(checkpoints=4, retention="lru")
    reused = [bench.ask([6, 6, question], save_at=(2,)).reused_tokens for question in (1, 2, 3, 4)]
    assert reused == [0, 2, 0, 2]


@pytest.mark.parametrize("retention", ["lru", "fifo"])
def test_a_beginning_that_many_conversations_share_stays_if_the_request_says_so(retention):
    bench = bench_with(checkpoints=8, retention=retention)
    asked = [bench.ask([6, 6, question], save_at=(2,), keep_saved=True).reused_tokens for question in (1, 2, 3, 4)]
    assert asked == [0, 2, 2, 2]
    assert [6, 6] in saved(bench)
    assert bench.ask([6, 6, 5], keep_saved=True).reused_tokens == 2  # no position to save is no position to keep
    assert ([6, 6] in saved(bench)) == (retention == "fifo")


@pytest.mark.parametrize("save_at", [(1,), (1, 2), (2, 4)])
def test_only_a_reused_prefix_of_a_saved_length_is_kept(save_at):
    bench = bench_with(checkpoints=8, retention="lru")
    bench.ask([6, 6, 1, 2], save_at=(3,))
    assert bench.ask([6, 6, 1, 3, 4], save_at=save_at, keep_saved=True).reused_tokens == 3
    assert [6, 6, 1] not in saved(bench)


def test_lru_makes_room_from_the_least_recently_reused_by_bytes_too():
    bench = bench_with(128 + 128 + 128, retention="lru")
    bench.ask([1])
    bench.ask([2], Generation(1, (2,)))
    assert saved(bench) == [[1, 1], [2]]
    bench.ask([1, 1], Generation(1, (2,)))
    assert saved(bench) == [[1, 1], [1, 1]]


def test_a_ceiling_lets_a_pool_worker_keep_many_prefixes():
    bench = Bench(Limits(32, 20, 1 << 20), checkpoint_ceiling=64)
    for token in range(8):
        for other in range(3):
            bench.ask([token, other])
    assert bench.runtime.checkpoint_count == 20


def test_stop_when_ends_with_stop_and_the_token_stays():
    bench = Bench()
    asked = []

    def stop_when():
        asked.append(list(bench.emitted))
        return len(bench.emitted) == 2

    assert bench.ask([1], Generation(5), stop_when=stop_when) == Completion(1, 0, 2, Finish.STOP)
    assert asked == [[1], [1, 2]]
    assert bench.runtime.tokens == bench.decoder.state == [1, 1, 2]
    assert str(bench.trace).endswith("emit2 . . . C .")


def test_stop_when_at_the_last_token_still_means_stop():
    assert Bench().ask([1], ONE, stop_when=lambda: 1).finish is Finish.STOP
    assert Bench().ask([1], ONE, stop_when=list).finish is Finish.LENGTH


def test_stop_when_is_asked_after_the_check_that_follows_emit():
    bench = Bench()
    bench.trace.after[5] = bench.trace.expire
    with pytest.raises(DeadlineExceeded):
        bench.ask([1], stop_when=lambda: pytest.fail("asked"))


def test_expiry_inside_stop_when_undoes_the_request():
    bench = Bench()
    with pytest.raises(DeadlineExceeded):
        bench.ask([1], stop_when=lambda: bench.trace.expire() or True)
    assert bench.runtime.tokens == []


@pytest.mark.parametrize(("prompt", "reused"), [([2, 3], 0), ([1, 1], 2), ([7, 6, 5], 0), ([1, 1, 5], 2)])
def test_on_prefix_is_told_once_how_much_was_reused(prompt, reused):
    bench = Bench()
    bench.ask([1])
    bench.trace.clear()
    told = []
    completion = bench.ask(prompt, on_prefix=lambda n: told.append((n, list(bench.trace.operations))))
    assert completion.reused_tokens == reused
    assert told == [(reused, ["C"] if reused else ["C", "R"])]


def test_an_error_of_on_prefix_undoes_the_request():
    bench = Bench()
    bench.ask([1])
    bench.trace.clear()
    with pytest.raises(ZeroDivisionError):
        bench.ask([2], on_prefix=lambda n: 1 // n)
    assert bench.trace.operations == ["C", "R", "S"]
    assert bench.decoder.state == [1, 1]


PHASES = [phase.name for phase in fields(Timings) if not phase.name.startswith("_")]


class Ticking:
    """A stand-in for perf_counter: each operation of the fixture takes a second, all else nothing."""

    def __init__(self, bench: Bench) -> None:
        self.trace = bench.trace

    def __call__(self) -> float:
        return float(len(self.trace.operations))


@pytest.fixture
def ticking(monkeypatch):
    bench = Bench()
    monkeypatch.setattr("prism_core.timings.perf_counter", Ticking(bench))
    return bench


def seconds(timings: Timings) -> dict[str, float]:
    return {phase: getattr(timings, phase) for phase in PHASES if getattr(timings, phase)}


def test_the_phases_hold_each_operation_once(ticking):
    timings = Timings()
    ticking.ask(LONG, Generation(3), timings=timings, save_at=(5,))
    assert " ".join(ticking.trace.operations) == "C R I2 I3 I4 I5 I6 C I7 E0 P E3 emit3 P E6 emit6 P E4 emit4 C"
    assert seconds(timings) == {
        "rollback_snapshot": 1.0,
        "prefix_preparation": 1.0,
        "prefill_ingestion": 6.0,
        "prefill_evaluation": 1.0,
        "decode_evaluation": 3.0,
        "sampling": 3.0,
        "callback": 3.0,
        "completion_snapshot": 2.0,
    }


class Noting:
    """A sampler whose copying and restoring are operations of the trace."""

    def __init__(self, trace):
        self.trace = trace

    def sample(self, logits):
        return 1

    def copy(self):
        self.trace.done("copy")
        return self

    def restore(self, copy):
        self.trace.done("back")


def test_the_phases_of_a_failed_request_end_with_its_recovery(ticking):
    timings = Timings()
    ticking.trace.after[4] = ticking.trace.expire
    sampler = Noting(ticking.trace)
    with pytest.raises(DeadlineExceeded):
        ticking.ask([2, 3], timings=timings, sampler=sampler, on_prefix=lambda n: ticking.trace.done("told"))
    assert ticking.trace.operations == ["copy", "C", "R", "told", "I2", "S", "back"]
    assert seconds(timings) == {
        "sampler_copy": 1.0,
        "rollback_snapshot": 1.0,
        "prefix_preparation": 1.0,
        "callback": 1.0,
        "prefill_ingestion": 1.0,
        "recovery": 2.0,
    }


def test_a_refused_requests_giving_back_is_recovery_and_its_checks_are_no_phase(ticking):
    timings = Timings()
    ticking.trace.at_check[0] = lambda: ticking.trace.done("the first check")
    with pytest.raises(InvalidRequest):
        ticking.ask([], timings=timings, sampler=Noting(ticking.trace))
    assert ticking.trace.operations == ["copy", "the first check", "back"]
    assert seconds(timings) == {"sampler_copy": 1.0, "recovery": 1.0}


def test_timings_start_anew_with_each_request_and_stop_with_it(ticking):
    timings = Timings()
    ticking.ask(LONG, timings=timings)
    ticking.ask([1], Generation(2), timings=timings)
    assert sum(seconds(timings).values()) == 10.0
    ticking.trace.operations.append("time passes")
    before = seconds(timings)
    timings.enter(None)
    assert seconds(timings) == before


def test_a_failed_recovery_and_a_refusal_are_timed_as_well(ticking):
    timings = Timings()
    ticking.decoder.restore_errors[()] = OSError()
    ticking.trace.instead[2] = raising(ValueError())
    with pytest.raises(RestoreFailed):
        ticking.ask([1], timings=timings)
    assert seconds(timings) == {"rollback_snapshot": 1.0, "prefix_preparation": 1.0}
    with pytest.raises(RuntimeFaulted):
        ticking.ask([1], timings=timings)
    assert seconds(timings) == {}


def test_timings_are_records_of_seconds():
    assert Timings() == Timings(*[0.0] * 10)
    for inner in (11, 12):
        with pytest.raises(TypeError):
            Timings(*[0.0] * inner)
    running = Timings()
    running.enter(None)
    running.enter("sampling")
    assert running == Timings()  # no phase has ended
    assert repr(Timings(sampling=2.0)) == (
        "Timings(sampler_copy=0.0, rollback_snapshot=0.0, prefix_preparation=0.0, prefill_ingestion=0.0, "
        "prefill_evaluation=0.0, decode_evaluation=0.0, sampling=2.0, callback=0.0, completion_snapshot=0.0, "
        "recovery=0.0)"
    )
    bench = Bench()
    timings = Timings()
    bench.ask([1], timings=timings)
    assert all(getattr(timings, phase) >= 0 for phase in PHASES)
    assert timings.decode_evaluation > 0
    assert timings.recovery == 0
