"""The token log: order, resends, fences, and the flags that come back with each append."""

from __future__ import annotations

import pytest

from broker import events, keys
from broker.errors import NotFound
from tests.conformance.rig import MODEL, Rig, begin, check_settled, check_stream, emit, end, must_take, play, tokens


def _delta(n: int) -> bytes:
    return events.delta(n=n, ids=[100 + n], text="x")


def test_an_append_that_is_sent_again_adds_nothing(rig: Rig) -> None:
    worker = rig.worker()
    claim = must_take(worker) if rig.submit() else None
    assert claim is not None
    for _ in range(2):
        flags = worker.append(claim.request, claim.epoch, 1, [_delta(1), _delta(2)], 2)
        assert (flags.status, flags.stored_ev) == ("ok", 2)
    assert tokens(rig.log(claim.request)) == [101, 102]
    assert rig.stat("generation_tokens") == 2


def test_a_resend_may_carry_more_than_the_first_try(rig: Rig) -> None:
    worker = rig.worker()
    rig.submit()
    claim = must_take(worker)
    worker.append(claim.request, claim.epoch, 1, [_delta(1)], 1)
    flags = worker.append(claim.request, claim.epoch, 1, [_delta(1), _delta(2), _delta(3)], 3)
    assert flags.stored_ev == 3
    assert tokens(rig.log(claim.request)) == [101, 102, 103]


def test_an_append_after_missing_events_is_refused_and_says_where_to_go_on(rig: Rig) -> None:
    worker = rig.worker()
    rig.submit()
    claim = must_take(worker)
    worker.append(claim.request, claim.epoch, 1, [_delta(1)], 1)
    flags = worker.append(claim.request, claim.epoch, 3, [_delta(3)], 3)
    assert (flags.status, flags.stored_ev) == ("behind", 1)
    assert end(worker, claim, settle=False).status == "behind"
    assert len(rig.log(claim.request)) == 1


def test_a_fenced_worker_writes_nothing(rig: Rig) -> None:
    zombie = rig.worker("w1")
    rig.submit(conversation="c")
    old = must_take(zombie)
    begin(zombie, old)
    emit(zombie, old, [1, 2])
    rig.kill(zombie)
    heir = rig.worker("w2")
    new = must_take(heir)
    assert (new.request, new.emitted, new.n, new.prompt_tokens) == (old.request, [1, 2], 2, 3)
    before = [event.id for event in rig.log(old.request)]
    assert zombie.append(old.request, old.epoch, old.ev + 1, [_delta(3)], 3).status == "fenced"
    assert zombie.poll(old.request, old.epoch).status == "fenced"
    assert end(zombie, old, settle=False, turn=rig.turn(old.request, 0)).status == "fenced"
    assert zombie.give_back(old.request, old.epoch, "drain").status == "fenced"
    assert zombie.settle(old.request).status == "again"
    assert [event.id for event in rig.log(old.request)] == before
    assert rig.stat("fenced_writes") == 3
    assert heir.transcript(new.conversation) == []
    play(heir, new, [3])
    stream = rig.log(old.request)
    check_stream(stream)
    assert [event.kind for event in stream] == ["start", "delta", "delta", "moved", "start", "delta", "end"]
    assert tokens(stream) == [1, 2, 3]
    check_settled(rig)


def test_a_request_whose_record_is_gone_says_so(rig: Rig) -> None:
    worker = rig.worker()
    rig.submit()
    claim = must_take(worker)
    rig.redis.delete(keys.request(claim.request))
    assert worker.append(claim.request, claim.epoch, 1, [_delta(1)], 1).status == "gone"
    assert worker.poll(claim.request, claim.epoch).status == "gone"
    assert end(worker, claim, settle=False).status == "gone"
    assert worker.give_back(claim.request, claim.epoch, "drain").status == "gone"
    assert worker.settle(claim.request).status == "gone"
    assert worker.take() is None


