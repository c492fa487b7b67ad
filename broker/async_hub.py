"""The pub/sub connection of an event loop, shared by all its readers. The asyncio twin of `hub`, with the same
promises."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
from typing import Any

import redis.asyncio as aredis
from redis.exceptions import RedisError

from broker.errors import ClientClosed
from broker.hub import ACK_S, BACK_OFF_S, PING_S
from broker.wire import Replies, command

__all__ = ["AsyncHub", "AsyncSubscription"]

_log = logging.getLogger("prism.broker")


class AsyncSubscription:
    """Live messages of one channel for one reader; at most `limit` wait here."""

    def __init__(self, hub: AsyncHub, channel: str, limit: int) -> None:
        self.channel = channel
        self._hub = hub
        self._limit = limit
        self._ready = asyncio.Event()
        self._messages: collections.deque[bytes] = collections.deque()
        self._missed = False
        self._ended = False

    async def get(self, timeout_s: float) -> list[bytes] | None:
        """All messages that wait, after at most `timeout_s`; empty: silence; None: some were missed, read the log."""
        if not self._ready.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._ready.wait()
        if self._ended:
            raise ClientClosed("the client was closed while it was reading")
        found = None if self._missed else list(self._messages)
        self._missed = False
        self._messages.clear()
        self._ready.clear()
        return found

    def close(self) -> None:
        self._hub.drop(self)

    def deliver(self, message: bytes) -> None:
        if len(self._messages) >= self._limit:
            self.miss()
        elif not self._missed:
            self._messages.append(message)
        self._ready.set()

    def end(self) -> None:
        """The client is being closed: the reader is woken and told."""
        self._ended = True
        self._ready.set()

    def miss(self) -> None:
        """Something may not have arrived."""
        self._messages.clear()
        self._missed = True
        self._ready.set()


class AsyncHub:
    """The loop's subscriber. Its task starts with the first subscription and ends with `close`."""

    def __init__(self, client: aredis.Redis) -> None:
        self._pool: Any = client.connection_pool
        self._channels: dict[str, list[AsyncSubscription]] = {}
        self._acks: dict[str, asyncio.Event] = {}
        self._commands: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def subscribe(self, channel: str, limit: int) -> AsyncSubscription:
        """A subscription that the server has acknowledged; without an acknowledgement in time it begins as `missed`."""
        subscription = AsyncSubscription(self, channel, limit)
        self._channels.setdefault(channel, []).append(subscription)
        ack = self._acks.get(channel)
        if ack is None:
            ack = self._acks[channel] = asyncio.Event()
            self._commands.put_nowait(("SUBSCRIBE", channel))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="prism-hub")
        try:
            async with asyncio.timeout(ACK_S):
                await ack.wait()
        except TimeoutError:
            subscription.miss()
        except BaseException:
            self.drop(subscription)
            raise
        return subscription

    def drop(self, subscription: AsyncSubscription) -> None:
        """Forget a subscription; the channel goes with its last one."""
        waiting = self._channels.get(subscription.channel, [])
        if subscription in waiting:
            waiting.remove(subscription)
            if not waiting:
                del self._channels[subscription.channel]
                self._acks.pop(subscription.channel, None)
                self._commands.put_nowait(("UNSUBSCRIBE", subscription.channel))

    async def close(self) -> None:
        """Close the connection; waiting readers get `ClientClosed`."""
        for waiting in self._channels.values():
            for subscription in waiting:
                subscription.end()
        if self._task is not None:
            while not self._task.done():
                # Again and again: a library below that swallows one cancellation must not hold us up.
                self._task.cancel()
                await asyncio.wait({self._task}, timeout=0.5)
            self._task = None

    async def _run(self) -> None:
        failures = 0
        while True:
            connection: Any = self._pool.make_connection()
            try:
                await connection.connect()
                failures = 0
                await self._listen(connection._reader, connection._writer)
            except* (RedisError, OSError) as errors:
                _log.debug("pub/sub connection lost: %s", errors.exceptions[0])
            finally:
                await connection.disconnect(nowait=True)
            await asyncio.sleep(BACK_OFF_S[min(failures, len(BACK_OFF_S) - 1)])
            failures += 1

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the connection is lost."""
        writer.write(self._greet())
        await writer.drain()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write(writer))
            tasks.create_task(self._read(reader))

    def _greet(self) -> bytes:
        """Subscribe to everything that is wanted now; commands left for an earlier connection are void."""
        while not self._commands.empty():
            self._commands.get_nowait()
        for channel, waiting in self._channels.items():
            if self._acks[channel].is_set():
                for subscription in waiting:
                    subscription.miss()
        return command("SUBSCRIBE", *self._channels) if self._channels else b""

    async def _write(self, writer: asyncio.StreamWriter) -> None:
        while True:
            words: tuple[str, ...] = ("PING",)
            # Not wait_for: up to Python 3.11 it forgets a cancellation that meets a finished get.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PING_S):
                    words = await self._commands.get()
            writer.write(command(*words))
            await writer.drain()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        replies = Replies()
        while True:
            async with asyncio.timeout(3 * PING_S):
                data = await reader.read(65_536)
            if not data:
                raise ConnectionError("the broker closed the pub/sub connection")
            for reply in replies.feed(data):
                self._dispatch(reply)

    def _dispatch(self, reply: Any) -> None:
        kind = reply[0] if isinstance(reply, list) and reply else None
        if kind == b"message":
            for subscription in self._channels.get(reply[1].decode(), ()):
                subscription.deliver(reply[2])
        elif kind == b"subscribe":
            ack = self._acks.get(reply[1].decode())
            if ack is not None:
                ack.set()
