"""A span for each turn, as a child of the request that asked for it, where the `opentelemetry` package is installed.

Kept: without the package, or without a trace, a turn costs nothing here. Spans bear ids and counts, never text.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

__all__ = ["turn_span"]


@contextlib.contextmanager
def turn_span(parent: str, request: str, worker: str) -> Iterator[None]:
    """Inside, a span `prism.turn` under the W3C `traceparent` that the request carried."""
    api = _api() if parent else None
    if api is None:
        yield
        return
    trace, propagate = api
    context = propagate.extract({"traceparent": parent})
    attributes = {"prism.request": request, "prism.worker": worker}
    with trace.get_tracer("prism").start_as_current_span("prism.turn", context=context, attributes=attributes):
        yield


def _api() -> tuple[Any, Any] | None:
    try:
        return importlib.import_module("opentelemetry.trace"), importlib.import_module("opentelemetry.propagate")
    except ImportError:
        return None
