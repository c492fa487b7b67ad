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
        if self._task is None:
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
            connection = self._pool.make_connection()
            try:
                await connection.connect()
                await self._greet(connection)
                failures = 0
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._write(connection))
                    tasks.create_task(self._read(connection))
            except* (RedisError, OSError) as errors:
                _log.debug("pub/sub connection lost: %s", errors.exceptions[0])
            finally:
                await connection.disconnect(nowait=True)
            await asyncio.sleep(BACK_OFF_S[min(failures, len(BACK_OFF_S) - 1)])
            failures += 1

    async def _greet(self, connection: Any) -> None:
        """Subscribe to everything that is wanted now; what was queued for the old connection is void."""
        while not self._commands.empty():
            self._commands.get_nowait()
        for channel, waiting in list(self._channels.items()):
            if self._acks[channel].is_set():
                for subscription in waiting:
                    subscription.miss()
            await connection.send_command("SUBSCRIBE", channel, check_health=False)

    async def _write(self, connection: Any) -> None:
        while True:
            command: tuple[str, ...] = ("PING",)
            # Not wait_for: up to Python 3.11 it forgets a cancellation that meets a finished get.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PING_S):
                    command = await self._commands.get()
            await connection.send_command(*command, check_health=False)

    async def _read(self, connection: Any) -> None:
        while True:
            reply = await connection.read_response(disable_decoding=True, timeout=3 * PING_S, push_request=True)
            kind, channel = reply[0], reply[1]
            if kind == b"message":
                for subscription in self._channels.get(channel.decode(), ()):
                    subscription.deliver(reply[2])
            elif kind == b"subscribe":
                ack = self._acks.get(channel.decode())
                if ack is not None:
                    ack.set()
