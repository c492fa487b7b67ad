"""Many conversations on few workers: order exact, pins sticky, and nothing left behind."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.pool import Pool, wait_for

STAYS = ("prism:boot", "prism:stats", "prism:models", "prism:names", "prism:ws", "prism:w:", "prism:rq:worker")
"""Keys, or beginnings of keys, that live as long as the broker or a worker."""


def run(pool: Pool, conversations: int, turns: int) -> dict[str, list[str]]:
    """Submits everything at once and waits for the end; returns the requests of each conversation in order."""
    requests: dict[str, list[str]] = {f"c{number}": [] for number in range(conversations)}
    for turn in range(turns):
        for name, made in requests.items():
            message = {"role": "user", "content": f"{name} {turn}"}
            made.append(pool.submit(messages=[message], conversation=name, max_tokens=3, deadline_ms=550_000))
    wait_for(lambda: not pool.redis.zcard("prism:live"), "all turns to end", 600)
    return requests


def check(pool: Pool, requests: dict[str, list[str]], *, reuse: bool) -> None:
    """Each conversation: one turn at a time, in order, on one worker, each (`reuse`) finding what the last one left."""
    for name, made in requests.items():
        pipe = pool.redis.pipeline(transaction=False)
        for request in made:
            pipe.hgetall(f"prism:r:{request}").xrange(f"prism:r:{request}:log", "-", "+")
        answers = pipe.execute()
        before, workers = 0, set()
        for turn, (record, entries) in enumerate(zip(answers[::2], answers[1::2], strict=True)):
            events: list[dict[str, Any]] = [msgpack.unpackb(fields[b"d"]) for _, fields in entries]
            assert record[b"state"] == b"done", (name, record)
            assert int(record[b"taken"]) >= before
            before = int(record[b"ended"])
            workers.add(events[0]["worker"])
            if reuse and turn:
                assert events[0]["reused_tokens"] > 0
            assert [event["k"] for event in events].count("end") == 1
        assert len(workers) == 1, f"{name} ran on {workers}"


def lasting(pool: Pool) -> set[str]:
    """Keys without an expiry that belong to no worker."""
    found = set()
    for key in pool.redis.scan_iter(count=1000):
        name = key.decode()
        if not name.startswith(STAYS) and pool.redis.ttl(key) == -1:
            found.add(name)
    return found


def descriptors(pool: Pool) -> list[int]:
    return [len(os.listdir(f"/proc/{pid}/fd")) for pid in sorted(pool.supervisor.pids)]


def warm(pool: Pool) -> list[int]:
    """Open descriptors of each worker before the work, but after each has run a turn."""
    for worker in range(pool.count):
        pool.submit(prompt=f"warm {worker}", max_tokens=300)
    wait_for(lambda: not pool.redis.zcard("prism:live"), "the first turns")
    return descriptors(pool)


def check_footprint(pool: Pool, before: list[int]) -> None:
    """Nothing grows with the turns. A worker has four users of connections: loop, flusher, heart, and a turn's line."""
    for then, now in zip(before, descriptors(pool), strict=True):
        assert now <= then + 3
    assert pool.redis.info("clients")["connected_clients"] <= sum(before)


def test_conversations_stay_in_order_and_in_place_and_leave_nothing_behind(tmp_path: Path):
    life = {"log_s": 2, "result_s": 2, "idempotency_s": 2, "pin_s": 2}
    limits = {"conversation_s": 600, "max_deadline_s": 600.0, "default_deadline_s": 600.0}
    with Pool(tmp_path, 2, model="toy", pool={**life, **limits}) as pool:
        before = warm(pool)
        requests = run(pool, 20, 4)
        check(pool, requests, reuse=True)
        assert lasting(pool) <= {"prism:rq:queues", "prism:rq:workers"}
        wait_for(lambda: not list(pool.redis.scan_iter("prism:r:*")), "the records to expire", 20)
        wait_for(lambda: not list(pool.redis.scan_iter("prism:rq:job:*")), "RQ's records to expire", 20)
        assert not list(pool.redis.scan_iter("prism:rq:results:*"))
        check_footprint(pool, before)


@pytest.mark.full
def test_a_thousand_conversations_of_ten_turns_over_four_workers(tmp_path: Path):
    settings = {"max_open": 20_000, "max_deadline_s": 600.0, "default_deadline_s": 600.0}
    with Pool(tmp_path, 4, model="toy", pool=settings) as pool:
        before = warm(pool)
        began = time.monotonic()
        requests = run(pool, 1000, 10)
        print(f"10,000 turns in {time.monotonic() - began:.0f} s")
        # A worker has 250 conversations here and keeps 64 prefixes.
        check(pool, requests, reuse=False)
        assert lasting(pool) <= {"prism:rq:queues", "prism:rq:workers"}
        check_footprint(pool, before)
