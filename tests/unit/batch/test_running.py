"""Running a batch on a real broker: every line once, whoever dies, stops, cancels or stands still."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker import keys
from broker.answers import Claim
from broker.batch.errors import BadFile, Busy, HeldElsewhere, Interrupted, LeaseLost
from broker.batch.lease import LEASE_MS, BatchLease, cancel_batch, read_batch, read_batches
from broker.batch.ledger import Ledger, part_of
from broker.errors import NotFound
from tests.conformance.rig import Rig
from tests.unit.batch.players import Bench, Player, wait_for
from tests.unit.batch.samples import chat, read, text

SHARED = "s" * 400


def many(count: int, **body: Any) -> list[dict[str, Any]]:
    return [chat(f"c{number}", f"question {number}", **body) for number in range(1, count + 1)]


def ids(path: Path) -> list[str]:
    return [value["custom_id"] for value in read(path)] if path.exists() else []


def check_once(bench: Bench, count: int) -> None:
    """Every custom_id stands once, in the output or in the errors."""
    found = Counter(ids(bench.files.output) + ids(bench.files.errors))
    assert set(found.values()) == {1}
    assert len(found) == count


@pytest.fixture
def player(rig: Rig) -> Iterator[Player]:
    with Player(rig, "w1") as player:
        yield player


# --- answers -------------------------------------------------------------------------------------------------------


def test_every_line_is_answered_in_openais_form(rig: Rig, tmp_path: Path, player: Player) -> None:
    lines = [chat("one", "hi", model="toy"), text("two", ["a", "b"], n=2), chat("three", n=2)]
    bench = Bench(rig, tmp_path, lines)
    result = bench.run(ordered=True)
    assert (result.ended, result.totals.done, result.totals.failed) == ("completed", 3, 0)
    one, two, three = read(bench.files.output)
    assert one["id"] == f"batch_req_{bench.batch}-1-1"
    assert one["error"] is None
    assert (one["response"]["status_code"], one["response"]["request_id"]) == (200, bench.request(1))
    body = one["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "toy")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "<1><2>", "refusal": None}
    assert body["usage"]["completion_tokens"] == 2
    assert two["response"]["body"]["object"] == "text_completion"
    assert two["response"]["body"]["model"] == "toy"
    assert [choice["index"] for choice in two["response"]["body"]["choices"]] == [0, 1, 2, 3]
    assert len(three["response"]["body"]["choices"]) == 2
    assert result.totals.completion_tokens == 2 + 8 + 4
    assert sorted(player.taken)[:2] == [bench.request(1), bench.request(2)]
    assert not bench.files.errors.exists()
    assert not part_of(bench.files.output).exists()


def test_lines_that_fail_go_to_the_errors_and_the_others_go_on(rig: Rig, tmp_path: Path) -> None:
    def act(player: Player, claim: Claim) -> bool:
        what = int(claim.request.split("-")[1]) % 3
        if what == 1:
            player.answer(claim, state="failed", reason="invalid_request: the prompt is longer than context_tokens")
        elif what == 2:
            player.answer(claim, state="failed", reason="internal_error: broken")
        return what > 0

    bench = Bench(rig, tmp_path, many(6))
    with Player(rig, "w1", act=act):
        result = bench.run(ordered=True)
    assert (result.totals.done, result.totals.failed) == (2, 4)
    assert ids(bench.files.output) == ["c3", "c6"]
    errors = read(bench.files.errors)
    assert [value["response"]["status_code"] for value in errors] == [400, 500, 400, 500]
    assert errors[0]["error"] is None
    assert "context_tokens" in errors[0]["response"]["body"]["error"]["message"]
    assert "broken" in errors[1]["response"]["body"]["error"]["message"]


def test_only_failed_lines_run_again_and_under_new_names(rig: Rig, tmp_path: Path) -> None:
    broken = True

    def act(player: Player, claim: Claim) -> bool:
        fails = broken and claim.request.split("-")[1] in ("2", "4")
        if fails:
            player.answer(claim, state="failed", reason="internal_error: broken")
        return fails

    bench = Bench(rig, tmp_path, many(5))
    with Player(rig, "w1", act=act) as player:
        assert bench.run().totals.failed == 2
        assert len(player.taken) == 5
        broken = False
        result = bench.run(retry_failed=True)
        assert (result.totals.done, result.totals.failed) == (5, 0)
        assert sorted(player.taken[5:]) == [bench.request(2, 2), bench.request(4, 2)]
    check_once(bench, 5)
    assert not bench.files.errors.exists()


def test_an_answer_never_breaks_its_line_whatever_the_model_wrote(rig: Rig, tmp_path: Path) -> None:
    wild = "a\u2028b\u2029c\x85d\x0be\x1cf\r\n\t\0\U0001f600"

    def act(player: Player, claim: Claim) -> bool:
        assert player.store is not None
        outcome = player.store.finish(
            claim.request, claim.epoch, claim.ev + 1, state="done", reason="stop", n=0, usage={}, text=wild
        )
        assert outcome.status == "ok"
        player.store.settle(claim.request)
        return True

    bench = Bench(rig, tmp_path, [chat("a\u2028b")])
    with Player(rig, "w1", act=act):
        bench.run()
    (row,) = bench.files.output.read_text().splitlines()
    value = json.loads(row)
    assert value["custom_id"] == "a\u2028b"
    assert value["response"]["body"]["choices"][0]["message"]["content"] == wild


# --- feeding -------------------------------------------------------------------------------------------------------


def test_only_a_window_of_lines_is_in_the_pool_at_once(rig: Rig, tmp_path: Path) -> None:
    bench = Bench(rig, tmp_path, many(60))
    with Player(rig, "w1") as one, Player(rig, "w2") as two:
        bench.run(window=2)
    assert 1 <= max(one.most_open, two.most_open) <= 2 * 3
    check_once(bench, 60)


def test_lines_that_begin_alike_meet_one_worker_in_portions(rig: Rig, tmp_path: Path) -> None:
    values = [chat(f"c{at}", f"q{at}", f"{at % 4}" + SHARED) for at in range(160)]
    bench = Bench(rig, tmp_path, values)
    with Player(rig, "w1") as one, Player(rig, "w2") as two:
        bench.run()
    homes: dict[str, set[str]] = {}
    for player in (one, two):
        for group in player.groups:
            homes.setdefault(group, set()).add(player.name)
    together = sum(len(workers) == 1 for workers in homes.values())
    print(f"{len(homes)} groups, {together} of them at one worker")
    assert "" not in homes
    assert together >= len(homes) / 2
    assert one.taken
    assert two.taken
    check_once(bench, 160)


def test_a_pool_without_room_holds_the_batch_up_and_fails_no_line(rig: Rig, tmp_path: Path) -> None:
    small = rig.with_config(max_open_batch=1)
    bench = Bench(small, tmp_path, many(12))
    with Player(small, "w1") as player:
        assert bench.run().totals.done == 12
    assert player.most_open == 1


def test_a_batch_waits_for_the_first_worker_and_then_runs(rig: Rig, tmp_path: Path) -> None:
    bench = Bench(rig, tmp_path, many(3, model="toy"))
    running = bench.start()
    wait_for(lambda: rig.redis.exists(keys.batch(bench.batch)), "the lease")
    with Player(rig, "w1"):
        assert running.wait().totals.done == 3


def test_a_model_that_the_pool_has_never_run_is_told_with_its_line_and_leaves_no_file(
    rig: Rig, tmp_path: Path, player: Player
) -> None:
    bench = Bench(rig, tmp_path, [chat("a", model="toy"), chat("b", model="gpt-4o")])
    with pytest.raises(BadFile, match="line 2: the pool has never run model 'gpt-4o'; it has toy"):
        bench.run()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
    assert not player.taken
    assert bench.run(model="toy").totals.done == 2


def test_the_pool_keeps_recorded_answers_for_minutes_and_others_for_a_day(
    rig: Rig, tmp_path: Path, player: Player
) -> None:
    bench = Bench(rig, tmp_path, many(6))
    bench.run()
    other = rig.submit().request
    wait_for(lambda: rig.state(other) == "done", "the other request")
    for line in range(1, 7):
        for key in (keys.request(bench.request(line)), keys.log(bench.request(line))):
            assert 0 < rig.redis.ttl(key) <= 600
    assert rig.redis.ttl(keys.request(other)) > 80_000
    registry = f"{keys.RQ}:finished:open.{keys.model_tag(player.model)}.batch"
    now = time.time()
    assert {int(score) <= now + 601 for _, score in rig.redis.zrange(registry, 0, -1, withscores=True)} == {True}


# --- stops and crashes ---------------------------------------------------------------------------------------------


class Dead(BaseException):
    """The runner's process is gone."""


