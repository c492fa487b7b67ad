"""Submitting, placing and taking turns, on real servers."""

from __future__ import annotations

import pytest

from broker import keys
from broker.errors import Conflict, Gone, NotFound, NotMember, QueueFull
from broker.spec import RequestSpec
from tests.conformance.rig import MODEL, Rig, begin, check_settled, check_stream, emit, end, must_take, play, tokens


def test_a_turn_goes_through_the_pool_and_leaves_nothing_behind(rig: Rig) -> None:
    worker = rig.worker()
    request = rig.submit().request
    assert rig.state(request) == "queued"
    claim = must_take(worker)
    assert (claim.request, claim.epoch, claim.ev, claim.n, claim.attempt) == (request, 1, 0, 0, 1)
    assert claim.spec == RequestSpec(prompt="hello", seed=1)
    assert 0 < claim.remaining_ms <= rig.config.default_deadline_s * 1000
    assert claim.cancel is None
    assert rig.state(request) == "running"
    assert play(worker, claim, [5, 6]).status == "ok"
    record = rig.record(request)
    assert (record.state, record.reason, record.token_ids, record.text) == ("done", "stop", [5, 6], "<5><6>")
    assert record.usage == {"prompt_tokens": 3, "completion_tokens": 2}
    stream = rig.log(request)
    check_stream(stream)
    assert [event.kind for event in stream] == ["start", "delta", "delta", "end"]
    assert tokens(stream) == [5, 6]
    check_settled(rig)


def test_records_and_logs_of_ended_requests_expire(rig: Rig) -> None:
    worker = rig.worker()
    request = rig.submit(idempotency_key="k").request
    for key in (keys.request(request), keys.log(request), keys.idempotency("local", "k")):
        assert rig.redis.ttl(key) in (-1, -2)
    play(worker, must_take(worker), [1])
    assert 0 < rig.redis.ttl(keys.request(request)) <= rig.config.result_s
    assert 0 < rig.redis.ttl(keys.log(request)) <= rig.config.log_s
    assert 0 < rig.redis.ttl(keys.idempotency("local", "k")) <= rig.config.idempotency_s
    assert 0 < rig.redis.ttl(keys.rq_job(request)) <= rig.config.result_s


def test_interactive_comes_before_background_before_batch(rig: Rig) -> None:
    worker = rig.worker()
    batch = rig.submit(priority="batch").request
    background = rig.submit(priority="background").request
    interactive = rig.submit().request
    assert [must_take(worker, [batch, background, interactive]).request for _ in range(3)] == [
        interactive,
        background,
        batch,
    ]


def test_home_turns_come_before_open_ones_of_the_same_priority(rig: Rig) -> None:
    worker = rig.worker()
    first = rig.submit(conversation="c").request
    play(worker, must_take(worker), [1])
    other = rig.submit(priority="interactive").request
    pinned = rig.submit(conversation="c").request
    assert rig.queue("w.w1") == [pinned]
    assert must_take(worker).request == pinned
    assert must_take(worker, [pinned]).request == other
    assert first != pinned


def test_a_conversation_stays_with_the_worker_that_took_its_first_turn(rig: Rig) -> None:
    one, two = rig.worker("w1"), rig.worker("w2")
    rig.submit(conversation="c")
    play(two, must_take(two), [1])
    for _ in range(3):
        request = rig.submit(conversation="c").request
        assert one.take() is None
        claim = must_take(two)
        assert claim.request == request
        play(two, claim, [1])


def test_turns_of_a_conversation_run_one_at_a_time_in_submit_order(rig: Rig) -> None:
    one, two = rig.worker("w1"), rig.worker("w2")
    outcomes = [rig.submit(conversation="c") for _ in range(4)]
    assert [item.outcome for item in outcomes] == ["placed", "boxed", "boxed", "boxed"]
    order = []
    for _ in range(4):
        worker = next(worker for worker in (one, two) if (claim := worker.take()) is not None)
        assert claim is not None
        assert all(other.take([claim.request]) is None for other in (one, two))
        order.append(claim.request)
        play(worker, claim, [1])
    assert order == [item.request for item in outcomes]
    check_settled(rig)


