"""RQ's job record of a request, written without importing rq.

The field names, their spelling and the (function, instance, arguments, keywords) tuple are facts of RQ 3.0.0, held to
by tests that read these records with rq itself. Times and states are added by the scripts, in broker time.
Kept: the payload is JSON (`rq.serializers.JSONSerializer` reads it) and holds no text of a user; `FUNCTION` is a name
in an allow-list of the worker, never imported by name.
"""

from __future__ import annotations

import json
import zlib

from broker.config import PoolConfig

__all__ = ["FUNCTION", "fields"]

FUNCTION = "prism.turn"
"""The one function that a job of the pool may name."""


def fields(request: str, *, priority: str, conversation: str | None, config: PoolConfig) -> list[str | bytes | int]:
    """Names and values for HSET, flat, without those that the scripts write (status, origin, times, worker)."""
    call = json.dumps([FUNCTION, None, [request], {}]).encode()
    what = f"{priority} turn" + (f" of conversation {conversation}" if conversation else "")
    pairs: dict[str, str | bytes | int] = {
        "data": zlib.compress(call),
        "description": f"{what} ({request})",
        "timeout": -1,
        "result_ttl": config.result_s,
        "failure_ttl": config.result_s,
        "success_callback_name": "",
        "failure_callback_name": "",
        "stopped_callback_name": "",
        "ended_at": "",
        "last_heartbeat": "",
        "group_id": "",
    }
    return [item for pair in pairs.items() for item in pair]
