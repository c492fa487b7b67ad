"""Waiting for a result: told of every end, sent no token, and told when there is nothing to wait for any more."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker import keys
from broker.config import PoolConfig
from broker.connect import TRIES
from broker.errors import ResultTimeout, StreamLost
from tests.brokers import PrivateBroker
from tests.conformance.proxy import AbsentProxy
from tests.conformance.rig import Rig, begin, emit, end, eventually, must_take, play
from tests.conformance.sides import QUICK, SIDES, Collecting


def waited(side: Any, request: str) -> Collecting:
    """Somebody who waits for a result; what comes is its state."""

    def one() -> Iterator[Any]:
        yield side.result(request, timeout=20).state

    return Collecting(one())


ENDS: dict[str, tuple[str, Callable[[Rig, str], object]]] = {
    "finished": ("done", lambda rig, request: play(worker := rig.worker(), must_take(worker), [1])),
    "failed": ("failed", lambda rig, request: end(worker := rig.worker(), must_take(worker), state="failed")),
    "cancelled while queued": ("cancelled", lambda rig, request: rig.cancel(request)),
    "cancelled with its worker lost": ("cancelled", lambda rig, request: lose_cancelled(rig, request)),
    "expired": ("expired", lambda rig, request: (rig.age(request), rig.reaper().tick())),
}


def lose_cancelled(rig: Rig, request: str) -> None:
    worker = rig.worker()
    must_take(worker)
    rig.cancel(request)
    rig.kill(worker)


@pytest.mark.parametrize("how", ENDS)
def test_every_end_is_told_to_who_waits_and_no_token_is_sent_to_them(
    rig: Rig, server: PrivateBroker, kind: str, how: str
) -> None:
    side = SIDES[kind](server.url, PoolConfig(silence_ms=60_000))
    try:
        request = rig.submit().request
        waiting = waited(side, request)
        eventually(lambda: rig.redis.pubsub_numsub(keys.end(request))[0][1] == 1)
        assert rig.redis.pubsub_numsub(keys.request(request))[0][1] == 0
        state, bring_about = ENDS[how]
        bring_about(rig, request)
        assert waiting.wait() == [state]
        eventually(lambda: rig.redis.pubsub_numsub(keys.end(request))[0][1] == 0)
    finally:
        side.close()


@pytest.mark.parametrize("loss", ["the record", "the data", "the boot id"])
def test_who_waits_for_a_result_learns_that_it_is_lost(rig: Rig, side: Any, server: PrivateBroker, loss: str) -> None:
    request = rig.submit().request
    waiting = waited(side, request)
    eventually(lambda: rig.redis.pubsub_numsub(keys.end(request))[0][1] == 1)
    if loss == "the record":
        rig.redis.delete(keys.request(request))
    elif loss == "the data":
        server.flush()
    else:
        rig.redis.set(keys.BOOT, "another")
    with pytest.raises(StreamLost, match="does not exist" if loss == "the record" else "lost its data"):
        waiting.wait()


def test_a_result_is_waited_for(rig: Rig, side: Any) -> None:
    worker = rig.worker()
    request = side.submit(prompt="hello").id
    with pytest.raises(ResultTimeout, match=request):
        side.result(request, timeout=0.1)
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(side.result(request, timeout=30)))
    waiting.start()
    claim = must_take(worker)
    begin(worker, claim)
    with pytest.raises(ResultTimeout):
        side.result(request, timeout=0.1)
    emit(worker, claim, [1])
    end(worker, claim, ids=[1])
    waiting.join(30)
    assert [(result.state, result.text) for result in got] == [("done", "<1>")]


def test_a_result_comes_although_the_broker_goes_away_at_any_of_its_commands(
    rig: Rig, server: PrivateBroker, kind: str
) -> None:
    """For longer than a client repeats a command by itself."""
    request = rig.submit().request
    play(worker := rig.worker(), must_take(worker), [1])
    with tempfile.TemporaryDirectory(prefix="pz") as folder:
        proxy = AbsentProxy(Path(folder) / "p", Path(server.url.removeprefix("unix://")))
        side = SIDES[kind](proxy.url, QUICK)
        try:
            handle = side.handle(request)
            survived = 0
            while True:
                proxy.leave_at(survived + 1, commands=6 * TRIES)
                assert side.result(handle, timeout=20).state == "done"
                if not proxy.back:
                    break
                survived += 1
            assert survived >= 3, "where it stands, the boot id, the record"
        finally:
            side.close()
            proxy.close()


@pytest.mark.parametrize("loss", ["its last moments", "the record", "the data"])
def test_a_broker_that_comes_back_poorer_before_the_record_is_read_gives_no_half_result(
    rig: Rig, side: Any, server: PrivateBroker, loss: str
) -> None:
    request = rig.submit().request
    play(worker := rig.worker(), must_take(worker), [1])
    record, calls = side.client.record, []

    def poorer(name: str) -> Any:
        calls.append(name)
        if len(calls) == 1:
            if loss == "its last moments":
                rig.redis.hset(keys.request(name), "state", "running")
                threading.Timer(0.3, rig.redis.hset, (keys.request(name), "state", "done")).start()
            elif loss == "the record":
                rig.redis.delete(keys.request(name))
            else:
                server.flush()
        return record(name)

    side.client.record = poorer
    if loss == "its last moments":
        assert side.result(request, timeout=20).state == "done"
        assert len(calls) == 2
    else:
        with pytest.raises(StreamLost, match="does not exist" if loss == "the record" else "lost its data"):
            side.result(request, timeout=20)