def test_an_epoch_that_was_given_out_twice_belongs_to_the_worker_of_the_record(rig: Rig) -> None:
    """A broker that comes back without its last moments has forgotten a claim, and gives its epoch to another."""
    forgotten, heir = rig.worker("w1"), rig.worker("w2")
    rig.submit()
    old = must_take(forgotten)
    rig.redis.hset(keys.request(old.request), mapping={"epoch": 0, "attempt": 0, "state": "queued"})
    rig.redis.hdel(keys.request(old.request), "worker")
    rig.redis.srem(keys.worker("w1") + ":run", old.request)
    rig.redis.rpush(keys.open_queue(MODEL, "interactive"), old.request)
    new = must_take(heir)
    assert (new.request, new.epoch) == (old.request, old.epoch)
    emit(heir, new, [1])
    assert forgotten.append(old.request, old.epoch, 1, [events.delta(n=2, ids=[1, 2], text="")], 2).status == "fenced"
    assert forgotten.append(old.request, old.epoch, 2, [_delta(2)], 2).status == "fenced"
    assert forgotten.poll(old.request, old.epoch).status == "fenced"
    assert forgotten.give_back(old.request, old.epoch, "drain").status == "fenced"
    assert end(forgotten, old, settle=False).status == "fenced"
    emit(heir, new, [2])
    end(heir, new, ids=[1, 2])
    stream = rig.log(old.request)
    check_stream(stream)
    assert tokens(stream) == [1, 2]


def test_a_finished_turn_answers_again_to_its_own_epoch_and_stays_as_it_is(rig: Rig) -> None:
    worker = rig.worker()
    rig.submit(conversation="c")
    claim = must_take(worker)
    begin(worker, claim)
    turn = rig.turn(claim.request, 0)
    assert end(worker, claim, settle=False, turn=turn).status == "ok"
    assert end(worker, claim, settle=False, state="failed", turn=turn).status == "again"
    assert rig.state(claim.request) == "done"
    assert len(worker.transcript(claim.conversation)) == 1
    check_stream(rig.log(claim.request))
    late = worker.append(claim.request, claim.epoch, 1, [_delta(1)], 1)
    assert late.status == "ok"
    assert worker.append(claim.request, claim.epoch, 3, [_delta(1)], 1).status == "fenced"
    assert len(rig.log(claim.request)) == 2


def test_cancelling_a_waiting_turn_ends_it_at_once(rig: Rig) -> None:
    for conversation in (None, "c"):
        request = rig.submit(conversation=conversation).request
        assert rig.cancel(request, reason="enough") == "cancelled"
        assert rig.cancel(request) == "ended"
        record = rig.record(request)
        assert (record.state, record.reason) == ("cancelled", "enough")
        check_stream(rig.log(request))
        assert rig.rq(request) == "canceled"
    check_settled(rig)


def test_cancelling_a_boxed_turn_takes_it_out_of_the_box(rig: Rig) -> None:
    worker = rig.worker()
    first, second, third = (rig.submit(conversation="c").request for _ in range(3))
    assert rig.cancel(second) == "cancelled"
    play(worker, must_take(worker), [1])
    claim = must_take(worker)
    assert claim.request == third
    play(worker, claim, [1])
    assert [rig.state(request) for request in (first, second, third)] == ["done", "cancelled", "done"]
    check_settled(rig)


def test_cancelling_a_running_turn_sets_a_flag_that_the_next_append_and_poll_bring(rig: Rig) -> None:
    worker = rig.worker()
    request = rig.submit().request
    claim = must_take(worker)
    begin(worker, claim)
    assert rig.cancel(request, reason="enough") == "cancelling"
    assert rig.cancel(request, reason="other") == "cancelling"
    assert rig.state(request) == "running"
    assert worker.append(request, claim.epoch, 2, [_delta(1)], 1).cancel == "enough"
    assert worker.poll(request, claim.epoch).cancel == "enough"
    worker.finish(request, claim.epoch, 3, state="cancelled", reason="enough", n=1, usage={})
    worker.settle(request)
    assert rig.cancel(request) == "ended"
    assert rig.rq(request) == "canceled"
    assert rig.stat("cancel_latency.count") == 1
    check_stream(rig.log(request))
    check_settled(rig)