def test_two_owners_may_use_the_same_conversation_name(rig: Rig) -> None:
    worker = rig.worker()
    a = rig.submit(conversation="c", owner="a").request
    b = rig.submit(conversation="c", owner="b")
    assert b.outcome == "placed"
    claims = [must_take(worker), must_take(worker, [a])]
    assert claims[0].conversation != claims[1].conversation


def test_a_foreign_request_is_not_found(rig: Rig) -> None:
    request = rig.submit(owner="a").request
    with pytest.raises(NotFound):
        rig.cancel(request, owner="b")
    with pytest.raises(NotFound):
        rig.record(request, owner="b")
    assert rig.cancel(request, owner="a") == "cancelled"


def test_the_same_idempotency_key_and_body_give_the_same_request(rig: Rig) -> None:
    worker = rig.worker()
    first = rig.submit(idempotency_key="k").request
    again = rig.submit(idempotency_key="k")
    assert (again.request, again.outcome) == (first, "dup")
    play(worker, must_take(worker), [1])
    assert worker.take() is None
    assert rig.submit(idempotency_key="k").request == first
    assert rig.stat("replayed") == 2
    assert rig.stat("submitted") == 1


def test_an_idempotency_key_of_another_owner_is_another_key(rig: Rig) -> None:
    first = rig.submit(idempotency_key="k", owner="a").request
    assert rig.submit(idempotency_key="k", owner="b").request != first


def test_the_same_idempotency_key_with_another_body_is_a_conflict(rig: Rig) -> None:
    rig.submit(idempotency_key="k")
    with pytest.raises(Conflict, match="'k'"):
        rig.submit(idempotency_key="k", spec=RequestSpec(prompt="other", seed=1))
    with pytest.raises(Conflict):
        rig.submit(idempotency_key="k", priority="batch")


def test_a_drawn_seed_does_not_make_a_repeated_submission_another_one(rig: Rig) -> None:
    spec = RequestSpec(prompt="hello", temperature=0.8)
    first = rig.submit(idempotency_key="k", spec=spec).request
    assert rig.submit(idempotency_key="k", spec=spec).request == first
    claim = must_take(rig.worker())
    assert claim.spec.seed is not None


def test_an_idempotency_key_outlives_the_record_and_is_then_gone(rig: Rig) -> None:
    first = rig.submit(idempotency_key="k").request
    rig.cancel(first)
    rig.redis.delete(keys.request(first))
    with pytest.raises(Gone, match=first):
        rig.submit(idempotency_key="k")
    assert rig.redis.zcard(keys.LIVE) == 0


def test_a_request_id_cannot_be_used_for_another_request_or_by_another_owner(rig: Rig) -> None:
    request = rig.submit().request
    with pytest.raises(Conflict):
        rig.submit(request, spec=RequestSpec(prompt="other"))
    with pytest.raises(Conflict):
        rig.submit(request, owner="b")
    assert rig.submit(request).outcome == "dup"
    assert len(rig.queue("open.any.interactive")) == 1


def test_a_full_pool_refuses_and_writes_nothing(rig: Rig) -> None:
    small = rig.with_config(max_open=3, max_open_batch=2)
    small.submit(priority="batch")
    small.submit(priority="batch")
    before = sorted(rig.redis.keys("prism:*"))
    with pytest.raises(QueueFull, match="batch"):
        small.submit(priority="batch", idempotency_key="k")
    assert sorted(rig.redis.keys("prism:*")) == before
    interactive = small.submit().request
    with pytest.raises(QueueFull, match="3"):
        small.submit()
    small.cancel(interactive)
    assert small.submit().outcome == "placed"
    assert rig.stat("refused") == 2


