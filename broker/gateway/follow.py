"""Several requests' events as one sequence.

Kept: each request's events come in order; the readers hold at most `WAITING` events ahead of a slow consumer, and end
with the generator.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from broker.events import Event

__all__ = ["merged"]

WAITING = 64

Source = Callable[[str], Any]
"""From a request's id to its events, an async generator."""


async def merged(source: Source, requests: Sequence[str]) -> AsyncGenerator[tuple[int, Event], None]:
    """(index in `requests`, event) until all have ended; the first error ends it."""
    if len(requests) == 1:
        async with contextlib.aclosing(source(requests[0])) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Event | BaseException | None]] = asyncio.Queue(WAITING)
    tasks = [asyncio.create_task(_read(source(request), index, queue)) for index, request in enumerate(requests)]
    try:
        left = len(tasks)
        while left:
            index, item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, Event):
                yield index, item
            else:
                raise item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(events: Any, index: int, queue: asyncio.Queue[tuple[int, Event | BaseException | None]]) -> None:
    try:
        async with contextlib.aclosing(events):
            async for event in events:
                await queue.put((index, event))
        await queue.put((index, None))
    except Exception as error:
        await queue.put((index, error))
