"""Trace context (W3C `traceparent`), carried from the HTTP request into the pool's record of it.

With the `opentelemetry` package installed and a span active (as its ASGI instrumentation makes one), that span is the
parent of what a worker does; else the header of the client is passed on as it is. A worker makes its span under it
(`workers.tracing`). Not promised: a span of the gateway's own.
"""

from __future__ import annotations

import importlib
import re
from functools import cache
from typing import Any

__all__ = ["parent"]

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}\Z")


def parent(header: str | None) -> str:
    """The `traceparent` to carry; empty if there is none, or what came is none."""
    active = _active()
    if active:
        return active
    return header if header is not None and _TRACEPARENT.match(header) else ""


def _active() -> str:
    propagate = _propagate()
    if propagate is None:
        return ""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier.get("traceparent", "")


@cache
def _propagate() -> Any:
    try:
        return importlib.import_module("opentelemetry.propagate")
    except ImportError:
        return None
