"""Submits and cancels through the pool's scripts, for tests that want no client around them."""

from __future__ import annotations

from typing import Any

import redis

from broker import keys, rqrecord
from broker.config import PoolConfig
from broker.lua import Scripts
from broker.spec import RequestSpec

OWNER = "local"


def submit(
    client: redis.Redis,
    settings: dict[str, Any],
    *,
    conversation: str = "",
    deadline_ms: int = 60_000,
    priority: str = "interactive",
    model: str = "",
    group: str = "",
    **options: Any,
) -> str:
    """Returns the new request's id."""
    config = PoolConfig(**settings)
    spec = RequestSpec(**options).seeded()
    request = keys.new_ulid()
    key = keys.conversation_key(OWNER, conversation) if conversation else ""
    fields = rqrecord.fields(request, priority=priority, conversation=conversation or None, config=config)
    arguments = [request, OWNER, model, priority, key, conversation, "", group, spec.pack(), spec.digest(), ""]
    reply = Scripts(client, config).run("submit", [keys.request(request)], [*arguments, deadline_ms, *fields])
    assert reply[0] in (b"placed", b"boxed"), reply
    return request


def cancel(client: redis.Redis, settings: dict[str, Any], request: str, reason: str = "test") -> str:
    """Returns the script's word for what it did."""
    reply = Scripts(client, PoolConfig(**settings)).run("cancel", [keys.request(request)], [request, OWNER, reason])
    return str(reply[0].decode())
