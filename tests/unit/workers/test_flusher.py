"""The flusher against a real broker: order, numbers, resends, outages, and flags that reach the decoder loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from broker import events, keys
from broker.answers import Claim, Flags
from broker.errors import BrokerUnavailable
from broker.store import WorkerStore
from prism_core.errors import Cancelled, DeadlineExceeded
from tests.brokers import PrivateBroker
from tests.pool import wait_for
from tests.toy import ToyModel
from tests.unit.workers.rig import Rig
from workers.cancellation import Halt, Progress, TurnCancellation
from workers.flusher import LONG_TICK_S, TICK_S, Flusher
from workers.ledger import MAX_EVENTS_PER_APPEND


class Wire:
    """Stands between a flusher and the real store: holds, loses or counts calls, and passes them on unchanged."""

    def __init__(self, store: WorkerStore) -> None:
        self._store = store
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.lose_requests = 0
        self.lose_replies = 0
        self.appends: list[tuple[int, int, int]] = []

    def append(self, request: str, epoch: int, ev: int, payloads: list[bytes], n: int) -> Flags:
        self.entered.set()
        assert self.gate.wait(20)
        if self.lose_requests:
            self.lose_requests -= 1
            raise BrokerUnavailable("lost on the way there")
        flags = self._store.append(request, epoch, ev, payloads, n)
        if self.lose_replies:
            self.lose_replies -= 1
            raise BrokerUnavailable("lost on the way back")
        self.appends.append((ev, len(payloads), n))
        return flags

    def poll(self, request: str, epoch: int) -> Flags:
        return self._store.poll(request, epoch)


class Kicks:
    """Counts what is put into a queue."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.count = inner, 0

    def put(self, item: None) -> None:
        self.count += 1
        self.inner.put(item)

    def get(self, timeout: float) -> None:
        self.inner.get(timeout=timeout)

    def get_nowait(self) -> None:
        self.inner.get_nowait()


class Stage:
    def __init__(self, rig: Rig, **options: Any) -> None:
        self.rig = rig
        self.request = rig.submit(prompt="x", max_tokens=1000)
        claim = rig.store.take()
        assert claim is not None
        self.claim: Claim = claim
        self.wire = Wire(rig.store)
        self.cancellation = TurnCancellation(Progress())
        self.flusher = Flusher(self.wire, claim, self.cancellation, **options)  # type: ignore[arg-type]

    def done(self) -> None:
        assert self.flusher.flush(20), "the flusher did not get everything across"

    def ids(self) -> list[int]:
        return self.rig.log(self.request).ids


@pytest.fixture
def rig(broker: PrivateBroker) -> Rig:
    return Rig(broker)


@pytest.fixture
def stage(rig: Rig):
    made: list[Stage] = []

    def make(**options: Any) -> Stage:
        made.append(Stage(rig, **options))
        return made[-1]

    yield make
    for each in made:
        each.wire.gate.set()
        each.flusher.close()


Make = Callable[..., Stage]


def test_tokens_that_come_while_an_append_travels_go_together_in_the_next_one(stage: Make):
    on = stage()
    on.wire.gate.clear()
    on.flusher.token(1, "a")
    assert on.wire.entered.wait(20)
    for token in range(2, 50):
        on.flusher.token(token, "b")
    on.wire.gate.set()
    on.done()
    log = on.rig.log(on.request)
    assert log.ids == list(range(1, 50))
    assert log.kinds() == ["delta", "delta"]
    assert [event.data["n"] for event in log.events] == [1, 49]
    assert (on.flusher.ev, on.flusher.n, on.flusher.appends) == (2, 49, 2)


def test_a_token_wakes_a_flusher_that_has_dozed_off(stage: Make):
    on = stage(poll_s=3600.0)
    for token in range(3):
        wait_for(lambda: on.flusher._dozing, "the flusher to doze off")
        on.flusher.token(token, "a")
        wait_for(lambda: len(on.ids()) == token + 1, "the token")  # noqa: B023
    assert [event.data["n"] for event in on.rig.log(on.request).events] == [1, 2, 3]


def test_tokens_that_keep_coming_are_sent_a_few_at_a_time_and_wake_nobody(stage: Make):
    on = stage(poll_s=3600.0)
    wait_for(lambda: on.flusher._dozing, "the flusher to doze off")
    on.flusher.token(0, "a")
    wait_for(lambda: not on.flusher._dozing, "the flusher to wake up")
    kicks = Kicks(on.flusher._kicks)
    on.flusher._kicks = kicks  # type: ignore[assignment]
    sent = 1
    while on.flusher.appends < 4:
        if not on.flusher._dozing:  # a test's thread may be set aside for longer than the flusher is patient
            on.flusher.token(sent, "a")
            sent += 1
    woken = kicks.count
    on.done()
    assert woken == 0
    assert on.ids() == list(range(sent))
    assert on.flusher.appends < sent / 4


