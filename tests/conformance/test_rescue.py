"""Lost workers: fences, takeover, poison turns, reaping in steps, drains, sweeps and the audit."""

from __future__ import annotations

import pytest

from broker import keys
from broker.errors import NotFound, NotMember
from broker.reap import rescue
from broker.store import WorkerStore
from tests.conformance.rig import Rig, begin, check_settled, check_stream, emit, end, must_take, play, tokens


def test_a_lost_worker_s_turn_goes_on_elsewhere_at_the_next_token(rig: Rig) -> None:
    first, second = rig.worker("w1"), rig.worker("w2")
    request = rig.submit(conversation="c").request
    claim = must_take(first)
    begin(first, claim)
    emit(first, claim, [1, 2, 3])
    assert rig.kill(first) == 1
    assert rig.state(request) == "queued"
    assert second.wait_bell(0.01)
    heir = must_take(second)
    assert (heir.epoch, heir.ev, heir.n, heir.emitted, heir.attempt) == (3, 5, 3, [1, 2, 3], 2)
    play(second, heir, [4])
    stream = rig.log(request)
    check_stream(stream)
    assert tokens(stream) == [1, 2, 3, 4]
    assert [event.data["why"] for event in stream if event.kind == "moved"] == ["worker_lost"]
    check_settled(rig)


def test_one_request_is_rescued_alone_and_only_from_where_it_runs(rig: Rig) -> None:
    first = rig.worker("w1")
    request = rig.submit().request
    assert rescue(rig.scripts.run, request, "w1") == "not_there"
    claim = must_take(first)
    assert rescue(rig.scripts.run, request, "w2") == "not_there"
    assert rescue(rig.scripts.run, request, "w1") == "moved"
    assert rescue(rig.scripts.run, request, "w1") == "not_there"
    assert first.poll(request, claim.epoch).status == "fenced"
    claim = must_take(first)
    end(first, claim, settle=False)
    assert rescue(rig.scripts.run, request, "w1") == "final"
    assert rescue(rig.scripts.run, keys.new_ulid(), "w1") == "not_there"
    check_settled(rig)


def test_a_rescued_turn_goes_to_the_front(rig: Rig) -> None:
    first = rig.worker("w1")
    lost = rig.submit().request
    must_take(first)
    waiting = rig.submit().request
    rig.kill(first)
    second = rig.worker("w2")
    assert [must_take(second, [lost]).request for _ in range(2)] == [lost, waiting]


def test_a_cancelled_turn_of_a_lost_worker_ends_as_cancelled(rig: Rig) -> None:
    worker = rig.worker()
    request = rig.submit(conversation="c").request
    must_take(worker)
    rig.cancel(request, reason="enough")
    rig.kill(worker)
    record = rig.record(request)
    assert (record.state, record.reason) == ("cancelled", "enough")
    check_stream(rig.log(request))
    check_settled(rig)


def test_a_late_turn_of_a_lost_worker_ends_as_expired(rig: Rig) -> None:
    worker = rig.worker()
    request = rig.submit().request
    must_take(worker)
    rig.age(request)
    rig.kill(worker)
    assert rig.state(request) == "expired"
    check_settled(rig)


def test_a_turn_that_kills_three_workers_before_its_first_token_fails(rig: Rig) -> None:
    request = rig.submit(conversation="c").request
    waiting = rig.submit(conversation="c").request
    for number in range(3):
        worker = rig.worker(f"w{number}")
        claim = must_take(worker)
        assert claim.request == request
        begin(worker, claim)
        rig.kill(worker)
    record = rig.record(request)
    assert (record.state, record.reason, record.attempt) == ("failed", "worker_lost", 3)
    assert rig.stat("poisoned") == 1
    stream = rig.log(request)
    check_stream(stream)
    assert stream[-1].data["usage"] == {"prompt_tokens": 3, "completion_tokens": 0}
    assert must_take(rig.worker("w9")).request == waiting


