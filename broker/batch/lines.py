"""One line of a batch file, read and checked as the HTTP endpoint of its `url` would.

    {"custom_id": "...", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

Kept: a `Line` that exists can be submitted: its body has passed the same checks as a request over HTTP. Keys beside
these four are passed over. Not promised: what only the model knows, such as its context; that fails the one line.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from broker.batch.errors import BadLine
from broker.gateway.asked import Asked
from broker.gateway.chat import read_chat
from broker.gateway.completions import read_completion
from broker.gateway.config import GatewayConfig
from broker.gateway.errors import ApiError
from prism_core.errors import PrismError

__all__ = ["ENDPOINTS", "MAX_LINE_BYTES", "Line", "opening", "read_line"]

ENDPOINTS: dict[str, Callable[[object, GatewayConfig], Asked]] = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_completion,
}
MAX_LINE_BYTES = 4 << 20
"""Longest line, its newline not counted."""
MAX_ID_CHARS = 512


@dataclass(frozen=True)
class Line:
    """A line that may be run."""

    custom_id: str
    url: str
    asked: Asked


def read_line(data: bytes, config: GatewayConfig, *, endpoint: str = "", model: str = "") -> Line:
    """The request in one line. `BadLine` says what is wrong.

    endpoint: the only `url` allowed; empty for any of `ENDPOINTS`. model: takes the place of the body's.
    """
    value = _json(data)
    if not isinstance(value, dict):
        raise BadLine("must be a JSON object", "invalid_line")
    custom_id = _custom_id(value.get("custom_id"))
    if value.get("method") != "POST":
        raise BadLine(f'method must be "POST", got {_shown(value.get("method"))}', "invalid_method", "method")
    url = value.get("url")
    if not isinstance(url, str) or url not in ENDPOINTS:
        known = " or ".join(ENDPOINTS)
        raise BadLine(f"url must be {known}, got {_shown(url)}", "invalid_url", "url")
    if endpoint and url != endpoint:
        raise BadLine(f"url is {url}, but the batch's endpoint is {endpoint}", "mismatched_endpoint", "url")
    if not isinstance(value.get("body"), dict):
        raise BadLine("body must be a JSON object", "missing_body", "body")
    try:
        asked = ENDPOINTS[url](value["body"], config)
        for spec in asked.specs:
            spec.pack()  # what cannot be sent is told now, with its line
    except ApiError as error:
        raise BadLine(error.message, error.code or "invalid_request", error.param and f"body.{error.param}") from None
    except PrismError as error:
        raise BadLine(str(error), "invalid_value", "body") from None
    if asked.stream:
        raise BadLine("stream must be false in a batch", "unsupported_parameter", "body.stream")
    if not _is_text(asked.model):
        raise BadLine("model is no valid Unicode text", "invalid_value", "body.model")
    return Line(custom_id, url, replace(asked, model=model) if model else asked)


def opening(line: Line, most: int) -> str:
    """The first characters of what the model will read, at most `most`, so that lines that begin alike are found.

    Not the template's rendering, which only a worker knows, but equal beginnings of that come from equal ones here.
    """
    spec = line.asked.specs[0]
    if spec.messages is None:
        text = spec.prompt if spec.prompt is not None else " ".join(map(str, (spec.token_ids or [])[: most // 2]))
        return text[:most]
    parts = [json.dumps(spec.template, sort_keys=True)] if spec.template else []
    size = sum(map(len, parts))
    for message in spec.messages:
        if size >= most:
            break
        parts.append(f"\x00{message['role']}\x00{message['content'][: most - size]}")
        size += len(parts[-1])
    return "".join(parts)[:most]


def _json(data: bytes) -> Any:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise BadLine(f"is no UTF-8 text: byte {error.start + 1}", "invalid_encoding") from None
    if not text.strip():
        raise BadLine("is blank", "blank_line")
    try:
        return json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise BadLine(f"is no valid JSON: {error.msg} at character {error.pos + 1}", "invalid_json") from None
    except RecursionError:
        raise BadLine("is nested too deeply", "invalid_json") from None
    except ValueError as error:
        raise BadLine(f"is no valid JSON: {error}", "invalid_json") from None


def _custom_id(value: Any) -> str:
    if value is None:
        raise BadLine("custom_id is required", "missing_custom_id", "custom_id")
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_ID_CHARS:
        message = f"custom_id must be a string of 1 to {MAX_ID_CHARS} characters"
        raise BadLine(message, "invalid_custom_id", "custom_id")
    if not _is_text(value):
        raise BadLine("custom_id is no valid Unicode text", "invalid_custom_id", "custom_id")
    return value


def _is_text(value: str) -> bool:
    """Without halves of surrogate pairs, which JSON can spell and UTF-8 cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)[:60]


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
