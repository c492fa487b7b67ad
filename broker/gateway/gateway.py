"""The parts of one gateway, and what every endpoint that generates does with them.

Kept: a request is submitted once, whatever its stream meets; the ids, the owner and the keys of its answers come from
here alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request

from broker.calls import Submission, Submitted
from broker.errors import BrokerUnavailable, InvalidCursor, QueueFull, StreamLost
from broker.events import BEGIN, TERMINAL, Cursor, Event, parse_cursor
from broker.gateway.access import Access, RateLimit
from broker.gateway.asked import Asked
from broker.gateway.body import digest_text, read_body
from broker.gateway.config import GatewayConfig
from broker.gateway.departures import Departures, Watch
from broker.gateway.errors import ApiError, invalid, unknown_model
from broker.gateway.follow import merged
from broker.gateway.metrics import GatewayMetrics, Timer
from broker.gateway.pool import GatewayPool
from broker.gateway.reply import Events, Exchange
from broker.gateway.response_object import events_of
from broker.keys import check_id, new_ulid
from prism_core.errors import InvalidRequest

__all__ = ["Gateway", "Placed", "gateway_of", "last_event_id", "named_conversation"]

MAX_KEY_CHARS = 200


@dataclass(frozen=True)
class Placed:
    """What became of a submission."""

    requests: list[str]
    replayed: bool
    """An earlier call with the same idempotency key made them."""
    model: str
    """The name to answer with."""
    pinned: str | None
    """The worker that the conversation was pinned to before."""

    def headers(self) -> dict[str, str]:
        return {"Idempotency-Replayed": "true"} if self.replayed else {}

    def route(self, worker: str, moved: bool) -> dict[str, str]:
        """`pin`: the conversation's worker had it ready. `moved`: it is elsewhere now. `new`: there was none."""
        if moved or (self.pinned is not None and worker != self.pinned):
            how = "moved"
        else:
            how = "pin" if self.pinned is not None else "new"
        return {"X-Prism-Worker": worker, "X-Prism-Route": how}