def test_new_tokens_forgive_earlier_losses_but_twenty_takes_are_the_end(rig: Rig) -> None:
    request = rig.submit().request
    for number in range(20):
        worker = rig.worker(f"w{number}")
        claim = must_take(worker)
        assert claim.attempt == number + 1
        begin(worker, claim)
        emit(worker, claim, [number])
        rig.kill(worker)
    assert rig.state(request) == "failed"
    stream = rig.log(request)
    check_stream(stream)
    assert tokens(stream) == list(range(20))


def test_yields_and_drains_count_no_attempt(rig: Rig) -> None:
    request = rig.submit(priority="batch").request
    worker = rig.worker()
    for _ in range(25):
        claim = must_take(worker)
        assert claim.attempt == 1
        worker.give_back(request, claim.epoch, "preempted")
    claim = must_take(worker)
    worker.leave()
    claim = must_take(rig.worker("w2"))
    assert (claim.request, claim.attempt) == (request, 1)


def test_a_worker_with_a_lease_is_not_reaped(rig: Rig) -> None:
    worker = rig.worker()
    rig.submit()
    must_take(worker)
    reaper = rig.reaper()
    assert reaper.tick().reaped == []
    assert worker.beat().draining is False


def test_reaping_in_small_steps_keeps_the_order_and_loses_nothing(rig: Rig) -> None:
    small = rig.with_config(reap_step=2)
    worker = small.worker("w1")
    names = [f"c{number}" for number in range(7)]
    for name in names:
        small.submit(conversation=name)
        play(worker, must_take(worker), [1])
    queued = [small.submit(conversation=name).request for name in names]
    assert small.queue("w.w1") == queued
    assert small.kill(worker) == 7
    assert small.queue("open.any.interactive") == queued
    assert small.kill(worker) == 0
    leftovers = [key for key in rig.redis.keys("prism:*") if b"w1" in key]
    assert leftovers == []
    assert rig.redis.smembers(keys.WORKERS) == set()


def test_a_reaping_that_was_cut_off_is_ended_by_the_next_sweep(rig: Rig) -> None:
    small = rig.with_config(reap_step=1)
    worker = small.worker("w1")
    for name in ("a", "b", "c"):
        small.submit(conversation=name)
        play(worker, must_take(worker), [1])
    queued = [small.submit(conversation=name).request for name in ("a", "b", "c")]
    rig.lapse(worker)
    reply = small.scripts.run("reap", [keys.worker("w1")], ["w1", "worker_lost", "0"])
    assert reply[0] == b"more"
    assert rig.redis.smembers(keys.REAPING) == {b"w1"}
    with pytest.raises(NotMember):
        worker.beat()
    assert small.reaper().tick().reaped == ["w1"]
    assert rig.redis.smembers(keys.REAPING) == set()
    assert small.queue("open.any.interactive") == queued