def test_a_full_box_refuses_a_turn_of_that_conversation_only(rig: Rig) -> None:
    small = rig.with_config(max_box=1)
    small.submit(conversation="c")
    small.submit(conversation="c")
    with pytest.raises(QueueFull, match="conversation c"):
        small.submit(conversation="c")
    assert small.submit(conversation="d").outcome == "placed"


def test_an_expired_turn_ends_without_being_run(rig: Rig) -> None:
    worker = rig.worker()
    late = rig.submit(conversation="c").request
    on_time = rig.submit(conversation="c").request
    rig.age(late)
    assert must_take(worker).request == on_time
    assert rig.state(late) == "expired"
    stream = rig.log(late)
    check_stream(stream)
    assert stream[-1].data["state"] == "expired"
    assert rig.rq(late) == "failed"


def test_queued_time_counts_against_the_deadline(rig: Rig) -> None:
    request = rig.submit(deadline_s=5).request
    rig.redis.hincrby(keys.request(request), "deadline", -3000)
    claim = must_take(rig.worker())
    assert 0 < claim.remaining_ms <= 2000


def test_a_turn_for_a_named_model_waits_for_a_worker_of_that_model(rig: Rig) -> None:
    other = rig.worker("w1", model="other+1", called="other")
    rig.worker("w2", called="toy")
    by_name = rig.submit(model="toy").request
    by_identity = rig.submit(model=MODEL).request
    assert other.take() is None
    mine = rig.worker("w3")
    assert must_take(mine).request == by_name
    assert must_take(mine, [by_name]).request == by_identity


def test_an_unknown_model_name_is_refused_but_a_full_identity_may_wait(rig: Rig) -> None:
    with pytest.raises(NotFound, match="nosuch"):
        rig.submit(model="nosuch")
    request = rig.submit(model=MODEL).request
    assert must_take(rig.worker()).request == request


def test_a_turn_without_a_model_is_bound_to_the_model_that_took_it(rig: Rig) -> None:
    request = rig.submit().request
    assert rig.record(request).model == ""
    worker = rig.worker()
    claim = must_take(worker)
    assert claim.model == MODEL
    begin(worker, claim)
    emit(worker, claim, [1])
    other = rig.worker("w2", model="other+1")
    rig.kill(worker)
    assert other.take() is None
    assert must_take(rig.worker("w3")).request == request


def test_a_turn_without_a_model_and_without_tokens_may_move_to_another_model(rig: Rig) -> None:
    request = rig.submit().request
    worker = rig.worker()
    begin(worker, must_take(worker))
    other = rig.worker("w2", model="other+1")
    rig.kill(worker)
    assert must_take(other).request == request


def test_old_turns_without_a_model_are_not_starved_by_named_ones(rig: Rig) -> None:
    worker = rig.worker()
    first = rig.submit().request
    rig.redis.hincrby(keys.request(first), "queued_at", -5)
    rig.submit(model=MODEL)
    assert must_take(worker).request == first


def test_a_conversation_never_meets_another_tokenizer(rig: Rig) -> None:
    one = rig.worker("w1", tokenizer="t1")
    request = rig.submit(conversation="c").request
    play(one, must_take(one), [1], turn=rig.turn(request, 0))
    two = rig.worker("w2", model="other+1", tokenizer="t2")
    with pytest.raises(Conflict, match="tokenizer"):
        rig.submit(conversation="c", model="other+1")
    rig.kill(one)
    late = rig.submit(conversation="c").request
    assert two.take() is None
    assert rig.record(late).state == "failed"
    assert "tokenizer" in rig.record(late).reason
    check_stream(rig.log(late))


def test_another_model_with_the_same_tokenizer_may_go_on_with_a_conversation(rig: Rig) -> None:
    one = rig.worker("w1", tokenizer="t")
    request = rig.submit(conversation="c").request
    play(one, must_take(one), [1], turn=rig.turn(request, 0))
    two = rig.worker("w2", model="other+1", tokenizer="t")
    rig.kill(one)
    late = rig.submit(conversation="c").request
    assert must_take(two).request == late