def test_a_decoder_that_is_faster_than_the_tick_is_looked_after_less_often(stage: Make):
    on = stage(poll_s=3600.0)
    sent = 0
    while on.flusher._tick_s < LONG_TICK_S:
        on.flusher.token(sent, "a")
        sent += 1
    on.done()
    wait_for(lambda: on.flusher._dozing, "the flusher to doze off")
    assert on.flusher._tick_s == TICK_S
    assert on.ids() == list(range(sent))


def test_kinds_of_events_keep_their_order(stage: Make):
    on = stage()
    on.wire.gate.clear()
    on.flusher.event(events.start(attempt=1, worker="w", prompt_tokens=1, reused_tokens=0))
    on.flusher.token(1, "a")
    on.flusher.token(2, "b", {"lp": -1.0})
    on.flusher.token(3, "c")
    on.flusher.tail("tail")
    on.wire.gate.set()
    on.done()
    log = on.rig.log(on.request)
    assert log.ids == [1, 2, 3]
    assert log.text == "abctail"
    deltas = [event for event in log.events if event.kind == "delta"]
    assert [len(event.data["lp"]) for event in deltas if "lp" in event.data] == [1]


@pytest.mark.parametrize("way", ["lose_requests", "lose_replies"])
def test_an_append_that_is_lost_is_sent_again_under_the_same_numbers(stage: Make, way: str):
    on = stage()
    setattr(on.wire, way, 3)
    for token in range(20):
        on.flusher.token(token, "x")
    on.done()
    assert on.ids() == list(range(20))


def test_events_that_the_broker_has_lost_again_are_sent_again(stage: Make, rig: Rig):
    """An append-only file may lose its last moments: the log then ends before what was acknowledged."""
    on = stage()
    for token in range(5):
        on.flusher.token(token, "x")
        on.done()
    stream = keys.log(on.request)
    lost = rig.redis.xrevrange(stream, count=3)
    rig.redis.xdel(stream, *[entry for entry, _ in lost])
    rig.redis.hset(keys.request(on.request), mapping={"ev": 2, "n": 2})
    # A stream refuses ids below its last one, so the lost end is cut the way a shorter file would have it.
    kept = rig.redis.xrange(stream)
    rig.redis.delete(stream)
    for entry, fields in kept:
        rig.redis.xadd(stream, fields, entry)
    on.flusher.token(5, "x")
    on.done()
    assert on.ids() == list(range(6))
    assert [event.data["n"] for event in rig.log(on.request).events] == [1, 2, 3, 4, 5, 6]


def test_events_of_an_earlier_attempt_cannot_be_healed_and_the_turn_says_so(stage: Make, rig: Rig):
    on = stage()
    on.flusher.token(1, "x")
    on.done()
    rig.store.give_back(on.request, on.claim.epoch, "drain")
    later = Stage.__new__(Stage)
    claim = rig.store.take()
    assert claim is not None
    rig.redis.hset(keys.request(on.request), mapping={"ev": 0, "n": 0})
    later.cancellation = TurnCancellation(Progress())
    flusher = Flusher(rig.store, claim, later.cancellation)
    flusher.token(2, "y")
    assert flusher.flush(20)
    flusher.close()
    assert later.cancellation.halt is Halt.BROKEN


def test_a_cancellation_comes_back_with_the_next_append(stage: Make, rig: Rig):
    on = stage(poll_s=3600.0)
    rig.scripts.run("cancel", [keys.request(on.request)], [on.request, "local", "why"])
    assert not on.cancellation.is_cancelled
    on.flusher.token(1, "x")
    on.done()
    assert on.cancellation.is_cancelled
    assert (on.cancellation.halt, on.cancellation.detail) == (Halt.CANCELLED, "why")


def test_a_cancellation_is_seen_without_any_append_during_a_long_prefill(stage: Make, rig: Rig):
    on = stage()
    rig.scripts.run("cancel", [keys.request(on.request)], [on.request, "local", "why"])
    wait_for(lambda: on.cancellation.is_cancelled, "the poll", 10)


def test_a_hint_makes_the_flusher_look_at_once(stage: Make, rig: Rig):
    on = stage(poll_s=3600.0)
    rig.scripts.run("cancel", [keys.request(on.request)], [on.request, "local", "why"])
    on.flusher.look()
    wait_for(lambda: on.cancellation.is_cancelled, "the look", 10)