def test_cancelling_an_unknown_request_is_not_found(rig: Rig) -> None:
    with pytest.raises(NotFound):
        rig.cancel(keys.new_ulid())


def test_cancelling_one_turn_does_not_disturb_another(rig: Rig) -> None:
    one, two = rig.worker("w1"), rig.worker("w2")
    rig.submit()
    rig.submit()
    first, second = must_take(one), must_take(two)
    rig.cancel(first.request)
    assert two.poll(second.request, second.epoch).cancel is None
    assert one.poll(first.request, first.epoch).cancel == "cancelled"


def test_an_interactive_turn_at_the_door_makes_a_batch_line_yield(rig: Rig) -> None:
    worker = rig.worker()
    rig.submit(conversation="c")
    play(worker, must_take(worker), [1])
    line = rig.submit(priority="batch").request
    claim = must_take(worker)
    begin(worker, claim)
    emit(worker, claim, [1])
    assert not worker.poll(line, claim.epoch).yield_now
    turn = rig.submit(conversation="c").request
    flags = worker.append(line, claim.epoch, claim.ev + 1, [_delta(2)], 2)
    assert flags.yield_now
    assert worker.poll(line, claim.epoch).yield_now
    assert worker.give_back(line, claim.epoch, "preempted").status == "ok"
    assert worker.give_back(line, claim.epoch, "preempted").status == "again"
    interactive = must_take(worker)
    assert interactive.request == turn
    play(worker, interactive, [5])
    again = must_take(worker)
    assert (again.request, again.n, again.emitted, again.attempt) == (line, 2, [1, 102], 1)
    play(worker, again, [3])
    stream = rig.log(line)
    check_stream(stream)
    assert [event.data["why"] for event in stream if event.kind == "moved"] == ["preempted"]
    check_settled(rig)


def test_only_batch_lines_yield(rig: Rig) -> None:
    worker = rig.worker()
    rig.submit(priority="background")
    claim = must_take(worker)
    rig.submit()
    assert not worker.poll(claim.request, claim.epoch).yield_now


def test_an_open_interactive_turn_makes_one_batch_worker_yield_and_only_if_nobody_is_free(rig: Rig) -> None:
    workers = [rig.worker("w1"), rig.worker("w2")]
    for _ in workers:
        rig.submit(priority="batch")
    claims = [must_take(worker) for worker in workers]
    free = rig.worker("w3")
    rig.submit()
    polled = [worker.poll(claim.request, claim.epoch) for worker, claim in zip(workers, claims, strict=True)]
    assert [flags.yield_now for flags in polled] == [False, False]
    rig.kill(free)
    for _ in range(3):
        polled = [worker.poll(claim.request, claim.epoch) for worker, claim in zip(workers, claims, strict=True)]
        assert [flags.yield_now for flags in polled] == [True, False]


def test_a_batch_line_goes_back_to_the_front_of_its_own_queue(rig: Rig) -> None:
    worker = rig.worker()
    first, second = rig.submit(priority="batch").request, rig.submit(priority="batch").request
    claim = must_take(worker)
    worker.give_back(first, claim.epoch, "preempted")
    assert [must_take(worker, [first]).request for _ in range(2)] == [first, second]


def test_a_turn_that_is_cancelled_or_late_when_given_back_ends_there(rig: Rig) -> None:
    worker = rig.worker()
    for state in ("cancelled", "expired"):
        request = rig.submit(conversation="c").request
        claim = must_take(worker)
        if state == "cancelled":
            rig.cancel(request)
        else:
            rig.age(request)
        assert worker.give_back(request, claim.epoch, "drain").status == "ok"
        assert rig.state(request) == state
        check_stream(rig.log(request))
    check_settled(rig)
