"""Readers against a real server: replay, live, gaps, cursors, overflow, loss. One test body for the sync and async
twins."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from broker import events, keys
from broker.async_client import AsyncClient, AsyncRequest
from broker.config import PoolConfig
from broker.errors import ClientClosed, InvalidCursor, NotFound, StreamLost
from broker.events import Event
from tests.brokers import PrivateBroker
from tests.conformance.rig import Rig, begin, check_stream, emit, end, eventually, must_take, play, tokens
from tests.conformance.sides import QUICK, SIDES, Collecting


def test_an_ended_stream_is_replayed_whole(rig: Rig, side: Any) -> None:
    worker = rig.worker()
    request = rig.submit().request
    play(worker, must_take(worker), list(range(1200)))
    got = list(side.events(request))
    check_stream(got)
    assert tokens(got) == list(range(1200))
    assert got == rig.log(request)


def test_a_live_stream_arrives_while_it_is_made(rig: Rig, side: Any) -> None:
    worker = rig.worker()
    request = rig.submit().request
    reading = Collecting(side.events(request))
    claim = must_take(worker)
    begin(worker, claim)
    for token in range(5):
        emit(worker, claim, [token])
        eventually(lambda token=token: tokens(reading.got) == list(range(token + 1)))
    end(worker, claim)
    check_stream(reading.wait())


def test_a_reader_of_a_request_that_waits_gets_everything_later(rig: Rig, side: Any) -> None:
    request = rig.submit().request
    reading = Collecting(side.events(request))
    worker = rig.worker()
    play(worker, must_take(worker), [1, 2, 3])
    check_stream(reading.wait())


def test_every_cursor_of_a_stream_resumes_exactly_behind_it(rig: Rig, side: Any) -> None:
    first, second = rig.worker("w1"), rig.worker("w2")
    request = rig.submit().request
    claim = must_take(first)
    begin(first, claim)
    emit(first, claim, [1, 2])
    rig.kill(first)
    play(second, must_take(second), [3])
    whole = rig.log(request)
    check_stream(whole)
    assert list(side.events(request, after="0-0")) == whole
    for index, event in enumerate(whole):
        assert list(side.events(request, after=event.id)) == whole[index + 1 :]
        assert list(side.events(request, after=event.sequence)) == whole[index + 1 :]
    assert list(side.events(request, after=0)) == whole


def test_reading_after_the_end_ends_at_once(rig: Rig, side: Any) -> None:
    worker = rig.worker()
    request = rig.submit().request
    play(worker, must_take(worker), [1])
    last = rig.log(request)[-1]
    assert list(side.events(request, after=last.id)) == []
    assert list(side.events(request, after=last.sequence)) == []


@pytest.mark.parametrize(
    "cursor",
    [
        "",
        "x",
        "1",
        "1-",
        "-1",
        "1-2-3",
        "01-2",
        "1-02",
        " 1-2",
        "1-2\n",
        "9-1",
        "1-99",
        "2-0",
        99,
        -1,
        True,
        "1" * 40 + "-1",
    ],
)
def test_a_bad_cursor_is_an_error_and_never_the_start(rig: Rig, side: Any, cursor: Any) -> None:
    worker = rig.worker()
    request = rig.submit().request
    play(worker, must_take(worker), [1])
    with pytest.raises((InvalidCursor, StreamLost)) as raised:
        list(side.events(request, after=cursor))
    if cursor != "9-1":
        assert raised.type is InvalidCursor


def test_a_good_cursor_is_not_called_bad_when_the_broker_loses_its_data(
    rig: Rig, side: Any, server: PrivateBroker
) -> None:
    worker = rig.worker()
    request = rig.submit().request
    claim = must_take(worker)
    begin(worker, claim)
    emit(worker, claim, [1])
    page = side.reader._page

    def late(*arguments: Any) -> Any:
        server.flush()
        return page(*arguments)

    side.reader._page = late
    with pytest.raises(StreamLost, match="lost its data"):
        list(side.events(request, after="1-1"))


def test_an_unknown_or_foreign_request_is_not_found(rig: Rig, side: Any) -> None:
    foreign = rig.submit(owner="somebody").request
    for request in (keys.new_ulid(), foreign):
        with pytest.raises(NotFound):
            list(side.events(request))


def test_lost_live_messages_are_repaired_from_the_log(rig: Rig, side: Any) -> None:
    """Events that reach the log without being published: what a cut pub/sub connection loses."""
    worker = rig.worker()
    request = rig.submit().request
    reading = Collecting(side.events(request))
    claim = must_take(worker)
    begin(worker, claim)
    eventually(lambda: reading.got)
    mute(rig, request, claim.ev + 1, [11, 12, 13])
    object.__setattr__(claim, "ev", claim.ev + 3)
    object.__setattr__(claim, "n", 3)
    emit(worker, claim, [14])
    eventually(lambda: tokens(reading.got) == [11, 12, 13, 14])
    mute(rig, request, claim.ev + 1, [15], n=5)
    eventually(lambda: tokens(reading.got) == [11, 12, 13, 14, 15])
    object.__setattr__(claim, "ev", claim.ev + 1)
    object.__setattr__(claim, "n", 5)
    end(worker, claim)
    check_stream(reading.wait())


def mute(rig: Rig, request: str, ev: int, ids: list[int], n: int | None = None) -> None:
    first = len(ids) if n is None else n
    for offset, token in enumerate(ids):
        count = first - len(ids) + offset + 1
        rig.redis.xadd(keys.log(request), {"d": events.delta(n=count, ids=[token], text="")}, id=f"1-{ev + offset}")
    rig.redis.hset(keys.request(request), mapping={"ev": ev + len(ids) - 1, "n": first})


def test_repeated_and_reordered_live_messages_change_nothing(rig: Rig, side: Any) -> None:
    worker = rig.worker()
    request = rig.submit().request
    reading = Collecting(side.events(request))
    claim = must_take(worker)
    begin(worker, claim)
    emit(worker, claim, [1, 2, 3])
    eventually(lambda: tokens(reading.got) == [1, 2, 3])
    for entry, fields in reversed(rig.redis.xrange(keys.log(request))):
        for _ in range(3):
            rig.redis.publish(keys.request(request), entry + b" " + fields[b"d"])
    end(worker, claim)
    check_stream(reading.wait())


def test_cut_pubsub_connections_lose_nothing(rig: Rig, side: Any, kind: str) -> None:
    worker = rig.worker()
    request = rig.submit().request
    reading = Collecting(side.events(request))
    claim = must_take(worker)
    begin(worker, claim)
    eventually(lambda: reading.got)
    reader = side.client.reader if kind == "sync" else side.client._open.reader
    for token in range(200):
        emit(worker, claim, [token])
        if token % 20 == 10:
            rig.redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        if token == 100:
            eventually(lambda: reader.replays > 0)
    end(worker, claim)
    got = reading.wait()
    check_stream(got)
    assert tokens(got) == list(range(200))


def test_a_slow_reader_overflows_its_queue_and_still_sees_everything(
    rig: Rig, server: PrivateBroker, kind: str
) -> None:
    side = SIDES[kind](server.url, PoolConfig(silence_ms=50, reader_queue=4, read_page=16))
    try:
        worker = rig.worker()
        request = rig.submit().request
        gate = threading.Event()

        def stall(event: Event) -> None:
            if event.sequence == 3:
                gate.wait(30)

        reading = Collecting(side.events(request), stall)
        claim = must_take(worker)
        begin(worker, claim)
        eventually(lambda: reading.got)
        emit(worker, claim, range(500))
        gate.set()
        end(worker, claim)
        got = reading.wait()
        check_stream(got)
        assert tokens(got) == list(range(500))
    finally:
        side.close()


def test_clients_of_several_keys_share_the_connections_of_one_process(rig: Rig, side: Any, kind: str) -> None:
    views = [side.client.for_key(key) for key in ("sk-a", "sk-b")]
    before = len(rig.redis.client_list())
    if kind == "sync":
        requests = [view.submit(prompt="hello") for view in views]
        for view, other in ((0, 1), (1, 0)):
            with pytest.raises(NotFound):
                views[view].request(requests[other].id)
        assert [view.request(item.id).cancel() for view, item in zip(views, requests, strict=True)] == ["cancelled"] * 2
        assert [list(item.events())[-1].state for item in requests] == ["cancelled"] * 2
        views[0].close()
    else:

        async def use() -> None:
            requests = [await view.submit(prompt="hello") for view in views]
            for view, other in ((0, 1), (1, 0)):
                with pytest.raises(NotFound):
                    await views[view].request(requests[other].id)
            assert [await item.cancel() for item in requests] == ["cancelled"] * 2
            assert [[e async for e in item.events()][-1].state for item in requests] == ["cancelled"] * 2
            await views[0].close()

        side.run(use())
    assert len(rig.redis.client_list()) <= before + 2
    assert side.submit(prompt="still open").outcome == "placed"


def test_many_readers_share_one_pubsub_connection(rig: Rig, side: Any) -> None:
    worker = rig.worker()
    requests = [rig.submit().request for _ in range(4)]
    readings = [Collecting(side.events(request)) for request in requests * 3]
    channels = [keys.request(request) for request in requests]
    eventually(lambda: all(count == 1 for _, count in rig.redis.pubsub_numsub(*channels)))
    assert len(rig.redis.client_list(_type="pubsub")) == 1
    for number, _ in enumerate(requests):
        play(worker, must_take(worker), [number])
    for reading in readings:
        check_stream(reading.wait())
    eventually(lambda: all(count == 0 for _, count in rig.redis.pubsub_numsub(*channels)))


def test_a_reader_that_leaves_early_gives_its_channel_back(rig: Rig, side: Any) -> None:
    worker = rig.worker()
    request = rig.submit().request
    claim = must_take(worker)
    begin(worker, claim)
    events = side.events(request)
    next(events)
    other = Collecting(side.events(request))
    events.close()
    eventually(lambda: rig.redis.pubsub_numsub(keys.request(request))[0][1] == 1)
    emit(worker, claim, [1])
    end(worker, claim)
    check_stream(other.wait())
    eventually(lambda: rig.redis.pubsub_numsub(keys.request(request))[0][1] == 0)


def test_closing_a_client_ends_its_readers(rig: Rig, server: PrivateBroker, kind: str) -> None:
    before = len(rig.redis.client_list())
    side = SIDES[kind](server.url, PoolConfig(silence_ms=60_000))
    request = rig.submit().request
    reading = Collecting(side.events(request))
    eventually(lambda: rig.redis.pubsub_numsub(keys.request(request))[0][1] == 1)
    side.client.close() if kind == "sync" else side.run(side.client.close())
    with pytest.raises(ClientClosed):
        reading.wait()
    side.close()
    eventually(lambda: len(rig.redis.client_list()) <= before)


def test_a_request_that_vanishes_is_a_lost_stream(rig: Rig, side: Any) -> None:
    worker = rig.worker()
    request = rig.submit().request
    reading = Collecting(side.events(request))
    claim = must_take(worker)
    begin(worker, claim)
    eventually(lambda: reading.got)
    rig.redis.delete(keys.request(request), keys.log(request))
    with pytest.raises(StreamLost, match="1-1"):
        reading.wait()


def test_a_broker_that_lost_its_data_is_a_lost_stream(rig: Rig, side: Any, server: PrivateBroker) -> None:
    request = rig.submit().request
    reading = Collecting(side.events(request))
    worker = rig.worker()
    begin(worker, must_take(worker))
    eventually(lambda: reading.got)
    server.flush()
    with pytest.raises(StreamLost, match="lost its data"):
        reading.wait()


def test_a_changed_boot_id_is_a_lost_stream_even_if_the_record_is_there(rig: Rig, side: Any) -> None:
    request = rig.submit().request
    reading = Collecting(side.events(request))
    worker = rig.worker()
    begin(worker, must_take(worker))
    eventually(lambda: reading.got)
    rig.redis.set(keys.BOOT, "another")
    with pytest.raises(StreamLost, match="lost its data"):
        reading.wait()


def test_an_expired_log_is_a_lost_stream_but_the_result_is_there(rig: Rig, side: Any) -> None:
    worker = rig.worker()
    request = rig.submit().request
    play(worker, must_take(worker), [1, 2])
    rig.redis.delete(keys.log(request))
    for after in (None, "1-1", 1):
        with pytest.raises(StreamLost, match="expired"):
            list(side.events(request, after=after))
    result = side.result(request)
    assert (result.state, result.reason, result.text, result.token_ids) == ("done", "stop", "<1><2>", [1, 2])


def test_a_stream_survives_a_killed_broker_and_what_it_forgot_is_sent_again(
    own_server: PrivateBroker, kind: str
) -> None:
    rig = Rig(own_server.url)
    side = SIDES[kind](own_server.url, QUICK)
    try:
        worker = rig.worker()
        request = rig.submit().request
        claim = must_take(worker)
        # A server whose disk is busy with an fsync holds writes back for up to 2 s: the claim must be out of its hands.
        eventually(lambda: rig.redis.info("persistence")["aof_buffer_length"] == 0)
        reading = Collecting(side.events(request))
        payloads = [events.delta(n=n, ids=[n], text="x") for n in range(1, 101)]
        for half in (payloads[:50], payloads):
            flags = worker.append(request, claim.epoch, 1, half, len(half))
            eventually(lambda half=half: len(reading.got) == len(half))
            assert flags.status == "ok"
            own_server.kill()
            own_server.start()
        stored = worker.append(request, claim.epoch, 1, payloads, 100).stored_ev
        assert stored == 100
        worker.finish(request, claim.epoch, 101, state="done", reason="stop", n=100, usage={})
        got = reading.wait()
        check_stream(got)
        assert tokens(got) == list(range(1, 101))
    finally:
        side.close()
        rig.close()


@pytest.mark.parametrize("what", ["result", "events"])
def test_a_cancelled_reader_stops_wherever_it_was(rig: Rig, server: PrivateBroker, what: str) -> None:
    """The library forgets a cancellation that meets the end of one of its waits, up to Python 3.11."""
    request = rig.submit().request

    async def reading(client: AsyncClient) -> None:
        handle = AsyncRequest(client, request)
        if what == "result":
            await handle.result()
        async for _ in handle.events():
            pass

    async def cancelled_at_every_step() -> list[int]:
        async with AsyncClient(server.url, config=PoolConfig(silence_ms=60_000)) as client:
            await client.request(request)
            forgotten = []
            for steps in range(60):
                task = asyncio.create_task(reading(client))
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait({task}, timeout=1)
                if not task.done():
                    forgotten.append(steps)
                    task.cancel()
                    await asyncio.wait({task})
            return forgotten

    assert asyncio.run(cancelled_at_every_step()) == []
    eventually(lambda: not rig.redis.pubsub_channels("*"))
