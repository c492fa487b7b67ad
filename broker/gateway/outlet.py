"""The client's side of a reply: what is sent, and the signs that nobody takes it.

Kept: one send at a time, none of them for ever, and nothing after the last one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from starlette.types import Message, Receive, Send

from broker.gateway import sse
from broker.gateway.metrics import Timer

__all__ = ["Outlet", "Stuck", "gone"]

_NO_STORE = ((b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"))


async def gone(receive: Receive) -> None:
    """Returns when the client's connection is closed; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Stuck(Exception):
    """The client has taken nothing for too long."""


class Outlet:
    """The client's side of a reply: one send at a time, none of them for ever."""

    def __init__(self, send: Send, timeout_s: float, timers: list[Timer]) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._timers = timers
        self._lock = asyncio.Lock()
        self._sent = time.monotonic()
        self.started = False
        self._closed = False

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._put({"type": "http.response.start", "status": status, "headers": [*raw, *_NO_STORE]})
        self.started = True

    async def body(self, data: bytes, *, more: bool = True) -> None:
        if data or not more:
            await self._put({"type": "http.response.body", "body": data, "more_body": more})

    async def beat(self, every_s: float) -> None:
        """Comments while nothing else is sent."""
        while True:
            quiet = time.monotonic() - self._sent
            if quiet >= every_s:
                await self.body(sse.KEEP_ALIVE)
            else:
                await asyncio.sleep(every_s - quiet)

    async def _put(self, message: Message) -> None:
        async with self._lock:
            if self._closed:
                return
            self._closed = message.get("more_body") is False
            began = time.monotonic()
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._send(message)
            except TimeoutError:
                raise Stuck from None
            self._sent = time.monotonic()
            for timer in self._timers:
                timer.blocked += self._sent - began
