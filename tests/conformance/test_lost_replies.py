"""Every script, sent again blindly: called twice, and with its reply lost between server and client, each call in
turn."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from broker import events, keys
from broker.config import PoolConfig
from broker.lua import Scripts
from tests.brokers import PrivateBroker
from tests.conformance.proxy import LossyProxy
from tests.conformance.rig import QUICK, Rig, begin, check_settled, check_stream, emit, end, must_take, play, tokens
from tests.pool import wait_for


class Twice:
    """Runs each script twice and answers with the second reply, as if the first had been lost."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    def run(self, name: str, keys: Any, arguments: Any) -> Any:
        self._scripts.run(name, keys, arguments)
        return self._scripts.run(name, keys, arguments)


def life_of_a_pool(rig: Rig, double: Callable[[Rig, Any], None] = lambda rig, worker: None) -> dict[str, list[int]]:
    """Every script at least once: submit, take, append, finish, settle, poll, yield, cancel, drain, reap, leave,
    sweeps.

    Returns the token ids that each request's stream ended with; the invariants are checked here.
    """
    one, two = rig.worker("w1"), rig.worker("w2")
    for worker in (one, two):
        double(rig, worker)
        worker.beat({"tokens": 1})
    requests: dict[str, str] = {}
    for name in ("plain", "first", "second", "third"):
        conversation = None if name == "plain" else "c"
        requests[name] = rig.submit(conversation=conversation, idempotency_key=name).request
    assert rig.submit(conversation="c", idempotency_key="third").request == requests["third"]
    requests["line"] = rig.submit(priority="batch").request
    assert rig.cancel(requests["third"]) in ("cancelled", "ended")

    claim = must_take(one)
    assert claim.request == requests["plain"]
    play(one, claim, [1, 2])
    claim = must_take(one)
    assert claim.request == requests["first"]
    begin(one, claim)
    emit(one, claim, [3])
    rig.kill(one)
    claim = must_take(two)
    assert (claim.request, claim.emitted) == (requests["first"], [3])
    play(two, claim, [4], turn=rig.turn(claim.request, 0))
    claim = must_take(two)
    assert claim.request == requests["second"]
    begin(two, claim)
    assert rig.cancel(claim.request) == "cancelling"
    assert two.poll(claim.request, claim.epoch).cancel
    end(two, claim, state="cancelled", reason="cancelled")
    claim = must_take(two)
    assert claim.request == requests["line"]
    begin(two, claim)
    emit(two, claim, [5])
    assert two.give_back(claim.request, claim.epoch, "preempted").status in ("ok", "again")
    claim = must_take(two)
    begin(two, claim)
    emit(two, claim, [6])
    two.drain()
    assert two.give_back(claim.request, claim.epoch, "drain").status in ("ok", "again")
    two.leave()
    three = rig.worker("w3")
    double(rig, three)
    claim = must_take(three)
    assert (claim.request, claim.emitted) == (requests["line"], [5, 6])
    play(three, claim, [7])
    late = rig.submit(conversation="d").request
    requests["late"] = late
    rig.age(late)
    reaper = rig.reaper()
    reaper._run = rig.scripts.run
    reaper.tick()
    reaper.audit_all()
    assert three.take() is None

    states = {name: rig.state(request) for name, request in requests.items()}
    assert states == {
        "plain": "done",
        "first": "done",
        "second": "cancelled",
        "third": "cancelled",
        "line": "done",
        "late": "expired",
    }
    streams = {name: rig.log(request) for name, request in requests.items()}
    for stream in streams.values():
        check_stream(stream)
    check_settled(rig)
    ckey = keys.conversation_key("local", "c")
    assert len(rig.items_raw(keys.conversation_part(ckey, "hist"))) == 1
    assert rig.stat("submitted") == 6
    return {name: tokens(stream) for name, stream in streams.items()}


TOKENS = {"plain": [1, 2], "first": [3, 4], "second": [], "third": [], "line": [5, 6, 7], "late": []}


def test_a_pool_whose_every_call_is_made_once(rig: Rig) -> None:
    assert life_of_a_pool(rig) == TOKENS


def test_a_pool_whose_every_call_is_made_twice(rig: Rig) -> None:
    twice = Twice(rig.scripts)
    rig.scripts = twice  # type: ignore[assignment]

    def double(rig: Rig, worker: Any) -> None:
        append = worker.append  # past its first, it is not run by `_run`
        worker._run = twice.run
        worker.append = lambda *arguments: (append(*arguments), append(*arguments))[1]

    assert life_of_a_pool(rig, double) == TOKENS


def test_each_reply_of_a_pool_s_life_lost_once(lossy: LossyProxy, server: PrivateBroker) -> None:
    """The k-th script call's reply is lost, for every k: the same streams, the same transcripts, nothing left."""
    rig = Rig(lossy.url, retry=QUICK)
    assert life_of_a_pool(rig) == TOKENS
    total = lossy.calls
    rig.close()
    assert total > 40
    for k in range(1, total + 1):
        server.flush()
        lossy.calls = 0
        lossy.lose = {k}
        rig = Rig(lossy.url, retry=QUICK)
        try:
            assert life_of_a_pool(rig) == TOKENS, f"with the reply of call {k} lost"
        finally:
            rig.close()
        assert not lossy.lose or lossy.calls < k
    assert lossy.lost >= total - 1


def test_many_replies_of_a_pool_s_life_lost_at_random(lossy: LossyProxy, server: PrivateBroker) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for _ in range(10):
        server.flush()
        lossy.calls = 0
        # Two losses in a row at most: more are an outage, which is not what this test is about.
        lossy.lose = {k for k in range(1, 400) if dice.random() < 0.3 and k % 3}
        rig = Rig(lossy.url, retry=QUICK)
        try:
            assert life_of_a_pool(rig) == TOKENS
        finally:
            rig.close()
    assert lossy.lost > 50


def test_scripts_come_back_after_a_script_flush_and_a_restart(own_server: PrivateBroker) -> None:
    rig = Rig(own_server.url)
    worker = rig.worker()
    rig.submit()
    rig.redis.script_flush()
    claim = must_take(worker)
    # What a disk stalled in fsync holds back is lost with the server; here it is the scripts that matter.
    wait_for(lambda: _all_written(rig), "the append-only file to be written")
    own_server.kill()
    own_server.start()
    play(worker, claim, [1])
    check_settled(rig)
    rig.close()


def _all_written(rig: Rig) -> bool:
    state = rig.redis.info("persistence")
    return state["aof_buffer_length"] == 0 and state["aof_pending_bio_fsync"] == 0


def test_pools_with_other_numbers_share_no_script(rig: Rig) -> None:
    worker = rig.worker()
    short = rig.with_config(lease_ms=40, beat_ms=10)
    short.scripts.run("join", [keys.worker("w9")], ["w9", worker.lease.pack().replace("w1", "w9")])
    assert 0 < rig.redis.pttl(keys.worker("w9")) <= 40
    assert rig.redis.pttl(keys.worker("w1")) > 40
    assert PoolConfig().lease_ms == 5000


def test_an_event_is_one_round_trip(lossy: LossyProxy) -> None:
    """Counted at the proxy: one command for a submit, an append, a take, a finish."""
    rig = Rig(lossy.url, retry=QUICK)
    worker = rig.worker()
    rig.submit()
    claim = must_take(worker)
    begin(worker, claim)
    play(worker, claim, [1])
    before = lossy.calls
    rig.submit()
    claim = must_take(worker)
    worker.append(claim.request, claim.epoch, 1, [events.delta(n=1, ids=[1], text="x")], 1)
    assert lossy.calls - before == 3
    rig.close()
