"""`/v1/responses`: create (also in the background), fetch, resume, cancel."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from broker.errors import NotFound
from broker.events import TERMINAL
from broker.gateway.departures import Watch
from broker.gateway.errors import ApiError, invalid
from broker.gateway.gateway import Gateway, gateway_of, last_event_id, named_conversation
from broker.gateway.reply import Reply
from broker.gateway.response_input import API, Context, read_response
from broker.gateway.response_object import Frame, items_of, message_of, request_of
from broker.gateway.response_stream import ResponseAnswer

__all__ = ["ROUTES"]

CANCEL_WAIT_S = 2.0
"""How long a cancel waits for the worker's next step, so that its answer says `cancelled`."""


async def _create(request: Request) -> Any:
    gateway = gateway_of(request)
    body = await gateway.body(request)
    context = Context.of(body, named_conversation(request))
    past = await _past(gateway, request.state.owner, context)
    asked = read_response(body, gateway.config, context, past)
    placed = await gateway.place(request, asked, body)
    name, owner = placed.requests[0], request.state.owner
    if asked.background and not asked.stream:
        record, spec = await gateway.pool.asked(owner, name)
        frame = Frame(name, spec, str(spec.note.get("model", "")))
        return JSONResponse(frame.of_record(record), headers=placed.headers())
    frame = Frame(name, asked.specs[0], placed.model)
    answer = ResponseAnswer(frame)
    after, progress = await gateway.cursor(request, owner, placed.requests) if asked.stream else (None, 0)
    reply = _reply(gateway, request, answer, asked.stream, live=not placed.replayed)
    reply.events = gateway.events(owner, placed.requests, strict=asked.stream)
    reply.headers, reply.route = placed.headers(), placed.route
    reply.early = asked.background
    reply.after, reply.progress = after, progress
    if placed.replayed and asked.stream:
        reply.progress = await gateway.pool.progress(owner, name)
    reply.watch = None if asked.background else Watch(owner, placed.requests, shared=True)
    return reply


async def _past(gateway: Gateway, owner: str, context: Context) -> list[dict[str, Any]] | None:
    """The messages that a response goes on from, where the pool's own transcript does not give them."""
    if context.previous is not None:
        return await _messages_of(gateway, owner, context.previous)
    if context.conversation is not None and context.instructions:
        # Instructions hold for one response: they stand before the conversation, in place of earlier ones.
        turns = await gateway.pool.transcript(owner, context.conversation)
        messages = [message for turn in turns for message in [*turn.messages, turn.answer]]
        return [message for message in messages if message.get("role") not in ("system", "developer")]
    return None


async def _messages_of(gateway: Gateway, owner: str, name: str) -> list[dict[str, Any]]:
    try:
        record, spec = await gateway.pool.asked(owner, request_of(name))
    except NotFound:
        raise ApiError(404, f"Response {name[:80]!r} was not found.", param="previous_response_id") from None
    if spec.note.get("api") != API:
        raise ApiError(404, f"Response {name[:80]!r} was not found.", param="previous_response_id")
    if record.conversation:
        message = f"that response is part of conversation {record.conversation}: give the conversation instead"
        raise invalid(message, "previous_response_id")
    if record.state != "done":
        raise invalid(f"response {name[:80]} is {record.state}, not completed", "previous_response_id")
    messages = list(spec.messages or [])[1 if spec.note.get("instructions") else 0 :]
    return [*messages, message_of(items_of(record, tools=bool(spec.template.get("tools"))))]


async def _fetch(request: Request) -> Any:
    gateway, owner = gateway_of(request), request.state.owner
    stream = _flag(request, "stream")
    skip = _starting_after(request)
    if skip >= 0 and not stream:
        raise invalid("starting_after needs stream=true", "starting_after")
    frame, record = await _frame(gateway, owner, request.path_params["id"])
    if not stream:
        return JSONResponse(frame.of_record(record))
    after = last_event_id(request)
    answer = ResponseAnswer(frame)
    reply = _reply(gateway, request, answer, True, live=False)
    reply.events = gateway.events(owner, [frame.request], strict=True)
    reply.early = True
    reply.progress = record.ev
    if after is not None:
        # A browser's event source comes back with the last id that it saw: newer than what its address says.
        reply.after, reply.progress = await gateway.cursor(request, owner, [frame.request])
    elif skip >= 0:
        reply.skip = skip
    if not frame.background and record.state not in TERMINAL:
        reply.watch = Watch(owner, [frame.request], shared=True)
    return reply


async def _cancel(request: Request) -> Any:
    gateway, owner = gateway_of(request), request.state.owner
    frame, _ = await _frame(gateway, owner, request.path_params["id"])
    answer = await gateway.pool.cancel(owner, frame.request, "cancelled by the client")
    if answer == "cancelling":
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_WAIT_S):
                async with contextlib.aclosing(gateway.pool.events(owner, frame.request)) as events:  # type: ignore[type-var]
                    async for _ in events:
                        pass
    return JSONResponse(frame.of_record(await gateway.pool.record(owner, frame.request)))


async def _input_items(request: Request) -> Any:
    gateway, owner = gateway_of(request), request.state.owner
    frame, _ = await _frame(gateway, owner, request.path_params["id"])
    data = [
        {
            "id": f"in_{frame.request}_{index}",
            "type": "message",
            "status": "completed",
            "role": message["role"],
            "content": [{"type": "input_text", "text": message.get("content") or ""}],
        }
        for index, message in enumerate(frame.spec.messages or [])
    ]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return JSONResponse({"object": "list", "data": data, "has_more": False, **ends})


async def _frame(gateway: Gateway, owner: str, name: str) -> tuple[Frame, Any]:
    """The response of an id that is a response of this owner; 404."""
    try:
        record, spec = await gateway.pool.asked(owner, request_of(name))
    except (NotFound, ValueError):
        raise ApiError(404, f"Response {name[:80]!r} was not found.", param="id", code="not_found") from None
    if spec.note.get("api") != API:
        raise ApiError(404, f"Response {name[:80]!r} was not found.", param="id", code="not_found")
    return Frame(record.request, spec, str(spec.note.get("model", ""))), record


def _reply(gateway: Gateway, request: Request, answer: ResponseAnswer, stream: bool, *, live: bool) -> Reply:
    return Reply(
        exchange=gateway.exchange(),
        events=gateway.events("", []),
        answer=answer,
        stream=stream,
        timers=gateway.timers(1, live=live),
        named=True,
        done=b"",
        opening=answer.opening,
        log=request.state.log,
    )


def _flag(request: Request, name: str) -> bool:
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise invalid(f"{name} must be true or false, got {value[:40]!r}", name)
    return value in ("true", "1")


def _starting_after(request: Request) -> int:
    """-1 if it is absent; a bad one is an error, never "from the start"."""
    text = request.query_params.get("starting_after")
    if text is None:
        return -1
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        message = f"starting_after must be a sequence_number (a whole number from 0), got {text[:40]!r}"
        raise invalid(message, "starting_after", "invalid_cursor")
    return int(text)


ROUTES = (
    Route("/v1/responses", _create, methods=["POST"]),
    Route("/v1/responses/{id}", _fetch, methods=["GET"]),
    Route("/v1/responses/{id}/cancel", _cancel, methods=["POST"]),
    Route("/v1/responses/{id}/input_items", _input_items, methods=["GET"]),
)
