"""Who runs a batch, and what the pool is told of it: `prism:b:B`.

Kept: a lease has one holder at a time, under an epoch that only grows; a runner whose lease another has taken is told
so at its next renewal and writes nothing more. A runner that has the lock on the batch's files need not wait for the
lease of another one on its own machine: that one is dead, or it would have the lock. Counts are for people to look at;
the truth is in the files.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis

from broker import keys
from broker.batch.errors import HeldElsewhere, LeaseLost
from broker.config import PoolConfig
from broker.errors import NotFound
from broker.failures import translated
from broker.keys import new_ulid
from broker.lua import Scripts

__all__ = ["LEASE_MS", "BatchLease", "Known", "cancel_batch", "read_batch", "read_batches"]

LEASE_MS = 5_000
KEEP_S = 30 * 86_400
"""Time for which counts are kept after the last word of a runner."""


class BatchLease:
    """One runner's hold on one batch."""

    def __init__(self, client: redis.Redis, config: PoolConfig, batch: str, owner: str) -> None:
        self._run = Scripts(client, config).run
        self._batch = batch
        self._owner = owner
        self._host = platform.node()
        self.runner = f"{self._host}:{os.getpid()}:{new_ulid()}"
        self.epoch = 0
        self.cancelled = False
        """Somebody asked through the pool that the batch be cancelled."""

    def take(self, facts: Mapping[str, str | int], *, forget_cancel: bool = False) -> None:
        """Becomes the runner, under a new epoch. `HeldElsewhere`; `BrokerUnavailable`."""
        reply = self._call("take", facts, "1" if forget_cancel else "0")
        if reply[0] < 0:
            holder = reply[1].decode().partition(":")[0]
            raise HeldElsewhere(f"batch {self._batch} is being run on {holder}")
        self._heard(reply)

    def renew(self, facts: Mapping[str, str | int]) -> None:
        """Stays the runner, and tells how far the batch is. `LeaseLost`; `BrokerUnavailable`: whether is unknown."""
        reply = self._call("renew", facts)
        if reply[0] < 0:
            raise LeaseLost(f"another runner has taken batch {self._batch}")
        self._heard(reply)

    def release(self, facts: Mapping[str, str | int]) -> None:
        """Leaves the batch to others, with last words. No error if it is another's by now."""
        self._call("release", facts)

    def _heard(self, reply: Any) -> None:
        self.epoch, self.cancelled = reply[0], self.cancelled or reply[1] == 1

    def _call(self, what: str, facts: Mapping[str, str | int], extra: str = "") -> Any:
        arguments: list[str | int] = [what, self._batch, self._owner, self.runner, self._host, self.epoch]
        arguments += [LEASE_MS, KEEP_S, extra or "0"]
        arguments += [item for pair in facts.items() for item in pair]
        return self._run("batch", [keys.batch(self._batch)], arguments)


@dataclass(frozen=True)
class Known:
    """What the pool knows of a batch."""

    batch: str
    owner: str
    runner: str
    """Empty if nobody runs it now."""
    facts: dict[str, str]
    """What its runner last told: state, total, done, failed, running, ..."""

    @property
    def state(self) -> str:
        return self.facts.get("state", "unknown")


def read_batch(client: redis.Redis, batch: str) -> Known:
    """`NotFound`."""
    with translated():
        pipe = client.pipeline(transaction=False)
        pipe.time()
        pipe.hgetall(keys.batch(batch))
        (seconds, micros), found = pipe.execute()
    if not found:
        raise NotFound(f"no batch {batch}")
    facts = {name.decode(): value.decode() for name, value in found.items()}
    until, owner, runner = (facts.pop(name, "") for name in ("until", "owner", "runner"))
    alive = runner if int(until or 0) > seconds * 1000 + micros // 1000 else ""
    for name in ("host", "epoch"):
        facts.pop(name, None)
    return Known(batch, owner, alive, facts)


def read_batches(client: redis.Redis) -> list[Known]:
    """All batches that the pool remembers, the newest first."""
    with translated():
        names: Any = client.zrevrange(keys.BATCHES, 0, -1)
    found = []
    for name in names:
        try:
            found.append(read_batch(client, name.decode()))
        except NotFound:
            continue
    return sorted(found, key=lambda known: known.batch, reverse=True)


def cancel_batch(client: redis.Redis, config: PoolConfig, batch: str, owner: str = "") -> str:
    """Asks that a batch be cancelled: `cancelling` (its runner will), `waiting` (the next runner will) or its final
    state. `NotFound` if there is none, or it is another owner's ('' may cancel any)."""
    reply = Scripts(client, config).run("batch_cancel", [keys.batch(batch)], [batch, owner])
    answer: str = reply[0].decode()
    if answer == "unknown":
        raise NotFound(f"no batch {batch}")
    return answer
