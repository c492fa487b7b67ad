"""Server-sent events: the bytes of a stream.

Kept: `id:` stands only on the last chunk of a log entry's chunks, so a reader that comes back with it has missed
nothing; a chunk is one `data:` line. A comment is a line without an empty one after it: OpenAI's Python client takes
the empty line for an event, once it has seen an `id:`.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["DONE", "KEEP_ALIVE", "comment", "frame", "json_bytes"]

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n"


def json_bytes(value: Any) -> bytes:
    """Compact JSON as UTF-8; half a surrogate pair in a client's own text comes back as `?`."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def frame(chunk: dict[str, Any], *, name: str | None = None, cursor: str | None = None) -> bytes:
    """One event. `name`: its `event:` line; `cursor`: its `id:` line."""
    head = (f"event: {name}\n" if name else "") + (f"id: {cursor}\n" if cursor else "")
    return b"".join((head.encode(), b"data: ", json_bytes(chunk), b"\n\n"))


def comment(text: str) -> bytes:
    return f": {text}\n".encode()
