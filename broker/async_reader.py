"""Reads one request's events in an event loop. The asyncio twin of `reader`, with the same promises."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import redis.asyncio as aredis

from broker import keys
from broker.async_hub import AsyncHub
from broker.calls import Record
from broker.config import PoolConfig
from broker.errors import BrokerUnavailable, NotFound, ResultTimeout
from broker.events import TERMINAL, Event
from broker.failures import translated
from broker.reader import RETRY_S
from broker.stream import HEAD_FIELDS, Head, Stream

__all__ = ["AsyncReader"]

T = TypeVar("T")


class AsyncReader:
    """Streams of one owner's requests, over one client and the loop's hub."""

    def __init__(self, client: aredis.Redis, hub: AsyncHub, config: PoolConfig, owner: str) -> None:
        self._redis = client
        self._hub = hub
        self._config = config
        self._owner = owner
        self.replays = 0
        """How often a live stream had to be repaired from the log."""

    async def events(
        self, request: str, after: str | int | None = None, timeout_s: float | None = None
    ) -> AsyncIterator[Event]:
        """Events after `after` (see `Stream`) until the end, or `ResultTimeout` after `timeout_s` in all."""
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        subscription = await self._hub.subscribe(keys.request(request), self._config.reader_queue)
        try:
            stream = await self._open(request, after, deadline)
            messages: list[bytes] | None = []
            while not stream.ended:
                if messages is None:
                    self.replays += 1
                if messages:
                    for event in stream.from_channel(messages):
                        if event is not None:
                            yield event
                            continue
                        self.replays += 1
                        async for logged in self._from_log(stream, deadline):
                            yield logged
                else:
                    async for logged in self._from_log(stream, deadline):
                        yield logged
                if not stream.ended:
                    messages = await subscription.get(self._silence(request, deadline))
        finally:
            subscription.close()

    async def at_end(
        self, request: str, ask: Callable[[], Awaitable[Record]], timeout_s: float | None = None
    ) -> Record:
        """The record of an ended request, which `ask()` reads, once it has ended. No token is sent or read for that.

        Errors as of `events`. The broker may be lost at any point of this, and come back without its last moments.
        """
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        head = await self._patiently(lambda: self.head(request), request, deadline)
        stream = Stream(request, head, None)
        while True:
            if not stream.has_ended(head):
                await self._wait(stream, deadline)
            with contextlib.suppress(NotFound):
                record = await self._patiently(ask, request, deadline)
                if record.state in TERMINAL:
                    return record
            values, boot = await self._patiently(lambda: self._standing(request), request, deadline)
            head = self._known(stream, values, boot)

    async def _wait(self, stream: Stream, deadline: float | None) -> None:
        request = stream.request
        subscription = await self._hub.subscribe(keys.end(request), 1)
        try:
            while True:
                values, boot = await self._patiently(lambda: self._standing(request), request, deadline)
                if stream.has_ended(self._known(stream, values, boot)):
                    return
                await subscription.get(self._silence(request, deadline))
        finally:
            subscription.close()

    async def head(self, request: str) -> Head:
        """Where a request stands; `NotFound`."""
        return Head.read(request, self._owner, *await self._standing(request))

    async def _standing(self, request: str) -> tuple[Any, Any]:
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.hmget(keys.request(request), list(HEAD_FIELDS))
                pipe.get(keys.BOOT)
                values, boot = await pipe.execute()
        return values, boot

    async def _open(self, request: str, after: str | int | None, deadline: float | None) -> Stream:
        head: Head = await self._patiently(lambda: self.head(request), request, deadline)
        stream = Stream(request, head, after)
        if stream.must_exist is not None:
            at = stream.must_exist
            values, boot, entries = await self._patiently(lambda: self._page(stream, at, at), request, deadline)
            stream.admit(bool(entries), self._known(stream, values, boot))
        return stream

    async def _from_log(self, stream: Stream, deadline: float | None) -> AsyncIterator[Event]:
        """What the log holds after the stream's position; checks that the stream still lives if that is nothing."""
        first = True
        while not stream.ended:
            values, boot, entries = await self._patiently(
                lambda: self._page(stream, stream.log_after), stream.request, deadline
            )
            for event in stream.from_log(entries):
                yield event
            if len(entries) < self._config.read_page:
                if first and not entries:
                    stream.check_alive(self._known(stream, values, boot))
                return
            first = False

    async def _page(self, stream: Stream, first: str, last: str = "+") -> tuple[Any, Any, Any]:
        """Where the request stands and the log's entries `first..last`, all of one moment or nearly."""
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.hmget(stream.channel, list(HEAD_FIELDS))
                pipe.get(keys.BOOT)
                pipe.xrange(stream.log_key, first, last, count=self._config.read_page)
                values, boot, entries = await pipe.execute()
        return values, boot, entries

    def _known(self, stream: Stream, values: Any, boot: Any) -> Head:
        """Where a request stands that was there before."""
        try:
            return Head.read(stream.request, self._owner, values, boot)
        except NotFound:
            raise stream.gone(boot) from None

    async def _patiently(self, ask: Callable[[], Awaitable[T]], request: str, deadline: float | None) -> T:
        """`ask()`, again and again through an outage of the broker."""
        clock = asyncio.get_running_loop().time
        until = clock() + self._config.reader_outage_s
        task = asyncio.current_task()
        cancellations = task.cancelling() if task else 0
        while True:
            try:
                answer = await ask()
                # The library sends by `wait_for`, which up to Python 3.11 forgets a cancellation that meets its end.
                if task and task.cancelling() > cancellations:
                    raise asyncio.CancelledError
                return answer
            except BrokerUnavailable:
                if clock() >= until:
                    raise
                await asyncio.sleep(min(RETRY_S, self._silence(request, deadline)))

    def _silence(self, request: str, deadline: float | None) -> float:
        silence = self._config.silence_ms / 1000
        if deadline is None:
            return silence
        left = deadline - asyncio.get_running_loop().time()
        if left <= 0:
            raise ResultTimeout(f"request {request}: the time to wait for it is over; nothing is done to it")
        return min(silence, left)