@dataclass
class Gateway:
    """One gateway. `app.state.gateway`."""

    config: GatewayConfig
    pool: GatewayPool
    access: Access
    rate: RateLimit
    metrics: GatewayMetrics
    departures: Departures
    abort: Callable[[Any], None] = lambda client: None
    stopping: bool = False
    extras: dict[str, Any] = field(default_factory=dict)
    """For routes that others mount."""

    @classmethod
    def over(cls, config: GatewayConfig, pool: GatewayPool) -> Gateway:
        rate = RateLimit(config.requests_per_minute, config.burst)
        departures = Departures(pool, config.disconnect_grace_s)
        return cls(config, pool, Access(config), rate, GatewayMetrics(), departures)

    async def close(self) -> None:
        await self.departures.close()
        await self.pool.close()

    def exchange(self) -> Exchange:
        config = self.config
        return Exchange(self.metrics, self.departures, config.keep_alive_s, config.send_timeout_s, self.abort)

    async def body(self, request: Request) -> Any:
        """The JSON body of a request, within the configured limits."""
        return await read_body(request, max_bytes=self.config.max_body_bytes, timeout_s=self.config.read_timeout_s)

    async def place(self, request: Request, asked: Asked, body: Any) -> Placed:
        """Submits all that was asked for, under the headers of the HTTP request."""
        owner = request.state.owner
        key = _idempotency_key(request)
        conversation = asked.conversation or named_conversation(request)
        if conversation is not None and len(asked.specs) > 1:
            raise invalid("n must be 1 in a conversation: its turns come one after the other", "n")
        self.rate.take(owner, len(asked.specs))
        model = await self._model(asked.model)
        pinned = await self.pool.pinned(owner, conversation) if conversation else None
        note = {"model": model} if asked.api == "responses" else {}
        if key is not None:
            note["body"] = hashlib.sha256(digest_text(body).encode()).hexdigest()
        placed: list[Submitted] = []
        for index, spec in enumerate(asked.specs):
            item = Submission(
                request=new_ulid(),
                owner=owner,
                conversation=conversation,
                model=asked.model,
                priority="background" if asked.background else "interactive",
                idempotency_key=key if key is None or not index else f"{key}\0{index}",
            )
            spec = replace(spec, note={**spec.note, **note}, trace=request.state.trace)
            try:
                placed.append(await self.pool.submit(item, spec))
            except (QueueFull, BrokerUnavailable):
                # Those that are in, and the one that may be: a retry with the same key finds them in time, or nobody.
                requests = [*(done.request for done in placed), item.request]
                await self.departures.abandoned(Watch(owner, requests, shared=key is not None))
                raise
        requests = [done.request for done in placed]
        if placed[0].outcome != "dup" and last_event_id(request) is not None:
            await self.departures.abandoned(Watch(owner, requests, shared=True))
            raise InvalidCursor("no earlier request has this Idempotency-Key: there is no stream to go on with")
        request.state.log["requests"] = requests
        return Placed(requests, placed[0].outcome == "dup", model, pinned)

    def timers(self, count: int, *, live: bool) -> list[Timer]:
        if not live:
            self.metrics.replays.inc()
        return [Timer(time.monotonic(), live) for _ in range(count)]

    def events(self, owner: str, requests: Sequence[str], *, strict: bool = False) -> Callable[[], Events]:
        """A source of the requests' events. Not `strict`: a log that has expired is made good from the record."""

        def source(request: str) -> AsyncIterator[Event]:
            return self.pool.events(owner, request) if strict else self._events_or_record(owner, request)

        return lambda: merged(source, requests)

    async def _events_or_record(self, owner: str, request: str) -> AsyncIterator[Event]:
        begun = False
        try:
            async with contextlib.aclosing(self.pool.events(owner, request)) as events:  # type: ignore[type-var]
                async for event in events:
                    begun = True
                    yield event
        except StreamLost:
            record = await self.pool.record(owner, request)
            if begun or record.state not in TERMINAL:
                raise
            for event in events_of(record):
                yield event

    async def cursor(self, request: Request, owner: str, requests: Sequence[str]) -> tuple[Cursor | None, int]:
        """The event named by `Last-Event-ID`, and how many there were when it was checked."""
        after = last_event_id(request)
        if after is None:
            return None, 0
        if len(requests) > 1:
            raise invalid("Last-Event-ID names an event of one answer; this request has several", code="invalid_cursor")
        progress = await self.pool.progress(owner, requests[0])
        if after.ev > progress:
            raise InvalidCursor(f"this stream has no event {after}")
        return after, progress

    async def _model(self, asked: str) -> str:
        """The name that answers bear; 404 for a model that no worker has ever run."""
        if asked:
            if not await self.pool.knows(asked):
                raise unknown_model(asked)
            return asked
        served = await self.pool.served()
        return served[0].name if served else ""


def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


def last_event_id(request: Request) -> Cursor | None:
    """`Last-Event-ID`; `InvalidCursor` if it is malformed, None if it is absent or names the beginning."""
    text = request.headers.get("last-event-id")
    cursor = None if text is None else parse_cursor(text)
    return None if cursor == BEGIN else cursor


def _idempotency_key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not (1 <= len(key) <= MAX_KEY_CHARS and key.isprintable()):
        raise ApiError(400, f"Idempotency-Key must be 1 to {MAX_KEY_CHARS} printable characters")
    if key is None and last_event_id(request) is not None:
        message = "Last-Event-ID goes on with an earlier answer, so it needs that request's Idempotency-Key"
        raise invalid(message, code="invalid_cursor")
    return key


def named_conversation(request: Request) -> str | None:
    """The conversation that `X-Prism-Conversation` names; 400 for a bad name."""
    name = request.headers.get("x-prism-conversation")
    try:
        return None if name is None else check_id(name, "X-Prism-Conversation")
    except InvalidRequest as error:
        raise invalid(str(error), "X-Prism-Conversation") from None