def test_a_worker_without_a_lease_or_a_place_takes_nothing(rig: Rig) -> None:
    worker = rig.worker()
    rig.submit()
    rig.lapse(worker)
    assert worker.take() is None
    worker.beat()
    assert worker.take() is not None
    rig.kill(worker)
    with pytest.raises(NotMember):
        worker.take()
    with pytest.raises(NotMember):
        worker.beat()


def test_submitting_rings_the_pinned_worker_or_one_free_worker(rig: Rig) -> None:
    one, two = rig.worker("w1"), rig.worker("w2")
    rig.submit()
    assert [worker.wait_bell(0.01) for worker in (one, two)].count(True) == 1
    rig.submit(conversation="c")
    claim = must_take(one)
    while claim.conversation == "":
        claim = must_take(one, [claim.request])
    for worker in (one, two):
        worker.wait_bell(0.01)
    play(one, claim, [1])
    rig.submit(conversation="c")
    assert not two.wait_bell(0.01)
    assert one.wait_bell(0.01)


def test_two_submissions_wake_two_free_workers(rig: Rig) -> None:
    workers = [rig.worker("w1"), rig.worker("w2")]
    rig.submit()
    rig.submit()
    assert all(worker.wait_bell(0.01) for worker in workers)


def test_a_worker_that_has_ended_but_not_settled_is_rung_too(rig: Rig) -> None:
    worker = rig.worker()
    rig.submit()
    worker.wait_bell(0.01)
    claim = must_take(worker)
    end(worker, claim, settle=False)
    assert worker.take([claim.request]) is None
    rig.submit()
    assert worker.wait_bell(0.01)


def test_a_turn_for_a_model_s_name_follows_the_name_to_a_new_identity(rig: Rig) -> None:
    old = rig.worker("w1", model="toy+a8.1", called="toy")
    named, exact = rig.submit(model="toy").request, rig.submit(model="toy+a8.1").request
    rig.kill(old)
    new = rig.worker("w2", model="toy+a8.2", called="toy")
    assert new.take() is None
    assert rig.reaper().audit_all() == 1
    assert rig.reaper().audit_all() == 0
    assert must_take(new).request == named
    assert new.take([named]) is None
    assert rig.state(exact) == "queued"


def test_a_taker_passes_the_bell_on_while_turns_wait_in_the_open(rig: Rig) -> None:
    one = rig.worker("w1")
    rig.submit()
    rig.submit()
    two = rig.worker("w2")
    assert not two.wait_bell(0.01)
    must_take(one)
    assert two.wait_bell(0.01)


def test_the_same_prefix_rings_the_same_free_worker(rig: Rig) -> None:
    workers = {name: rig.worker(name) for name in ("w1", "w2", "w3")}
    chosen = set()
    for _ in range(4):
        request = rig.submit(affinity="prefix").request
        rung = [name for name, worker in workers.items() if worker.wait_bell(0.01)]
        assert len(rung) == 1
        chosen.add(rung[0])
        rig.cancel(request)
    assert len(chosen) == 1


def test_a_bell_never_holds_more_than_one_ring(rig: Rig) -> None:
    worker = rig.worker()
    rig.submit(conversation="c")
    play(worker, must_take(worker), [1])
    for _ in range(3):
        request = rig.submit(conversation="c").request
        rig.cancel(request)
    assert rig.redis.llen(keys.worker("w1") + ":bell") == 1


def test_batch_lines_of_one_group_go_home_with_whoever_takes_the_first(rig: Rig) -> None:
    one, two = rig.worker("w1"), rig.worker("w2")
    group_a = [rig.submit(priority="batch", group="a").request for _ in range(3)]
    group_b = [rig.submit(priority="batch", group="b").request for _ in range(2)]
    assert must_take(one).request == group_a[0]
    assert rig.queue("w.w1.batch") == group_a[1:]
    later = rig.submit(priority="batch", group="a").request
    assert rig.queue("w.w1.batch") == [*group_a[1:], later]
    assert must_take(two).request == group_b[0]
    assert rig.queue("w.w2.batch") == group_b[1:]


