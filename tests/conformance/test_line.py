"""Appends over a turn's line: the same answers as in the ordinary way, and the ordinary way whenever it fails."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ResponseError

from broker import events
from broker.answers import Claim
from broker.errors import BrokerFull, BrokerUnavailable
from broker.store import WorkerStore
from tests.brokers import PrivateBroker
from tests.conformance.proxy import LossyProxy, RudeProxy
from tests.conformance.rig import QUICK, Rig, begin, check_settled, check_stream, emit, end, must_take, tokens
from tests.pool import wait_for


class Ordinary:
    """Counts the calls that a worker makes in the ordinary way."""

    def __init__(self, worker: WorkerStore) -> None:
        self._run = worker._run
        self.appends = 0
        worker._run = self.run

    def run(self, name: str, keys: Any, arguments: Any) -> Any:
        self.appends += name == "append"
        return self._run(name, keys, arguments)


def started(rig: Rig, worker: WorkerStore, running: Sequence[str] = (), **submission: Any) -> Claim:
    rig.submit(**submission)
    claim = must_take(worker, running)
    begin(worker, claim)
    emit(worker, claim, [1])
    return claim


def append(worker: WorkerStore, claim: Claim, token: int) -> Any:
    delta = events.delta(n=claim.n + 1, ids=[token], text="x")
    return worker.append(claim.request, claim.epoch, claim.ev + 1, [delta], claim.n + 1)


def test_only_the_first_append_of_a_turn_goes_the_ordinary_way(rig: Rig) -> None:
    worker = rig.worker()
    ordinary = Ordinary(worker)
    for turns in (1, 2, 3):
        claim = started(rig, worker)
        emit(worker, claim, range(2, 20))
        end(worker, claim)
        check_stream(rig.log(claim.request))
        assert ordinary.appends == turns
    check_settled(rig)


def test_flags_come_back_over_the_line(rig: Rig) -> None:
    worker = rig.worker()
    claim = started(rig, worker)
    ordinary = Ordinary(worker)
    assert append(worker, claim, 2).cancel is None
    rig.cancel(claim.request, reason="why")
    flags = append(worker, claim, 2)
    assert (flags.status, flags.stored_ev, flags.cancel) == ("ok", 3, "why")
    object.__setattr__(claim, "ev", claim.ev + 2)
    flags = append(worker, claim, 3)
    assert (flags.status, flags.stored_ev) == ("behind", 3)
    assert ordinary.appends == 0


def test_a_waiting_turn_asks_a_line_to_yield_over_the_line(rig: Rig) -> None:
    worker = rig.worker()
    claim = started(rig, worker, priority="batch")
    ordinary = Ordinary(worker)
    rig.submit()
    assert append(worker, claim, 2).yield_now
    assert ordinary.appends == 0


def test_a_fenced_line_writes_nothing(rig: Rig) -> None:
    worker, other = rig.worker("w1"), rig.worker("w2")
    claim = started(rig, worker)
    rig.kill(worker)
    taken = must_take(other)
    assert taken.request == claim.request
    before = len(rig.log(claim.request))
    assert append(worker, claim, 2).status == "fenced"
    assert rig.stat("fenced_writes") == 1
    assert len(rig.log(claim.request)) == before


def test_a_request_that_vanished_is_gone_over_the_line(rig: Rig) -> None:
    worker = rig.worker()
    claim = started(rig, worker)
    rig.redis.delete(f"prism:r:{claim.request}")
    assert append(worker, claim, 2).status == "gone"


def test_a_flushed_script_cache_costs_one_append_its_line(rig: Rig) -> None:
    worker = rig.worker()
    claim = started(rig, worker)
    ordinary = Ordinary(worker)
    rig.redis.script_flush()
    emit(worker, claim, range(2, 10))
    assert ordinary.appends == 1
    end(worker, claim)
    assert tokens(rig.log(claim.request)) == list(range(1, 10))


def test_a_killed_connection_costs_one_append_its_line(rig: Rig) -> None:
    worker = rig.worker()
    claim = started(rig, worker)
    ordinary = Ordinary(worker)
    for token in range(2, 6):
        rig.redis.client_kill_filter(_type="normal", skipme=True)
        emit(worker, claim, [token])
    assert ordinary.appends > 0
    end(worker, claim)
    assert tokens(rig.log(claim.request)) == list(range(1, 6))


def test_an_append_meets_a_restarted_broker(own_server: PrivateBroker) -> None:
    rig = Rig(own_server.url)
    rig.redis.config_set("appendfsync", "always")
    worker = rig.worker()
    claim = started(rig, worker)
    own_server.kill()
    own_server.start()
    emit(worker, claim, range(2, 6))
    end(worker, claim)
    assert tokens(rig.log(claim.request)) == list(range(1, 6))
    rig.close()


def test_threads_that_append_side_by_side_have_a_line_each(rig: Rig) -> None:
    worker = rig.worker()
    claims: list[Claim] = []
    for _ in range(4):
        claims.append(started(rig, worker, [claim.request for claim in claims]))
    threads = [threading.Thread(target=emit, args=(worker, claim, range(2, 60))) for claim in claims]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for claim in claims:
        end(worker, claim)
        assert tokens(rig.log(claim.request)) == list(range(1, 60))
        check_stream(rig.log(claim.request))
    check_settled(rig)


def test_a_reply_that_a_line_loses_is_asked_for_again(lossy: LossyProxy) -> None:
    rig = Rig(lossy.url, retry=QUICK)
    worker = rig.worker()
    claim = started(rig, worker)
    ordinary = Ordinary(worker)
    for token in range(2, 20):
        lossy.lose = {lossy.calls + 1} if token % 3 == 0 else set()
        emit(worker, claim, [token])
    assert lossy.lost == ordinary.appends == 6
    lossy.lose = set()
    end(worker, claim)
    assert tokens(rig.log(claim.request)) == list(range(1, 20))
    check_stream(rig.log(claim.request))
    rig.close()


def test_an_answer_is_never_that_of_another_append(server: PrivateBroker) -> None:
    """Replies in pieces, cut short, lost or late: each append gets its own answer, or none and is sent again."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    server.flush()
    with tempfile.TemporaryDirectory(prefix="pz") as folder, contextlib.ExitStack() as stack:
        proxy = RudeProxy(Path(folder) / "p", server.socket, dice)
        stack.callback(proxy.close)
        rig, plain = Rig(proxy.url, retry=QUICK, socket_timeout=0.05), Rig(server.url)
        stack.callback(rig.close)
        stack.callback(plain.close)
        worker = rig.worker()
        for _ in range(3):
            claim = started(rig, worker)
            proxy.rude = True
            for number in range(100):
                if number == 80:
                    plain.cancel(claim.request, reason="why")
                cancel = "why" if number >= 80 else None
                kind = dice.choice(("next", "next", "next", "far", "foreign"))
                epoch, ev = claim.epoch + (kind == "foreign"), claim.ev + (3 if kind == "far" else 1)
                payloads = [events.delta(n=claim.n + 1, ids=[number], text="é")] * dice.randrange(1, 4)
                flags = patient_append(worker, claim.request, epoch, ev, payloads, claim.n + 1)
                if kind == "next":
                    object.__setattr__(claim, "ev", claim.ev + len(payloads))
                    assert flags == ("ok", claim.ev, cancel, False)
                else:
                    assert flags[:2] == (("behind", claim.ev) if kind == "far" else ("fenced", 0))
            proxy.rude = False
            assert [event.sequence for event in plain.log(claim.request)] == list(range(1, claim.ev + 1))
            end(worker, claim, state="cancelled", reason="why")
    assert set(proxy.manners) >= {"whole", "pieces", "half", "none", "late"}


