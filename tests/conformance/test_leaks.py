"""After the times to live nothing is left: no keys, no connections, no file descriptors, no threads."""

from __future__ import annotations

import os
import threading

from broker import Client, keys
from broker.connect import FEWEST
from broker.hub import Hub
from tests.brokers import PrivateBroker
from tests.conformance.rig import Rig, begin, emit, eventually, must_take, play

LASTING = {keys.BOOT, keys.STATS, keys.MODELS, keys.NAMES, keys.RQ_QUEUES}
"""What a pool keeps for as long as it lives, bounded by its models."""


def test_all_keys_of_a_pool_that_has_done_its_work_expire(rig: Rig) -> None:
    short = rig.with_config(
        result_s=1, log_s=1, idempotency_s=1, pin_s=1, conversation_s=2, max_deadline_s=2.0, default_deadline_s=2.0
    )
    worker, lost = short.worker("w1", called="toy"), short.worker("w2")
    for number in range(5):
        request = short.submit(conversation=f"c{number}", idempotency_key=f"k{number}").request
        play(worker, must_take(worker), [1, 2], turn=short.turn(request, 0))
    short.submit(priority="batch", group="g")
    play(worker, must_take(worker), [1])
    short.submit(conversation="d")
    claim = must_take(lost)
    begin(lost, claim)
    emit(lost, claim, [1])
    short.kill(lost)
    play(worker, must_take(worker), [2])
    flagged = short.submit().request
    claim = must_take(worker)
    short.cancel(flagged)
    play(worker, claim, [], state="cancelled")
    short.cancel(short.submit(conversation="e").request)
    short.submit(conversation="f", priority="background")
    eventually(lambda: short.reaper().tick().expired, within_s=20)
    worker.leave()
    eventually(lambda: {key.decode() for key in rig.redis.keys("*")} <= LASTING, within_s=20)
    assert set(rig.redis.smembers(keys.RQ_QUEUES)) <= {
        name.encode() for name in (keys.open_queue(m, p) for m in ("", "toy+a8.1") for p in keys.PRIORITIES)
    }


def test_a_process_that_has_used_many_clients_and_streams_holds_nothing(rig: Rig, server: PrivateBroker) -> None:
    worker = rig.worker()

    def use() -> None:
        with Client(server.url) as client:
            request = client.submit(prompt="hello")
            events = request.events()
            play(worker, must_take(worker), [1])
            next(events)
            events.close()  # type: ignore[attr-defined]
            assert request.result(timeout=20).state == "done"

    use()
    connections = eventually(lambda: len(rig.redis.client_list()), within_s=20)
    descriptors = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    for _ in range(20):
        use()
    eventually(lambda: len(rig.redis.client_list()) <= connections, within_s=20)
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert threading.active_count() <= threads


def test_a_hub_needs_no_connection_of_its_pool_however_often_it_loses_its_own(rig: Rig, server: PrivateBroker) -> None:
    few = Rig(server.url, max_connections=1)
    pool = few.redis.connection_pool
    for _ in range(FEWEST):
        pool.get_connection()
    hub = Hub(few.redis)
    assert hub.subscribe("news", 8).get(0.0) == []
    for _ in range(6):
        rig.redis.client_kill_filter(_type="pubsub")
        eventually(lambda: rig.redis.publish("news", "x"), within_s=20)
    hub.close()
    few.close()
