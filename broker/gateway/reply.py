"""From a request's events to an HTTP answer: streamed or whole, with an eye on the client.

Kept: the status goes out after the first event, so a request that cannot run is an error status and no broken stream; a
client that goes away, or takes nothing for too long, frees everything it held, and its request gets its grace. All that
an answer holds is taken and given back inside `__call__`.
Not promised: an error after the first byte has a status of its own; it is the last event of the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Scope, Send

from broker.errors import InvalidCursor
from broker.events import BEGIN, Cursor, Event
from broker.gateway import sse
from broker.gateway.asked import Answer, Chunk
from broker.gateway.departures import Departures, Watch
from broker.gateway.errors import ApiError, of_end, of_error
from broker.gateway.metrics import GatewayMetrics, Timer
from broker.gateway.outlet import Outlet, Stuck, gone
from prism_core.errors import PrismError

__all__ = ["Exchange", "Reply"]

Events = AsyncGenerator[tuple[int, Event], None]


@dataclass(frozen=True)
class Exchange:
    """What a reply needs of the gateway."""

    metrics: GatewayMetrics
    departures: Departures
    keep_alive_s: float
    send_timeout_s: float
    abort: Callable[[Any], None]
    """Cuts the connection of a client's address at once."""


@dataclass
class Reply:
    """An ASGI answer to one request."""

    exchange: Exchange
    events: Callable[[], Events]
    """Opens the events, from the beginning of the request's log."""
    answer: Answer
    stream: bool
    timers: list[Timer]
    """One for each request."""
    watch: Watch | None = None
    """None: the request goes on without its client."""
    headers: Mapping[str, str] = field(default_factory=dict)
    route: Callable[[str, bool], dict[str, str]] = lambda worker, moved: {}
    """Headers that are known once a worker has begun: its name, and whether the request had moved before."""
    named: bool = False
    """Whether chunks are sent under the name of their `type`."""
    done: bytes = sse.DONE
    opening: Callable[[], list[Chunk]] = list
    """Chunks before the first event."""
    early: bool = False
    """Send the status at once, not after the first event."""
    after: Cursor | None = None
    """Show only what came after this event."""
    skip: int = -1
    """Show only chunks with a `sequence_number` above this one."""
    progress: int = 0
    """Events that the request had when the reader came, where it comes to an old stream. They are read before the
    status goes out, so that a cursor which is none, or a log that has expired, is an error."""
    log: dict[str, Any] = field(default_factory=dict)
    """Filled with what the log line of this request tells."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        out = Outlet(send, self.exchange.send_timeout_s, self.timers)
        self.exchange.metrics.stream(int(self.stream))
        leaving = asyncio.create_task(gone(receive))
        work = asyncio.create_task(self._work(out))
        try:
            if self.watch is not None:
                await self.exchange.departures.arrived(self.watch)
            await asyncio.wait({leaving, work}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await self._worked(work, leaving, scope)
            else:
                self._left("gone")
        finally:
            for task in (leaving, work):
                task.cancel()
            await asyncio.gather(leaving, work, return_exceptions=True)
            self.exchange.metrics.stream(-int(self.stream))

    async def _worked(self, work: asyncio.Task[None], leaving: asyncio.Task[None], scope: Scope) -> None:
        error = work.exception()
        if isinstance(error, Stuck):
            self._left("stuck")
            self.exchange.abort(scope.get("client"))
            await asyncio.wait({leaving}, timeout=1.0)  # until the server knows that the connection is gone
            return
        if self.watch is not None:
            with contextlib.suppress(PrismError):
                await self.exchange.departures.satisfied(self.watch)
        if error is not None:
            raise error

    def _left(self, how: str) -> None:
        self.log["client"] = how
        if self.watch is not None:
            self.exchange.departures.left(self.watch)

    async def _work(self, out: Outlet) -> None:
        async with contextlib.aclosing(self.events()) as events:
            if self.stream:
                await self._stream(out, events)
            else:
                await self._whole(out, events)

    async def _whole(self, out: Outlet, events: Events) -> None:
        headers = dict(self.headers)
        moved = False
        async for index, event in events:
            self._observe(index, event)
            moved = moved or event.kind == "moved"
            if event.kind == "start" and index == 0:
                headers |= self.route(str(event.data.get("worker", "")), moved)
            self.answer.push(index, event)
            _must_be_done(event)
        self.answer.closing()
        body = sse.json_bytes(self.answer.result())
        await out.start(200, {**headers, "content-type": "application/json", "content-length": str(len(body))})
        await out.body(body, more=False)

    async def _stream(self, out: Outlet, events: Events) -> None:
        beat = None
        try:
            opening = self.opening()  # called in any case: it counts
            shown = opening if self.after is None else []
            chunks = [frame for chunk in shown if (frame := self._frame(chunk, None))]
            if self.early and not self.progress:
                self._check_skip()
                beat, chunks = await self._begin(out, {}, chunks), []
            moved = False
            async for index, event in events:
                self._observe(index, event)
                self._check_cursor(event)
                moved = moved or event.kind == "moved"
                if beat is None and not self.early and not self.progress and event.kind == "end":
                    _must_be_done(event)
                chunks += self._shown(index, event)
                if beat is None and (event.sequence < self.progress or event.kind == "moved"):
                    continue
                if beat is None:
                    self._check_skip()
                    headers = self.route(str(event.data["worker"]), moved) if event.kind == "start" else {}
                    beat, chunks = await self._begin(out, headers, chunks), []
                for chunk in chunks:
                    await out.body(chunk)
                chunks = []
            for last in self.answer.closing():
                await out.body(sse.frame(last))
            await out.body(self.done, more=False)
        except Stuck:
            raise
        except Exception as error:
            if not out.started:
                raise
            await self._break_off(out, of_error(error))
        finally:
            if beat is not None:
                beat.cancel()
                await asyncio.gather(beat, return_exceptions=True)

    def _check_cursor(self, event: Event) -> None:
        if self.after is not None and event.sequence == self.after.ev and event.cursor != self.after:
            raise InvalidCursor(f"this stream has no event {self.after}")

    def _check_skip(self) -> None:
        if self.skip >= 0 and self.skip >= self.answer.sequence:
            raise InvalidCursor(f"this stream has no event with sequence_number {self.skip} so far")

    async def _begin(self, out: Outlet, headers: Mapping[str, str], chunks: Iterable[bytes]) -> asyncio.Task[None]:
        await out.start(200, {**self.headers, **headers, "content-type": "text/event-stream; charset=utf-8"})
        beat = asyncio.create_task(out.beat(self.exchange.keep_alive_s))
        for chunk in chunks:
            await out.body(chunk)
        return beat

    def _shown(self, index: int, event: Event) -> list[bytes]:
        """The frames of one event; the last one bears its id, where there is one request."""
        chunks = self.answer.push(index, event)
        if self.after is not None and event.cursor <= self.after:
            return []
        frames = []
        for at, chunk in enumerate(chunks, 1):
            cursor = event.id if at == len(chunks) and len(self.timers) == 1 and event.cursor != BEGIN else None
            frame = self._frame(chunk, cursor)
            if frame:
                frames.append(frame)
        if event.kind == "moved":
            frames.append(sse.comment(f"moved {event.data.get('why', '')}"))
        return frames

    def _frame(self, chunk: Chunk, cursor: str | None) -> bytes | None:
        if chunk.get("sequence_number", 0) <= self.skip:
            return None
        return sse.frame(chunk, name=chunk["type"] if self.named else None, cursor=cursor)

    async def _break_off(self, out: Outlet, error: ApiError) -> None:
        if self.named:
            number = self.answer.sequence
            fields = {"code": error.code, "message": error.message, "param": error.param}
            await out.body(sse.frame({"type": "error", "sequence_number": number, **fields}, name="error"))
        else:
            await out.body(sse.frame(error.body()))
        await out.body(self.done, more=False)

    def _observe(self, index: int, event: Event) -> None:
        now = time.monotonic()
        metrics = self.exchange.metrics
        if event.kind == "start":
            self.log.update(worker=event.data.get("worker"), reused_tokens=event.data.get("reused_tokens"))
        elif event.kind == "delta":
            metrics.tokens(self.timers[index], len(event.data.get("t", ())), now)
        elif event.kind == "end":
            usage = dict(event.data.get("usage") or {})
            self.log.update(state=event.state, usage=usage)
            if event.state == "done":
                metrics.ended(self.timers[index], usage, now)


def _must_be_done(event: Event) -> None:
    if event.kind == "end" and event.state != "done":
        raise of_end(str(event.state), str(event.data.get("reason", "")))