def patient_append(worker: WorkerStore, *arguments: Any) -> Any:
    while True:
        with contextlib.suppress(BrokerUnavailable):
            return worker.append(*arguments)


def out_of_memory(rig: Rig, server: PrivateBroker) -> Any:
    rig.redis.config_set("maxmemory", 1)
    return lambda: rig.redis.config_set("maxmemory", 0)


def a_replica(rig: Rig, server: PrivateBroker) -> Any:
    rig.redis.replicaof("127.0.0.1", "1")
    return lambda: rig.redis.replicaof("NO", "ONE")


def a_long_script(rig: Rig, server: PrivateBroker) -> Any:
    rig.redis.config_set("lua-time-limit", 1)
    client = server.client()

    def run() -> None:
        with contextlib.suppress(ResponseError):
            client.eval("while true do end", 0)

    thread = threading.Thread(target=run)
    thread.start()

    def is_busy() -> bool:
        try:
            return not rig.redis.ping()
        except ResponseError:
            return True

    wait_for(is_busy, "the script to be too long")
    return lambda: (rig.redis.script_kill(), thread.join())


@pytest.mark.parametrize(
    ("trouble", "error"),
    [(out_of_memory, BrokerFull), (a_replica, BrokerUnavailable), (a_long_script, BrokerUnavailable)],
)
def test_a_refusal_that_passes_is_no_answer_and_the_append_is_sent_again(
    own_server: PrivateBroker, trouble: Any, error: type[Exception]
) -> None:
    rig = Rig(own_server.url)
    worker = rig.worker()
    claim = started(rig, worker)
    healed = trouble(rig, own_server)
    for _ in range(2):
        with pytest.raises(error):
            append(worker, claim, 2)
    healed()
    emit(worker, claim, [2, 3])
    end(worker, claim)
    assert tokens(rig.log(claim.request)) == [1, 2, 3]
    check_stream(rig.log(claim.request))
    rig.close()


def test_a_forked_child_leaves_the_line_to_its_parent(rig: Rig) -> None:
    worker = rig.worker()
    claim = started(rig, worker)
    ordinary = Ordinary(worker)
    child = os.fork()
    if child == 0:
        done = False
        try:
            done = append(worker, claim, 2).stored_ev == 3 and ordinary.appends == 1
        finally:
            os._exit(0 if done else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    flags = append(worker, claim, 2)
    assert (flags.status, flags.stored_ev, ordinary.appends) == ("ok", 3, 0)


def leave_done(rig: Rig, worker: WorkerStore, claim: Claim) -> None:
    end(worker, claim)


def leave_cancelled(rig: Rig, worker: WorkerStore, claim: Claim) -> None:
    end(worker, claim, state="cancelled", reason="cancelled")


def leave_handed_back(rig: Rig, worker: WorkerStore, claim: Claim) -> None:
    assert worker.give_back(claim.request, claim.epoch, "preempted").status == "ok"
    heir = must_take(worker)
    assert append(worker, claim, 2).status == "fenced"
    end(worker, heir)


def leave_gone(rig: Rig, worker: WorkerStore, claim: Claim) -> None:
    rig.redis.delete(f"prism:r:{claim.request}")
    assert append(worker, claim, 2).status == "gone"
    rig.redis.delete(f"prism:w:{worker.worker}:run")


@pytest.mark.parametrize("leave", [leave_done, leave_cancelled, leave_handed_back, leave_gone])
def test_lines_hold_no_more_connections_than_calls_at_once_need(rig: Rig, leave: Any) -> None:
    worker = rig.worker()
    for _ in range(20):
        leave(rig, worker, started(rig, worker))
    mine = [client for client in rig.redis.client_list() if client["cmd"] != "subscribe"]
    assert len(mine) <= 3