def test_a_runner_that_dies_after_any_record_leaves_nothing_to_generate_twice(
    rig: Rig, tmp_path: Path, player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(rig, tmp_path, many(40))
    record, left = Ledger.record, 3

    def dying(self: Ledger, entries: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Dead
        record(self, entries)

    monkeypatch.setattr(Ledger, "record", dying)
    deaths = 0
    while True:
        left = 3
        try:
            bench.run(window=1)
            break
        except Dead:
            deaths += 1
    print(f"died {deaths} times")
    assert deaths >= 2
    check_once(bench, 40)
    assert rig.stat("submitted") == 40
    assert sorted(Counter(player.taken).values()) == [1] * 40


def test_a_stopped_batch_keeps_what_it_has_and_goes_on_without_repeating_any(rig: Rig, tmp_path: Path) -> None:
    held = threading.Event()
    bench = Bench(rig, tmp_path, many(30))

    def act(player: Player, claim: Claim) -> bool:
        if len(player.taken) == 10:
            wait_for(lambda: len(ids(part_of(bench.files.output))) == 9, "nine lines")
            bench.stop.set()
            held.wait(20)
        return False

    with Player(rig, "w1", act=act) as player:
        with pytest.raises(Interrupted):
            bench.run()
        assert read_batch(rig.redis, bench.batch).state == "stopped"
        assert read_batch(rig.redis, bench.batch).runner == ""
        held.set()
        bench.stop.clear()
        assert bench.run().totals.done == 30
        assert Counter(player.taken) == Counter(set(player.taken))
    assert rig.stat("submitted") == 30
    check_once(bench, 30)


def test_answers_that_came_while_no_runner_lived_are_fetched_not_generated(rig: Rig, tmp_path: Path) -> None:
    bench = Bench(rig, tmp_path, many(6))
    running = bench.start(window=3)
    wait_for(lambda: rig.redis.zcard(keys.LIVE + ":batch") == 6, "six lines in the pool")
    bench.stop.set()
    with pytest.raises(Interrupted):
        running.wait()
    with Player(rig, "w1") as player:
        wait_for(lambda: rig.redis.zcard(keys.LIVE + ":batch") == 0, "their end")
        bench.stop.clear()
        assert bench.run().totals.done == 6
        assert len(player.taken) == 6


def test_a_pool_that_lost_its_data_costs_no_line(rig: Rig, tmp_path: Path) -> None:
    bench = Bench(rig, tmp_path, many(40, model="toy"))
    flushed = threading.Event()

    def act(player: Player, claim: Claim) -> bool:
        if len(player.taken) == 8 and not flushed.is_set():
            flushed.set()
            rig.redis.flushall()
            return True
        return False

    with Player(rig, "w1", act=act) as player:
        result = bench.run()
    assert (result.totals.done, result.totals.failed) == (40, 0)
    check_once(bench, 40)
    print(f"{len(player.taken)} turns for 40 lines")


def test_a_model_that_the_pool_forgot_is_waited_for_and_other_lines_go_on(rig: Rig, tmp_path: Path) -> None:
    values = [chat(f"c{at}", f"q{at}", model=("large", "small")[at % 2]) for at in range(8)]
    bench = Bench(rig, tmp_path, values)
    with Player(rig, "w0", model="large+1", called="large", act=lambda player, claim: True):
        pass
    with Player(rig, "w1", model="small+1", called="small"):
        rig.redis.srem(keys.WORKERS, "w0")
        running = bench.start()
        wait_for(lambda: rig.redis.exists(keys.request(bench.request(1))), "the first line")
        rig.redis.hdel(keys.NAMES, "large")
        rig.redis.hdel(keys.MODELS, "large+1")
        rig.redis.delete(*[keys.request(bench.request(line)) for line in (1, 3, 5, 7)])
        wait_for(lambda: len(ids(part_of(bench.files.output))) == 4, "the small ones")
        wait_for(lambda: any(one.waiting_for == "a worker of large" for one in bench.seen), "word of it")
        with Player(rig, "w2", model="large+1", called="large"):
            assert running.wait().totals.done == 8
    check_once(bench, 8)


def test_an_input_that_changes_under_a_running_batch_stops_it(rig: Rig, tmp_path: Path) -> None:
    bench = Bench(rig, tmp_path, many(20))
    over = threading.Event()

    def act(player: Player, claim: Claim) -> bool:
        if len(player.taken) == 5:
            wait_for(lambda: len(ids(part_of(bench.files.output))) == 4, "four lines")
            with open(bench.files.input, "ab") as file:
                file.write(b"\n")
            over.wait(20)
        return False

    with Player(rig, "w1", act=act):
        with pytest.raises(BadFile, match="changed while the batch was running"):
            bench.run()
        over.set()
    assert len(ids(part_of(bench.files.output))) == 4
    with pytest.raises(BadFile, match="not the file that the batch was begun with"):
        bench.run()


# --- cancellation and expiry ---------------------------------------------------------------------------------------


def test_a_cancelled_batch_keeps_finished_lines_and_the_rest_become_errors(rig: Rig, tmp_path: Path) -> None:
    bench = Bench(rig, tmp_path, many(500))

    def act(player: Player, claim: Claim) -> bool:
        if len(player.taken) == 6:
            assert cancel_batch(rig.redis, rig.config, bench.batch) == "cancelling"
            wait_for(lambda: player.store and player.store.poll(claim.request, claim.epoch).cancel, "the flag")
            player.answer(claim, state="cancelled", reason="cancelled")
            return True
        return False

    with Player(rig, "w1", act=act):
        result = bench.run()
    assert result.ended == "cancelled"
    assert 5 <= result.totals.done <= 12
    check_once(bench, 500)
    codes = {value["error"]["code"] for value in read(bench.files.errors)}
    assert codes == {"batch_cancelled"}
    assert all(value["response"] is None for value in read(bench.files.errors))
    assert rig.redis.zcard(keys.LIVE) == 0
    assert cancel_batch(rig.redis, rig.config, bench.batch) == "cancelled"


def test_cancelled_while_nobody_runs_it_a_batch_ends_when_it_is_taken_up(rig: Rig, tmp_path: Path) -> None:
    bench = Bench(rig, tmp_path, many(20))
    running = bench.start(window=2)
    wait_for(lambda: rig.redis.zcard(keys.LIVE + ":batch") == 4, "four lines in the pool")
    bench.stop.set()
    with pytest.raises(Interrupted):
        running.wait()
    assert cancel_batch(rig.redis, rig.config, bench.batch) == "waiting"
    with Player(rig, "w1", act=lambda player, claim: claim.request != bench.request(1) and player.stopping):
        wait_for(lambda: rig.record(bench.request(1)).state == "done", "one line")
        bench.stop.clear()
        result = bench.run()
    assert result.ended == "cancelled"
    assert "c1" in ids(bench.files.output)
    check_once(bench, 20)
    assert rig.redis.zcard(keys.LIVE) == 0
    with Player(rig, "w2"):
        assert bench.run(retry_failed=True).totals.done == 20
    check_once(bench, 20)


def test_a_batch_past_its_time_ends_as_expired(rig: Rig, tmp_path: Path, player: Player) -> None:
    bench = Bench(rig, tmp_path, many(600))
    result = bench.run(expires_at=time.time() - 1)
    assert (result.ended, result.totals.done) == ("expired", 0)
    assert {value["error"]["code"] for value in read(bench.files.errors)} == {"batch_expired"}
    check_once(bench, 600)
    assert not player.taken


def test_a_batch_that_waits_for_a_model_can_expire_and_be_cancelled(rig: Rig, tmp_path: Path) -> None:
    bench = Bench(rig, tmp_path, many(3, model="toy"))
    assert bench.run(expires_at=time.time() + 0.5).ended == "expired"
    other = Bench(rig, tmp_path, many(3, model="toy"))
    for path in (bench.files.output, bench.files.errors, bench.files.plan):
        path.unlink(missing_ok=True)
    assert other.run(cancelled=lambda: True).ended == "cancelled"
    check_once(other, 3)


def test_a_line_that_an_operator_cancels_is_an_error_and_the_rest_go_on(rig: Rig, tmp_path: Path) -> None:
    bench = Bench(rig, tmp_path, many(5))
    running = bench.start(window=2)
    wait_for(lambda: rig.redis.exists(keys.request(bench.request(2))), "line 2")
    rig.cancel(bench.request(2), reason="by hand")
    with Player(rig, "w1"):
        result = running.wait()
    assert (result.totals.done, result.totals.failed) == (4, 1)
    (error,) = read(bench.files.errors)
    assert (error["custom_id"], error["response"]["status_code"]) == ("c2", 409)


# --- leases --------------------------------------------------------------------------------------------------------


def lease_on(rig: Rig, batch: str, host: str) -> BatchLease:
    lease = BatchLease(rig.redis, rig.config, batch, "local")
    lease._host = host
    lease.runner = f"{host}:{lease.runner.partition(':')[2]}"
    return lease


def test_one_runner_has_a_batch_and_another_machine_waits_for_its_lease(rig: Rig) -> None:
    first, second = lease_on(rig, "B", "here"), lease_on(rig, "B", "there")
    first.take({"state": "running"})
    with pytest.raises(HeldElsewhere, match="is being run on here"):
        second.take({})
    first.renew({"done": 3})
    rig.redis.hset(keys.batch("B"), "until", 1)
    second.take({})
    assert second.epoch == first.epoch + 1
    with pytest.raises(LeaseLost):
        first.renew({})
    first.release({"state": "completed"})
    assert read_batch(rig.redis, "B").facts["done"] == "3"
    assert read_batch(rig.redis, "B").runner == second.runner


def test_on_one_machine_the_lock_decides_and_nobody_waits(rig: Rig) -> None:
    first, second = lease_on(rig, "B", "here"), lease_on(rig, "B", "here")
    first.take({})
    second.take({})
    with pytest.raises(LeaseLost):
        first.renew({})


def test_a_lease_is_renewed_by_its_holder_after_any_outage_but_not_once_it_was_another_s(rig: Rig) -> None:
    first = lease_on(rig, "B", "here")
    first.take({})
    rig.redis.hset(keys.batch("B"), "until", 1)
    first.renew({})
    rig.redis.flushall()
    first.renew({"done": 1})
    assert read_batch(rig.redis, "B").runner == first.runner
    second = lease_on(rig, "B", "there")
    rig.redis.hset(keys.batch("B"), "until", 1)
    second.take({})
    second.release({"state": "completed"})
    with pytest.raises(LeaseLost):
        first.renew({})


def taken_elsewhere(rig: Rig, batch: str) -> None:
    """The lease lapses, and a runner of another machine takes it."""
    while True:
        rig.redis.hset(keys.batch(batch), "until", 1)
        try:
            lease_on(rig, batch, "elsewhere").take({})
            return
        except HeldElsewhere:
            continue  # renewed in between


def test_a_runner_whose_lease_another_took_stops_and_the_other_goes_on(rig: Rig, tmp_path: Path) -> None:
    bench = Bench(rig, tmp_path, many(20))
    over = threading.Event()

    def act(player: Player, claim: Claim) -> bool:
        if len(player.taken) == 4:
            wait_for(lambda: len(ids(part_of(bench.files.output))) == 3, "three lines")
            taken_elsewhere(rig, bench.batch)
            over.wait(20)
        return False

    with Player(rig, "w1", act=act):
        with pytest.raises(LeaseLost):
            bench.run()
        with pytest.raises(HeldElsewhere):
            bench.run()
        over.set()
        rig.redis.hset(keys.batch(bench.batch), "until", 1)
        assert bench.run().totals.done == 20
    check_once(bench, 20)


def test_before_it_records_a_runner_whose_clock_jumped_asks_whether_the_batch_is_still_its_own(
    rig: Rig, tmp_path: Path, player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    from broker.batch import runner as module

    bench = Bench(rig, tmp_path, many(5))
    jumped = [0.0]
    look = module.Runner._look

    def late(self: Any) -> int:
        # The process is stopped here for longer than its lease, and another one takes the batch.
        wait_for(lambda: len(player.taken) == 5 or not self._flying, "the answers")
        if self._flying and not jumped[0]:
            jumped[0] = LEASE_MS / 1000
            self._clock = lambda: time.monotonic() + jumped[0]
            taken_elsewhere(rig, bench.batch)
        return look(self)

    monkeypatch.setattr(module.Runner, "_look", late)
    with pytest.raises(LeaseLost):
        bench.run(window=8)
    assert ids(part_of(bench.files.output)) == []


def test_two_runs_of_one_output_at_once_are_refused(rig: Rig, tmp_path: Path) -> None:
    bench = Bench(rig, tmp_path, many(3))
    running = bench.start()
    wait_for(lambda: rig.redis.exists(keys.batch(bench.batch)), "the lease")
    for _ in range(20):
        with pytest.raises(Busy):
            bench.run()
    with Player(rig, "w1"):
        assert running.wait().totals.done == 3


# --- what is told --------------------------------------------------------------------------------------------------


def test_progress_and_the_pools_counts_tell_how_far_a_batch_is(rig: Rig, tmp_path: Path, player: Player) -> None:
    bench = Bench(rig, tmp_path, many(30))
    bench.run()
    known = read_batch(rig.redis, bench.batch)
    assert known.state == "completed"
    assert (known.facts["done"], known.facts["failed"], known.facts["total"]) == ("30", "0", "30")
    assert known.facts["completion_tokens"] == "60"
    assert [one.batch for one in read_batches(rig.redis)] == [bench.batch]
    assert bench.seen[0].totals.lines == 30
    with pytest.raises(NotFound):
        read_batch(rig.redis, "absent")
    with pytest.raises(NotFound):
        cancel_batch(rig.redis, rig.config, bench.batch, "somebody")


def test_speed_is_that_of_the_last_seconds() -> None:
    from broker.batch.totals import Speed

    now = 0.0
    speed = Speed(lambda: now, window_s=10)
    assert speed.look(0, 0) == (0.0, 0.0)
    for second in range(1, 101):
        now = float(second)
        rates = speed.look(second if second <= 50 else 50 + (second - 50) * 5, second * 10)
    assert rates == (5.0, 10.0)