class Clock:
    """Monotonic time that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_reaper_waits_one_whole_lease_before_it_trusts_lapsed_leases(rig: Rig) -> None:
    worker = rig.worker()
    request = rig.submit().request
    must_take(worker)
    rig.lapse(worker)
    clock = Clock()
    reaper = rig.reaper(clock=clock)
    lease_s = rig.config.lease_ms / 1000
    for _ in range(9):
        done = reaper.tick()
        assert done.held_off
        assert done.reaped == []
        clock.now += lease_s / 10
    clock.now += lease_s / 5
    assert reaper.tick().reaped == ["w1"]
    assert rig.state(request) == "queued"


def test_a_reaper_that_was_cut_off_itself_waits_again(rig: Rig) -> None:
    clock = Clock()
    reaper = rig.reaper(clock=clock)
    lease_s = rig.config.lease_ms / 1000
    for _ in range(12):
        reaper.tick()
        clock.now += lease_s / 10
    worker = rig.worker()
    clock.now += lease_s * 3
    rig.lapse(worker)
    assert reaper.tick().held_off
    worker.beat()
    for _ in range(12):
        assert reaper.tick().reaped == []
        clock.now += lease_s / 10
    assert worker.beat().draining is False


def test_a_lapsed_member_that_beats_again_keeps_its_turn(rig: Rig) -> None:
    worker = rig.worker()
    rig.submit()
    claim = must_take(worker)
    begin(worker, claim)
    rig.lapse(worker)
    worker.beat()
    emit(worker, claim, [1])
    assert end(worker, claim).status == "ok"
    check_settled(rig)


def test_a_terminal_turn_of_a_lost_worker_gets_its_rq_record_finalised(rig: Rig) -> None:
    worker = rig.worker()
    request = rig.submit().request
    claim = must_take(worker)
    begin(worker, claim)
    end(worker, claim, settle=False)
    assert rig.rq(request) == "started"
    rig.kill(worker)
    assert rig.rq(request) == "finished"
    assert rig.state(request) == "done"
    check_settled(rig)


def test_a_worker_that_forgot_an_unsettled_turn_gets_nothing_twice(rig: Rig) -> None:
    worker = rig.worker()
    request = rig.submit().request
    claim = must_take(worker)
    end(worker, claim, settle=False)
    assert worker.take() is None
    assert rig.rq(request) == "finished"
    check_settled(rig)


def test_a_lost_take_reply_gives_the_same_turn_again_under_a_new_epoch(rig: Rig) -> None:
    worker = rig.worker()
    request = rig.submit().request
    rig.submit()
    lost = must_take(worker)
    again = must_take(worker)
    assert (again.request, again.epoch, again.attempt) == (request, lost.epoch + 1, 1)
    assert worker.poll(request, lost.epoch).status == "fenced"
    assert must_take(worker, [request]).request != request


def test_settle_of_a_running_turn_is_refused(rig: Rig) -> None:
    worker = rig.worker()
    request = rig.submit().request
    must_take(worker)
    assert worker.settle(request).status == "fenced"


def test_draining_moves_queued_turns_and_takes_no_more(rig: Rig) -> None:
    small = rig.with_config(reap_step=2)
    one, two = small.worker("w1"), small.worker("w2")
    for number in range(5):
        small.submit(conversation=f"c{number}")
        play(one, must_take(one), [1])
    queued = [small.submit(conversation=f"c{number}").request for number in range(5)]
    running = must_take(one)
    assert one.drain() == 4
    assert one.drain() == 0
    assert one.beat().draining
    assert one.take([running.request]) is None
    assert small.queue("open.any.interactive") == queued[1:]
    assert must_take(two).request == queued[1]
    begin(one, running)
    assert one.give_back(running.request, running.epoch, "drain").status == "ok"
    one.leave()
    assert must_take(two, [queued[1]]).request == queued[0]
    moved = [event for event in small.log(queued[0]) if event.kind == "moved"]
    assert [event.data["why"] for event in moved] == ["drain"]


def test_draining_an_unknown_worker_is_not_found(rig: Rig) -> None:
    worker = rig.worker()
    worker.leave()
    with pytest.raises(NotFound):
        worker.drain()


def test_leaving_hands_over_a_running_turn_and_forgets_the_worker(rig: Rig) -> None:
    one = rig.worker("w1")
    request = rig.submit(conversation="c").request
    claim = must_take(one)
    begin(one, claim)
    emit(one, claim, [1])
    one.leave()
    one.leave()
    heir = must_take(rig.worker("w2"))
    assert (heir.request, heir.emitted, heir.attempt) == (request, [1], 1)


def test_a_parked_turn_is_taken_when_a_worker_of_its_model_comes(rig: Rig) -> None:
    first = rig.worker("w1")
    request = rig.submit(conversation="c").request
    claim = must_take(first)
    begin(first, claim)
    emit(first, claim, [1])
    rig.kill(first)
    assert rig.queue("open.interactive") == [request]
    assert rig.worker("w2", model="other+1").take() is None
    assert must_take(rig.worker("w3")).emitted == [1]


def test_the_sweep_ends_waiting_turns_at_their_deadline(rig: Rig) -> None:
    worker = rig.worker()
    active = rig.submit(conversation="c").request
    boxed = rig.submit(conversation="c").request
    last = rig.submit(conversation="c").request
    rig.age(active)
    rig.age(boxed)
    assert rig.reaper().tick().expired == 2
    assert [rig.state(request) for request in (active, boxed, last)] == ["expired", "expired", "queued"]
    for request in (active, boxed):
        check_stream(rig.log(request))
    assert must_take(worker).request == last


def test_the_sweep_ends_a_running_turn_only_when_it_is_overdue(rig: Rig) -> None:
    worker = rig.worker()
    request = rig.submit().request
    claim = must_take(worker)
    rig.age(request, ms=1)
    patient = rig.with_config(overdue_ms=60_000)
    assert patient.reaper().tick().expired == 0
    rig.age(request, ms=rig.config.overdue_ms + 1)
    assert rig.reaper().tick().expired == 1
    assert rig.state(request) == "expired"
    assert end(worker, claim, settle=False).status == "fenced"
    assert worker.take() is None
    check_stream(rig.log(request))
    check_settled(rig)


def test_the_audit_places_a_queued_turn_that_is_in_no_list(rig: Rig) -> None:
    worker = rig.worker()
    request = rig.submit().request
    rig.redis.delete(keys.RQ + ":queue:open.any.interactive")
    assert worker.take() is None
    assert rig.reaper().audit_all() == 1
    assert must_take(worker).request == request


def test_the_audit_leaves_healthy_turns_alone(rig: Rig) -> None:
    one = rig.worker("w1")
    for name in ("a", "b", None):
        for _ in range(3):
            rig.submit(conversation=name)
    running = must_take(one)
    before = {key: rig.redis.dump(key) for key in rig.redis.keys("prism:*")}
    assert rig.reaper().audit_all() == 0
    assert {key: rig.redis.dump(key) for key in rig.redis.keys("prism:*")} == before
    assert running.request


@pytest.mark.parametrize("damage", ["act", "box", "home", "run", "act and queue"])
def test_the_audit_mends_whatever_was_lost(rig: Rig, damage: str) -> None:
    one = rig.worker("w1")
    requests = [rig.submit(conversation="c").request]
    play(one, must_take(one), [1])
    requests += [rig.submit(conversation="c").request for _ in range(3)]
    claim = must_take(one).conversation
    if damage != "run":
        one.give_back(requests[1], 2 - 1, "drain")
    part = {
        "act": [keys.conversation_part(claim, "act")],
        "box": [keys.conversation_part(claim, "box")],
        "home": [keys.RQ + ":queue:w.w1"],
        "run": [keys.worker("w1") + ":run"],
        "act and queue": [keys.conversation_part(claim, "act"), keys.RQ + ":queue:w.w1"],
    }[damage]
    rig.redis.delete(*part)
    reaper = rig.reaper()
    assert reaper.audit_all() > 0
    while reaper.audit_all():
        pass
    if damage == "run":
        assert must_take(one).request == requests[1]
        rig.redis.delete(keys.worker("w1") + ":run")
        assert reaper.audit_all() == 1
        rig.kill(one)
        one = rig.worker("w2")
    done = []
    while (claim_now := one.take(done)) is not None:
        done.append(claim_now.request)
        play(one, claim_now, [1])
    assert sorted(done) == sorted(requests[1:])
    check_settled(rig)


def test_the_audit_rescues_a_turn_that_runs_at_nobody(rig: Rig) -> None:
    worker = rig.worker()
    request = rig.submit().request
    must_take(worker)
    rig.redis.delete(keys.worker("w1"), keys.worker("w1") + ":run")
    rig.redis.srem(keys.WORKERS, "w1")
    assert rig.reaper().audit_all() == 1
    assert must_take(rig.worker("w2")).request == request


def test_the_audit_forgets_ended_and_vanished_requests(rig: Rig) -> None:
    rig.redis.zadd(keys.LIVE, {"ghost": 9e12})
    assert rig.reaper().audit_all() == 1
    assert rig.redis.zcard(keys.LIVE) == 0


def test_joining_twice_is_joining_once(rig: Rig) -> None:
    worker = rig.worker()
    assert worker.join() == rig.redis.get(keys.BOOT).decode()
    assert rig.redis.smembers(keys.WORKERS) == {b"w1"}
    assert rig.stat("joined") == 1


def test_a_broker_that_came_back_empty_refuses_the_old_workers(rig: Rig) -> None:
    worker: WorkerStore = rig.worker()
    rig.submit()
    claim = must_take(worker)
    rig.redis.flushall()
    with pytest.raises(NotMember):
        worker.beat()
    assert worker.append(claim.request, claim.epoch, 1, [b"x"], 0).status == "gone"