def test_an_idle_worker_takes_a_whole_group_that_waits_at_a_busy_one(rig: Rig) -> None:
    busy, idle = rig.worker("w1"), rig.worker("w2")
    running = [rig.submit(priority="batch", group=group).request for group in "ab"]
    assert [must_take(busy, running).request for _ in running] == running
    group_a = [rig.submit(priority="batch", group="a").request for _ in range(2)]
    group_b = [rig.submit(priority="batch", group="b").request for _ in range(3)]
    assert rig.queue("w.w1.batch") == [*group_a, *group_b]
    assert must_take(idle).request == group_b[0]
    assert rig.queue("w.w2.batch") == group_b[1:]
    assert rig.queue("w.w1.batch") == group_a
    later = rig.submit(priority="batch", group="b").request
    assert rig.queue("w.w2.batch") == [*group_b[1:], later]


def test_nobody_takes_a_group_from_a_worker_that_is_about_to_begin_it(rig: Rig) -> None:
    one, two = rig.worker("w1"), rig.worker("w2")
    first = must_take(one, []) if rig.submit(priority="batch", group="a") else None
    assert first is not None
    waiting = rig.submit(priority="batch", group="a").request
    play(one, first, [1])
    assert two.take() is None
    assert must_take(one).request == waiting


def test_lines_of_another_model_or_of_a_conversation_are_not_taken_from_their_worker(rig: Rig) -> None:
    one, other = rig.worker("w1", model="small+1"), rig.worker("w2", model="large+1")
    first = rig.submit(priority="batch", group="a", model="small+1").request
    assert must_take(one).request == first
    rig.submit(priority="batch", group="a", model="small+1")
    assert other.take() is None
    third = rig.worker("w3", model="small+1")
    assert must_take(third).group == "a"
    turn = rig.submit(priority="batch", conversation="c", model="small+1").request
    assert must_take(one, [first]).request == turn
    rig.submit(priority="batch", conversation="c", model="small+1")
    assert third.take([claim.decode() for claim in rig.redis.smembers("prism:w:w3:run")]) is None


def test_finish_commits_the_transcript_and_edits_replace_what_followed(rig: Rig) -> None:
    worker = rig.worker()
    for base in range(3):
        request = rig.submit(conversation="c").request
        claim = must_take(worker)
        assert len(worker.transcript(claim.conversation)) == base
        play(worker, claim, [base], turn=rig.turn(request, base, text=f"a{base}"))
    request = rig.submit(conversation="c").request
    claim = must_take(worker)
    play(worker, claim, [9], turn=rig.turn(request, 1, text="edited"))
    turns = worker.transcript(claim.conversation)
    assert [turn.text for turn in turns] == ["a0", "edited"]
    assert turns[1] == rig.turn(request, 1, text="edited").record
    request = rig.submit(conversation="c").request
    play(worker, must_take(worker), [9], turn=rig.turn(request, 0, text="anew"))
    assert [turn.text for turn in worker.transcript(claim.conversation)] == ["anew"]


def test_only_done_commits_a_turn(rig: Rig) -> None:
    worker = rig.worker()
    for state in ("failed", "cancelled", "expired"):
        request = rig.submit(conversation="c").request
        claim = must_take(worker)
        play(worker, claim, [1], state=state, turn=rig.turn(request, 0))
        assert rig.state(request) == state
        assert worker.transcript(claim.conversation) == []


def test_finish_promotes_the_next_boxed_turn_past_cancelled_ones(rig: Rig) -> None:
    worker = rig.worker()
    requests = [rig.submit(conversation="c").request for _ in range(4)]
    claim = must_take(worker)
    assert rig.cancel(requests[1]) == "cancelled"
    play(worker, claim, [1])
    claim = must_take(worker)
    assert claim.request == requests[2]
    end(worker, claim, state="failed")
    assert must_take(worker).request == requests[3]
