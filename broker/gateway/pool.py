"""The gateway's side of the broker: one connection for all owners, and the few calls that the endpoints make.

Kept: each call names the owner that asks, so another owner's requests are "not found"; nothing is held here that a
second gateway would miss.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis.asyncio as aredis

from broker import admin, calls, keys, transcript
from broker.async_hub import AsyncHub
from broker.async_reader import AsyncReader
from broker.calls import Cancelled, Record, Submission, Submitted
from broker.config import PoolConfig
from broker.connect import Connection, connect_async
from broker.errors import NotFound
from broker.events import Event
from broker.failures import translated
from broker.lua import AsyncScripts
from broker.spec import RequestSpec
from broker.store import Lease

__all__ = ["GatewayPool", "Served"]

SNAPSHOT_S = 0.5
"""Age up to which a snapshot of the pool is shown again: any number of watchers cost one look."""


@dataclass(frozen=True)
class Served:
    """A model that workers of the pool run now."""

    name: str
    """What clients call it; its identity if it has no name."""
    identity: str
    context_tokens: int
    workers: int
    since: int
    """Unix seconds since the oldest of these workers joined."""


class GatewayPool:
    """An open connection to the pool, for one event loop. Made by `open`."""

    def __init__(self, connection: Connection, client: aredis.Redis, config: PoolConfig) -> None:
        self.config = config
        self._connection = connection
        self._redis = client
        self._hub = AsyncHub(client)
        self._scripts = AsyncScripts(client, config)
        self._admin = admin.Admin(connection.redis, config)
        self._snapshot: tuple[float, admin.Snapshot] | None = None
        self._looking = asyncio.Lock()

    @classmethod
    async def open(cls, url: str | None, config: PoolConfig | None = None, home: Path | None = None) -> GatewayPool:
        """Connects; `BrokerUnavailable` or `BrokerUnsuitable` as `broker.connect`."""
        client, connection = await connect_async(url, home=home)
        return cls(connection, client, config or PoolConfig())

    async def close(self) -> None:
        await self._hub.close()
        await self._redis.aclose()
        self._connection.close()

    async def submit(self, item: Submission, spec: RequestSpec) -> Submitted:
        """Queues a request; errors as `Client.submit`."""
        return await self._call(calls.submit(item, spec, self.config))

    async def cancel(self, owner: str, request: str, reason: str) -> Cancelled:
        """`NotFound` for another owner's."""
        return await self._call(calls.cancel(request, owner, reason))

    async def events(self, owner: str, request: str) -> AsyncIterator[Event]:
        """All events of a request from its beginning to its end; `NotFound`, `StreamLost`."""
        reader = AsyncReader(self._redis, self._hub, self.config, owner)
        async with contextlib.aclosing(reader.events(request)) as events:  # type: ignore[type-var]
            async for event in events:
                yield event

    async def progress(self, owner: str, request: str) -> int:
        """Events that a request has had so far; `NotFound`."""
        reader = AsyncReader(self._redis, self._hub, self.config, owner)
        return (await reader.head(request)).last.ev

    async def record(self, owner: str, request: str) -> Record:
        """`NotFound`."""
        keys.check_id(request, "id")
        with translated():
            values: list[Any] = await self._redis.hmget(keys.request(request), list(calls.RECORD_FIELDS))
        return calls.read_record(request, owner, values)

    async def asked(self, owner: str, request: str) -> tuple[Record, RequestSpec]:
        """A request's record and what was asked for; `NotFound`."""
        keys.check_id(request, "id")
        with translated():
            values: list[Any] = await self._redis.hmget(keys.request(request), [*calls.RECORD_FIELDS, "spec"])
        record = calls.read_record(request, owner, values[:-1])
        if values[-1] is None:
            raise NotFound(f"no request {request}")
        return record, RequestSpec.unpack(values[-1])

    async def transcript(self, owner: str, conversation: str) -> list[transcript.TurnRecord]:
        """Committed turns of a conversation, oldest first."""
        ckey = keys.conversation_key(owner, conversation)
        with translated():
            entries: list[Any] = await self._redis.lrange(keys.conversation_part(ckey, "hist"), 0, -1)
        return [transcript.TurnRecord.unpack(entry) for entry in entries]

    async def pinned(self, owner: str, conversation: str) -> str | None:
        """The worker that a conversation is pinned to."""
        ckey = keys.conversation_key(owner, conversation)
        with translated():
            worker: Any = await self._redis.get(keys.conversation_part(ckey, "pin"))
        return worker.decode() if worker is not None else None

    async def watch(self, requests: Sequence[str], by: int) -> list[int]:
        """Counts `by` more (or fewer) clients that watch the requests, over all gateways; returns the counts."""
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                for request in requests:
                    key = keys.request(request) + ":watchers"
                    pipe.incrby(key, by)
                    pipe.expire(key, self.config.result_s)
                return list(await pipe.execute())[::2]

    async def ping(self) -> None:
        """`BrokerUnavailable` if the broker does not answer."""
        with translated():
            await self._redis.ping()

    async def snapshot(self) -> admin.Snapshot:
        """The pool now, or at most half a second ago."""
        async with self._looking:
            now = time.monotonic()
            if self._snapshot is None or now - self._snapshot[0] > SNAPSHOT_S:
                self._snapshot = (now, await asyncio.to_thread(self._admin.snapshot))
            return self._snapshot[1]

    async def served(self) -> list[Served]:
        """Models with a live worker, by name."""
        with translated():
            names: Any = await self._redis.smembers(keys.WORKERS)
            async with self._redis.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.get(keys.worker(name.decode()))
                    pipe.hget(keys.worker(name.decode()) + ":stat", "joined")
                answers = await pipe.execute()
        found: dict[str, list[tuple[Lease, int]]] = {}
        for lease, joined in zip(answers[::2], answers[1::2], strict=True):
            if lease is not None:
                read = Lease.unpack(lease)
                found.setdefault(read.model, []).append((read, int(joined or 0)))
        return sorted((_served(identity, group) for identity, group in found.items()), key=lambda model: model.name)

    async def knows(self, model: str) -> bool:
        """Whether a worker of this pool has ever run the model of this name or identity."""
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.hexists(keys.NAMES, model)
                pipe.hexists(keys.MODELS, model)
                return any(await pipe.execute())

    async def _call(self, call: calls.Call[calls.T]) -> calls.T:
        return call.parse(await self._scripts.run(call.script, call.keys, call.arguments))


def _served(identity: str, workers: list[tuple[Lease, int]]) -> Served:
    return Served(
        name=workers[0][0].name or identity,
        identity=identity,
        context_tokens=min(lease.context_tokens for lease, _ in workers),
        workers=len(workers),
        since=min(joined_ms for _, joined_ms in workers) // 1000,
    )
