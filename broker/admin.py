"""The pool as an operator sees it: workers, queues, counters, and how many workers the backlog needs.

Kept: reading only, in a few round trips, so `prism top` and a metrics scrape cost the pool next to nothing.
Not promised: one instant. Numbers of different keys are read one after the other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import redis

from broker import calls, keys, reap
from broker.config import PoolConfig
from broker.errors import NotFound
from broker.failures import translated
from broker.lua import Scripts
from broker.store import Lease

__all__ = ["Admin", "Depths", "Snapshot", "WorkerInfo"]


@dataclass(frozen=True)
class WorkerInfo:
    """One worker."""

    name: str
    state: str
    """idle, busy, draining, lapsed (no lease: dead or cut off) or reaping."""
    lease: Lease | None
    running: list[str]
    queued: int
    """Turns in its home queues."""
    stats: dict[str, str] = field(default_factory=dict)
    """What it reported with its beats, under its own names; `beat` is the broker time (ms) of the last one."""


@dataclass(frozen=True)
class Depths:
    """Turns that wait, by priority."""

    interactive: int = 0
    background: int = 0
    batch: int = 0

    @property
    def total(self) -> int:
        return self.interactive + self.background + self.batch


@dataclass(frozen=True)
class Snapshot:
    """The pool now."""

    boot: str
    now_ms: int
    workers: list[WorkerInfo]
    open_requests: int
    """Queued, boxed and running."""
    running: int
    queued: Depths
    """In open and home queues."""
    boxed: int
    """Behind the active turn of their conversation."""
    parked: dict[str, int]
    """Model identity -> turns in its open queues while no worker of it lives; '' for turns that name no model."""
    oldest_wait_ms: int
    """Broker time for which the longest waiting turn in an open queue has waited."""
    counters: dict[str, int]
    """`prism:stats`: submitted, replayed, refused, ended.<state>, moved.<why>, fenced_writes, generation_tokens, ..."""
    models: dict[str, str]
    """Model identity -> name, of every model that ever joined."""
    behind_ms: int = 0
    """Broker time for which the longest waiting background turn or batch line has waited: interactive turns always go
    first, so a pool that these keep full never comes to the others."""

    def wanted_workers(self, waiting_per_worker: int = 1) -> int:
        """Workers that the backlog needs: one for each running turn, and one for each `waiting_per_worker` waiting
        ones.

        Boxed turns do not count: they cannot run before their predecessor. 0 only if nothing waits or runs.
        """
        return self.running + math.ceil(self.queued.total / max(1, waiting_per_worker))


class Admin:
    """Operator's calls. Owners do not matter here."""

    def __init__(self, client: redis.Redis, config: PoolConfig | None = None) -> None:
        self.redis = client
        self.config = config or PoolConfig()
        self._run = Scripts(client, self.config).run

    def workers(self) -> list[WorkerInfo]:
        """Members and those being reaped, by name."""
        with translated():
            pipe: Any = self.redis.pipeline(transaction=False)
            for name in (keys.WORKERS, keys.REAPING, keys.DRAINING):
                pipe.smembers(name)
            members, reaping, draining = ({item.decode() for item in found} for found in pipe.execute())
            names = sorted(members | reaping)
            for name in names:
                base = keys.worker(name)
                pipe.get(base).smembers(base + ":run").hgetall(base + ":stat")
                for queue in keys.home_queues(name):
                    pipe.llen(queue)
            answers = pipe.execute()
        found = []
        for index, name in enumerate(names):
            lease, run, stat, *lengths = answers[6 * index : 6 * index + 6]
            state = "busy" if run else "idle"
            if name in reaping:
                state = "reaping"
            elif lease is None:
                state = "lapsed"
            elif name in draining:
                state = "draining"
            found.append(
                WorkerInfo(
                    name=name,
                    state=state,
                    lease=Lease.unpack(lease) if lease else None,
                    running=sorted(item.decode() for item in run),
                    queued=sum(lengths),
                    stats={key.decode(): value.decode() for key, value in stat.items()},
                )
            )
        return found

    def snapshot(self) -> Snapshot:
        """Everything for `prism top` and the metrics."""
        workers = self.workers()
        with translated():
            pipe: Any = self.redis.pipeline(transaction=False)
            pipe.time().get(keys.BOOT).zcard(keys.LIVE).hgetall(keys.STATS).hgetall(keys.MODELS).smembers(
                keys.RQ_QUEUES
            )
            time, boot, open_requests, stats, models, queues = pipe.execute()
            names = sorted(item.decode() for item in queues)
            for name in names:
                pipe.llen(name).lindex(name, 0)
            answers = pipe.execute()
            depth = {name: answers[2 * index] for index, name in enumerate(names)}
            heads = {name: answers[2 * index + 1] for index, name in enumerate(names)}
            now_ms = time[0] * 1000 + time[1] // 1000
            oldest = self._oldest_wait((head for name, head in heads.items() if ":open." in name), now_ms)
            behind = self._oldest_wait((head for name, head in heads.items() if name.endswith(BEHIND)), now_ms)
        running = sum(len(worker.running) for worker in workers)
        identities = {keys.model_tag(item.decode()): item.decode() for item in models}
        serving = {worker.lease.model for worker in workers if worker.lease and worker.state in ("idle", "busy")}
        queued = _depths(depth)
        return Snapshot(
            boot=(boot or b"").decode(),
            now_ms=now_ms,
            workers=workers,
            open_requests=open_requests,
            running=running,
            queued=queued,
            boxed=max(0, open_requests - running - queued.total),
            parked=_parked(depth, identities, serving),
            oldest_wait_ms=oldest,
            behind_ms=behind,
            counters={key.decode(): int(value) for key, value in sorted(stats.items())},
            models={item.decode(): _name(value) for item, value in models.items()},
        )

    def cancel(self, request: str, reason: str = "cancelled by an operator") -> str:
        """Cancel anybody's request; the answers of `Request.cancel`."""
        call = calls.cancel(request, "", reason)
        return call.parse(self._run(call.script, call.keys, call.arguments))

    def drain(self, worker: str) -> int:
        """Let a worker finish what it runs and take no more; returns how many queued turns moved. `NotFound`."""
        return reap.drain(self._run, keys.check_id(worker, "worker"))

    def record(self, request: str) -> calls.Record:
        """Anybody's request; `NotFound`."""
        with translated():
            values: list[Any] = self.redis.hmget(keys.request(request), list(calls.RECORD_FIELDS))
        return calls.read_record(request, "", values)

    def model(self, wanted: str) -> str:
        """The identity that a model's name stands for; `NotFound`."""
        with translated():
            identity: Any = self.redis.hget(keys.NAMES, wanted)
        if identity is None:
            raise NotFound(f"no worker of this pool has ever run model {wanted!r}")
        return str(identity.decode())

    def _oldest_wait(self, heads: Iterable[bytes | None], now_ms: int) -> int:
        pipe = self.redis.pipeline(transaction=False)
        for head in heads:
            if head is not None:
                pipe.hget(keys.request(head.decode()), "queued_at")
        since = [int(value) for value in pipe.execute() if value is not None]
        return max(0, now_ms - min(since)) if since else 0


BEHIND = (".background", ".bg", ".batch")
"""Ends of the names of queues whose turns wait for a slot that no interactive turn wants."""


def _depths(depth: dict[str, int]) -> Depths:
    totals = dict.fromkeys(keys.PRIORITIES, 0)
    for name, length in depth.items():
        if name.endswith((".batch",)):
            totals["batch"] += length
        elif name.endswith((".background", ".bg")):
            totals["background"] += length
        else:
            totals["interactive"] += length
    return Depths(**totals)


def _parked(depth: dict[str, int], identities: dict[str, str], serving: set[str]) -> dict[str, int]:
    parked: dict[str, int] = {}
    for name, length in depth.items():
        _, is_open, rest = name.partition(":queue:open.")
        if not is_open or not length:
            continue
        tag = rest.split(".")[0]
        identity = "" if tag == "any" else identities.get(tag, tag)
        if not (serving if tag == "any" else identity in serving):
            parked[identity] = parked.get(identity, 0) + length
    return parked


def _name(facts: bytes) -> str:
    return str(json.loads(facts).get("name", ""))