def test_every_part_of_a_long_resend_says_how_many_tokens_there_are_up_to_its_own_end(stage: Make, rig: Rig):
    on = stage()
    count = 2 * MAX_EVENTS_PER_APPEND + 10
    for token in range(count):
        on.flusher.token(token, "x")
        on.flusher.event(events.start(attempt=1, worker="w", prompt_tokens=1, reused_tokens=0))
    on.done()
    rig.redis.hset(keys.request(on.request), mapping={"ev": 0, "n": 0})
    rig.redis.delete(keys.log(on.request))
    on.wire.appends.clear()
    on.flusher.resend(0)
    on.done()
    assert on.ids() == list(range(count))
    sizes = [size for _, size, _ in on.wire.appends]
    assert max(sizes) == MAX_EVENTS_PER_APPEND
    assert len(sizes) > 2
    stored = 0
    for _, size, n in on.wire.appends:
        stored += size
        tokens = [event.data["n"] for event in rig.log(on.request).events[:stored] if event.kind == "delta"]
        assert n == tokens[-1]


def test_an_interactive_turn_makes_a_batch_line_yield(broker: PrivateBroker):
    rig = Rig(broker, ToyModel(step_s=0.0005))  # as a kernel does, a sleep leaves the interpreter to the flusher
    line = rig.submit(prompt="line", max_tokens=4000, priority="batch")
    claim = rig.store.take()
    assert claim is not None
    rig.submit(prompt="turn", max_tokens=1)
    result = rig.turn(claim).run()
    assert result.disposition == "handed_back"
    log = rig.log(line)
    assert log.events[-1].data == {"why": "preempted"}
    again = rig.store.take()
    assert again is not None
    assert again.priority == "interactive"


def test_a_fenced_turn_stops_and_nothing_more_is_sent(stage: Make, rig: Rig):
    on = stage()
    on.flusher.token(1, "x")
    on.done()
    rig.scripts.run("rescue", [keys.request(on.request)], [on.request, "w1", "worker_lost"])
    on.flusher.token(2, "y")
    on.done()
    assert on.flusher.is_dead
    assert on.cancellation.halt is Halt.FENCED
    on.flusher.token(3, "z")
    on.done()
    assert on.ids() == [1]


def test_a_request_that_is_gone_stops_the_turn(stage: Make, rig: Rig):
    on = stage()
    rig.redis.delete(keys.request(on.request))
    on.flusher.token(1, "x")
    on.done()
    assert on.flusher.is_dead


def test_a_full_buffer_makes_the_decoder_wait_until_the_broker_is_back(stage: Make):
    on = stage(buffer_events=10)
    on.wire.gate.clear()
    on.flusher.token(0, "x")
    assert on.wire.entered.wait(20)
    for token in range(1, 12):
        on.flusher.token(token, "x")
    checks: list[int] = []

    def check() -> None:
        checks.append(1)
        if len(checks) == 2:
            on.wire.gate.set()

    on.flusher.wait_for_room(check)
    assert len(checks) >= 2
    on.done()
    assert on.ids() == list(range(12))


def test_an_absent_broker_makes_the_decoder_wait_after_the_buffer_time(stage: Make):
    on = stage(buffer_s=0.05)
    on.wire.lose_requests = 10_000
    on.flusher.token(1, "x")
    seen = wait_for(lambda: _waits(on), "the buffer to be full")
    assert isinstance(seen, DeadlineExceeded)
    on.wire.lose_requests = 0
    on.done()
    assert on.ids() == [1]


def _waits(on: Stage) -> DeadlineExceeded | None:
    def late() -> None:
        raise DeadlineExceeded("late")

    try:
        on.flusher.wait_for_room(late)
    except DeadlineExceeded as error:
        return error
    return None


def test_a_stopped_turn_does_not_wait_for_room(stage: Make):
    on = stage(buffer_events=1)
    on.wire.gate.clear()
    on.flusher.token(1, "x")
    assert on.wire.entered.wait(20)
    on.flusher.token(2, "x")
    on.cancellation.stop(Halt.DRAINED)
    with pytest.raises(Cancelled):
        on.flusher.wait_for_room(lambda: None)


def test_a_broker_that_refuses_an_event_for_good_stops_the_turn(stage: Make, rig: Rig):
    on = stage()
    rig.redis.delete(keys.log(on.request))
    rig.redis.set(keys.log(on.request), "no stream")
    on.flusher.token(1, "x")
    on.done()
    assert on.cancellation.halt is Halt.BROKEN


def test_closing_does_not_wait_for_an_absent_broker(stage: Make):
    on = stage()
    on.wire.lose_requests = 10_000
    on.flusher.token(1, "x")
    wait_for(lambda: on.wire.lose_requests < 10_000, "the first try")
    began = time.monotonic()
    on.flusher.close()
    assert time.monotonic() - began < 5


def test_a_broker_that_was_killed_gets_every_event_once_when_it_is_back(rig: Rig, stage: Make):
    on = stage()
    for token in range(10):
        on.flusher.token(token, "x")
    on.done()
    rig.redis.config_set("appendfsync", "always")
    on.flusher.token(10, "x")
    on.done()
    rig.broker.kill()
    for token in range(11, 20):
        on.flusher.token(token, "x")
    rig.broker.start()
    on.done()
    assert on.ids() == list(range(20))
