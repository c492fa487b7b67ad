"""Clients that went away: their requests are cancelled after a grace time, unless somebody watches them again.

Kept: a request that one client left while another reads it (a retry with the same idempotency key, a resumed response)
goes on, also when the two met different gateways: those requests count their watchers in the broker.
Not promised: a gateway that is killed cancels nothing; its requests run to their end, and their answers can be fetched.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from broker.errors import NotFound
from broker.gateway.pool import GatewayPool
from prism_core.errors import PrismError

__all__ = ["Departures", "Watch"]

_log = logging.getLogger("prism.gateway")
REASON = "the client went away"


@dataclass(frozen=True)
class Watch:
    """One client's interest in requests that are to be cancelled when nobody watches them."""

    owner: str
    requests: Sequence[str]
    shared: bool
    """Others may watch them too: there is a way to find them again."""


class Departures:
    """The graces that run in this gateway."""

    def __init__(self, pool: GatewayPool, grace_s: float) -> None:
        self._pool = pool
        self._grace_s = grace_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._hurry = asyncio.Event()

    async def arrived(self, watch: Watch) -> None:
        if watch.shared:
            await self._pool.watch(watch.requests, 1)

    async def satisfied(self, watch: Watch) -> None:
        """The client has its answer."""
        if watch.shared:
            await self._pool.watch(watch.requests, -1)

    def left(self, watch: Watch) -> None:
        """The client is gone: begins its grace, which outlives the connection."""
        task = asyncio.create_task(self._grace(watch), name="grace")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Ends all graces now."""
        self._hurry.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def abandoned(self, watch: Watch) -> None:
        """The client was refused before it could watch: as `left`, with the grace for a retry."""
        with contextlib.suppress(PrismError):
            await self.arrived(watch)
        self.left(watch)

    @property
    def pending(self) -> int:
        return len(self._tasks)

    async def _grace(self, watch: Watch) -> None:
        try:
            if watch.shared:
                await self._pool.watch(watch.requests, -1)
            try:
                async with asyncio.timeout(self._grace_s):
                    await self._hurry.wait()
            except TimeoutError:
                pass
            counts = await self._pool.watch(watch.requests, 0) if watch.shared else [0] * len(watch.requests)
            for request, count in zip(watch.requests, counts, strict=True):
                if count <= 0:
                    with contextlib.suppress(NotFound):
                        await self._pool.cancel(watch.owner, request, REASON)
        except PrismError as error:
            _log.warning("could not cancel for a client that went away", extra={"error": type(error).__name__})
