"""The operator's view: workers, depths, parked turns, counters and the backlog signal."""

from __future__ import annotations

import pytest

from broker import keys
from broker.admin import Admin
from broker.errors import NotFound
from ops.diagnosis.pool import starved
from tests.conformance.rig import MODEL, Rig, must_take, play


def test_an_empty_pool_needs_no_worker(rig: Rig) -> None:
    snapshot = Admin(rig.redis, rig.config).snapshot()
    assert (snapshot.open_requests, snapshot.running, snapshot.queued.total, snapshot.boxed) == (0, 0, 0, 0)
    assert snapshot.workers == []
    assert snapshot.parked == {}
    assert snapshot.wanted_workers() == 0
    assert snapshot.boot


def test_workers_are_shown_with_their_state_their_turns_and_what_they_report(rig: Rig) -> None:
    admin = Admin(rig.redis, rig.config)
    idle, busy, draining, lapsed = (rig.worker(name, called="toy") for name in ("w1", "w2", "w3", "w4"))
    request = rig.submit(conversation="c").request
    play(busy, must_take(busy), [1])
    running = rig.submit(conversation="c").request
    must_take(busy)
    rig.submit(conversation="d")
    idle.beat({"tokens_per_s": 12.5})
    draining.drain()
    rig.lapse(lapsed)
    shown = {worker.name: worker for worker in admin.workers()}
    states = {name: worker.state for name, worker in shown.items()}
    assert states == {"w1": "idle", "w2": "busy", "w3": "draining", "w4": "lapsed"}
    assert shown["w2"].running == [running]
    assert shown["w1"].stats["tokens_per_s"] == "12.5"
    lease = shown["w1"].lease
    assert lease is not None
    assert (lease.model, lease.name) == (MODEL, "toy")
    assert shown["w4"].lease is None
    assert request != running


def test_depths_boxes_and_waits_are_counted(rig: Rig) -> None:
    admin = Admin(rig.redis, rig.config)
    worker = rig.worker()
    rig.submit(conversation="c")
    play(worker, must_take(worker), [1])
    for _ in range(3):
        rig.submit(conversation="c")
    must_take(worker)
    for priority in ("interactive", "background", "batch", "batch"):
        rig.submit(priority=priority)
    rig.submit(conversation="new")
    snapshot = admin.snapshot()
    depths = snapshot.queued
    assert (depths.interactive, depths.background, depths.batch) == (2, 1, 2)
    assert (snapshot.running, snapshot.boxed, snapshot.open_requests) == (1, 2, 8)
    assert snapshot.oldest_wait_ms >= 0
    assert snapshot.wanted_workers() == 6
    assert snapshot.wanted_workers(waiting_per_worker=4) == 3
    assert snapshot.models == {MODEL: ""}


def test_turns_are_parked_while_no_worker_of_their_model_lives(rig: Rig) -> None:
    admin = Admin(rig.redis, rig.config)
    rig.submit()
    assert admin.snapshot().parked == {"": 1}
    worker = rig.worker(called="toy")
    rig.submit(model="toy")
    assert admin.snapshot().parked == {}
    rig.kill(worker)
    assert admin.snapshot().parked == {"": 1, MODEL: 1}
    rig.worker("w2", model="other+1")
    assert admin.snapshot().parked == {MODEL: 1}


def test_it_is_seen_how_long_turns_of_lower_priority_wait_behind_interactive_ones(rig: Rig) -> None:
    admin = Admin(rig.redis, rig.config)
    worker = rig.worker()
    lines = [rig.submit(priority=priority, group="g").request for priority in ("batch", "background", "batch")]
    rig.redis.hincrby(keys.request(lines[0]), "queued_at", -90_000)
    for _ in range(3):
        rig.submit()
        play(worker, must_take(worker), [1])
    snapshot = admin.snapshot()
    assert 90_000 <= snapshot.behind_ms < 180_000
    check = starved(snapshot, "")
    assert check.state == "warning"
    assert "3 background turn(s) and batch line(s) wait, the first for 9" in check.finding
    for _ in lines:
        play(worker, must_take(worker), [1])
    assert admin.snapshot().behind_ms == 0
    assert starved(admin.snapshot(), "").state == "good"


def test_counters_tell_what_happened(rig: Rig) -> None:
    worker = rig.worker()
    rig.submit()
    play(worker, must_take(worker), [1, 2, 3])
    cancelled = rig.submit().request
    rig.cancel(cancelled)
    rig.submit(priority="batch")
    claim = must_take(worker)
    worker.give_back(claim.request, claim.epoch, "preempted")
    must_take(worker)
    rig.kill(worker)
    counters = Admin(rig.redis, rig.config).snapshot().counters
    wanted = {
        "submitted": 3,
        "takes": 3,
        "ended.done": 1,
        "ended.cancelled": 1,
        "generation_tokens": 3,
        "moved.preempted": 1,
        "moved.worker_lost": 1,
        "joined": 1,
        "reaped": 1,
    }
    assert {name: counters.get(name) for name in wanted} == wanted


def test_an_operator_may_cancel_and_see_anybody_s_request(rig: Rig) -> None:
    admin = Admin(rig.redis, rig.config)
    request = rig.submit(owner="somebody").request
    assert admin.record(request).owner == "somebody"
    assert admin.cancel(request) == "cancelled"
    with pytest.raises(NotFound):
        admin.cancel("nosuch")
    with pytest.raises(NotFound):
        admin.drain("nosuch")


def test_a_model_is_found_by_its_name(rig: Rig) -> None:
    admin = Admin(rig.redis, rig.config)
    rig.worker(called="toy")
    assert admin.model("toy") == MODEL
    with pytest.raises(NotFound, match="nosuch"):
        admin.model("nosuch")
