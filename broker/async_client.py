"""The asyncio twin of `client`, with the same names, arguments, errors and promises.

    async with AsyncClient() as client:
        request = await client.submit(prompt="Hello")
        async for event in request.events():
            print(event.text, end="")

A client belongs to the event loop in which it was entered (or first used).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis.asyncio as aredis

from broker import admin, calls, keys, transcript
from broker.async_hub import AsyncHub
from broker.async_reader import AsyncReader
from broker.calls import Cancelled, Record
from broker.client import Result, spec_of
from broker.config import PoolConfig
from broker.connect import Connection, connect
from broker.events import Event
from broker.failures import translated
from broker.lua import AsyncScripts
from broker.spec import RequestSpec

__all__ = ["AsyncClient", "AsyncRequest"]


@dataclass(frozen=True)
class AsyncRequest:
    """A request of this client's owner; see `client.Request`."""

    client: AsyncClient
    id: str
    outcome: str = ""

    @property
    def replayed(self) -> bool:
        return self.outcome == "dup"

    async def events(self, after: str | int | None = None, timeout: float | None = None) -> AsyncIterator[Event]:
        """See `client.Request.events`. Leaving the loop early gives the subscription back."""
        reader = (await self.client.opened()).reader
        async with contextlib.aclosing(reader.events(self.id, after, timeout)) as events:  # type: ignore[type-var]
            async for event in events:
                yield event

    async def record(self) -> Record:
        return await self.client.record(self.id)

    async def result(self, timeout: float | None = None) -> Result:
        """Wait for the end. `ResultTimeout` after `timeout` seconds; the request goes on."""
        reader = (await self.client.opened()).reader
        return Result.of(await reader.at_end(self.id, self.record, timeout))

    async def cancel(self, reason: str = "") -> Cancelled:
        return await self.client.cancel(self.id, reason)


@dataclass(frozen=True)
class _Open:
    """What a connected client holds."""

    connection: Connection
    redis: aredis.Redis
    hub: AsyncHub
    reader: AsyncReader
    scripts: AsyncScripts


class AsyncClient:
    """An asyncio client."""

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        config: PoolConfig | None = None,
        home: Path | None = None,
    ) -> None:
        """Connects on first use; arguments as for `client.Client`."""
        self.config = config or PoolConfig()
        self.owner = keys.owner_of(api_key)
        self._url = url
        self._home = home
        self._source: AsyncClient | None = None
        self._open: _Open | None = None
        self._opening = asyncio.Lock()

    def for_key(self, api_key: str | None) -> AsyncClient:
        """A client of another owner over the same connections; closing it closes nothing."""
        other = AsyncClient(self._url, api_key=api_key, config=self.config, home=self._home)
        other._source = self._source or self
        return other

    async def __aenter__(self) -> AsyncClient:
        await self.opened()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def opened(self) -> _Open:
        """The connection, made now if need be; the checks run in a thread."""
        async with self._opening:
            if self._open is None and self._source is not None:
                source = await self._source.opened()
                reader = AsyncReader(source.redis, source.hub, self.config, self.owner)
                self._open = dataclasses.replace(source, reader=reader)
            elif self._open is None:
                connection = await asyncio.to_thread(connect, self._url, home=self._home)
                client = connection.asynchronous()
                hub = AsyncHub(client)
                reader = AsyncReader(client, hub, self.config, self.owner)
                self._open = _Open(connection, client, hub, reader, AsyncScripts(client, self.config))
            return self._open

    async def close(self) -> None:
        """Close all connections of this client."""
        if self._open is not None and self._source is None:
            await self._open.hub.close()
            await self._open.redis.aclose()
            self._open.connection.close()
        self._open = None

    async def submit(
        self,
        spec: RequestSpec | None = None,
        *,
        conversation: str | None = None,
        model: str = "",
        priority: str = "interactive",
        deadline: float | None = None,
        idempotency_key: str | None = None,
        request_id: str | None = None,
        group: str = "",
        **options: Any,
    ) -> AsyncRequest:
        """See `client.Client.submit`."""
        item = calls.Submission(
            request=request_id or keys.new_ulid(),
            owner=self.owner,
            conversation=conversation,
            model=model,
            priority=priority,
            deadline_s=deadline,
            idempotency_key=idempotency_key,
            group=group,
        )
        done = await self._call(calls.submit(item, spec_of(spec, options), self.config))
        return AsyncRequest(self, done.request, done.outcome)

    async def request(self, request_id: str) -> AsyncRequest:
        """A handle for an existing request; `NotFound`."""
        keys.check_id(request_id, "request id")
        await (await self.opened()).reader.head(request_id)
        return AsyncRequest(self, request_id)

    async def record(self, request_id: str) -> Record:
        """What the pool knows of a request; `NotFound`."""
        client = (await self.opened()).redis
        with translated():
            values: list[Any] = await client.hmget(keys.request(request_id), list(calls.RECORD_FIELDS))
        return calls.read_record(request_id, self.owner, values)

    async def cancel(self, request_id: str, reason: str = "") -> Cancelled:
        """See `client.Request.cancel`; `NotFound`."""
        return await self._call(calls.cancel(request_id, self.owner, reason))

    async def transcript(self, conversation: str) -> list[transcript.TurnRecord]:
        """Committed turns of a conversation, oldest first; empty if there are none."""
        client = (await self.opened()).redis
        ckey = keys.conversation_key(self.owner, conversation)
        with translated():
            entries: list[Any] = await client.lrange(keys.conversation_part(ckey, "hist"), 0, -1)
        return [transcript.TurnRecord.unpack(entry) for entry in entries]

    async def workers(self) -> list[admin.WorkerInfo]:
        """The pool's workers, by name."""
        return await asyncio.to_thread((await self._admin()).workers)

    async def snapshot(self) -> admin.Snapshot:
        """The pool as an operator sees it."""
        return await asyncio.to_thread((await self._admin()).snapshot)

    async def _admin(self) -> admin.Admin:
        return admin.Admin((await self.opened()).connection.redis, self.config)

    async def _call(self, call: calls.Call[calls.T]) -> calls.T:
        scripts = (await self.opened()).scripts
        return call.parse(await scripts.run(call.script, call.keys, call.arguments))
