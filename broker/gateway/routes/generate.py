"""`POST /v1/chat/completions` and `POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from broker.gateway.asked import Answer, Asked
from broker.gateway.chat import ChatAnswer, read_chat
from broker.gateway.completions import CompletionAnswer, read_completion
from broker.gateway.config import GatewayConfig
from broker.gateway.conversation import as_committed
from broker.gateway.departures import Watch
from broker.gateway.gateway import Gateway, gateway_of, named_conversation
from broker.gateway.reply import Reply

__all__ = ["ROUTES"]

Read = Callable[[object, GatewayConfig], Asked]
Make = Callable[[Asked, Sequence[str], str], Answer]


async def _chat(request: Request) -> Any:
    return await _generate(request, read_chat, ChatAnswer)


async def _completions(request: Request) -> Any:
    return await _generate(request, read_completion, CompletionAnswer)


async def _generate(request: Request, read: Read, make: Make) -> Any:
    gateway = gateway_of(request)
    body = await gateway.body(request)
    asked = await _with_transcript(gateway, request, read(body, gateway.config))
    placed = await gateway.place(request, asked, body)
    owner, requests = request.state.owner, placed.requests
    after, progress = await gateway.cursor(request, owner, requests) if asked.stream else (None, 0)
    return Reply(
        exchange=gateway.exchange(),
        events=gateway.events(owner, requests),
        answer=make(asked, requests, placed.model),
        stream=asked.stream,
        timers=gateway.timers(len(requests), live=not placed.replayed),
        watch=Watch(owner, requests, shared="idempotency-key" in request.headers),
        headers=placed.headers(),
        route=placed.route,
        after=after,
        progress=progress,
        log=request.state.log,
    )


async def _with_transcript(gateway: Gateway, request: Request, asked: Asked) -> Asked:
    """A whole list in a conversation: its answers in the form in which they were committed."""
    conversation = named_conversation(request)
    messages = asked.specs[0].messages or []
    if conversation is None or not any(message["role"] == "assistant" for message in messages):
        return asked
    turns = await gateway.pool.transcript(request.state.owner, conversation)
    restored = as_committed(messages, turns)
    return replace(asked, specs=[replace(spec, messages=restored) for spec in asked.specs])


ROUTES = (
    Route("/v1/chat/completions", _chat, methods=["POST"]),
    Route("/v1/completions", _completions, methods=["POST"]),
)
