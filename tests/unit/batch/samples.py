"""Lines of batch files for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def chat(custom_id: str = "a", text: str = "hello", system: str = "", **body: Any) -> dict[str, Any]:
    """A line for the chat endpoint."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    return line(custom_id, CHAT, {"messages": messages, "max_tokens": 4, "seed": 1, **body})


def text(custom_id: str = "a", prompt: Any = "hello", **body: Any) -> dict[str, Any]:
    """A line for the completions endpoint."""
    return line(custom_id, TEXT, {"prompt": prompt, "max_tokens": 4, "seed": 1, **body})


def line(custom_id: str, url: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def pack(value: object) -> bytes:
    return json.dumps(value).encode()


def written(path: Path, values: Iterable[object]) -> Path:
    """A file of one JSON value a line; bytes are written as they are."""
    rows = [value if isinstance(value, bytes) else pack(value) for value in values]
    path.write_bytes(b"".join(row + b"\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in path.read_bytes().splitlines()]
