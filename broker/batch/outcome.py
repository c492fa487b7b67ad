"""From the ends of a line's requests to its line of output, in OpenAI's form.

    {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error": null}    answered, or refused
    {"id", "custom_id", "response": null, "error": {"code", "message"}}                      never run to an end

Kept: the body is the object that the HTTP endpoint gives for the same request, or its error object.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from broker.batch.ledger import Entry
from broker.batch.lines import Line
from broker.events import Event
from broker.gateway.asked import Answer, Asked
from broker.gateway.chat import ChatAnswer
from broker.gateway.completions import CompletionAnswer
from broker.gateway.errors import ApiError

__all__ = ["answered", "refused", "unanswered"]

Chunk = dict[str, Any]


def answered(line: Line, index: int, attempt: int, name: str, ends: Sequence[Sequence[Event]], ids: Ids) -> Entry:
    """The line whose requests have all ended; `ends` holds the events of each. `name`: the model to answer with."""
    answer = _answer(line.asked, ids.requests, name)
    try:
        for choice, events in enumerate(ends):
            for event in events:
                answer.push(choice, event)
    except ApiError as error:
        return refused(line.custom_id, index, attempt, error, ids)
    body = answer.result()
    return _entry(line.custom_id, index, attempt, True, ids, _response(200, ids, body), None, body["usage"])


def refused(custom_id: str, index: int, attempt: int, error: ApiError, ids: Ids) -> Entry:
    """The line to which the pool said no."""
    response = _response(error.status, ids, error.body())
    return _entry(custom_id, index, attempt, False, ids, response, None, {})


def unanswered(custom_id: str, index: int, attempt: int, code: str, message: str, ids: Ids) -> Entry:
    """The line that was never run to an end."""
    return _entry(custom_id, index, attempt, False, ids, None, {"code": code, "message": message}, {})


class Ids:
    """The names of one try of a line."""

    def __init__(self, line: str, requests: Sequence[str]) -> None:
        self.line = line
        self.requests = requests


def _answer(asked: Asked, requests: Sequence[str], name: str) -> Answer:
    make = ChatAnswer if asked.api == "chat" else CompletionAnswer
    return make(asked, requests, name)


def _response(status: int, ids: Ids, body: Chunk) -> Chunk:
    return {"status_code": status, "request_id": ids.requests[0], "body": body}


def _entry(
    custom_id: str,
    index: int,
    attempt: int,
    ok: bool,
    ids: Ids,
    response: Chunk | None,
    error: Chunk | None,
    usage: Chunk,
) -> Entry:
    value = {"id": ids.line, "custom_id": custom_id, "response": response, "error": error}
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).translate(_BREAKS)
    return Entry(index, attempt, ok, text.encode(errors="replace"), usage)


_BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
"""What JSON lets stand in a string, and many readers take for the end of a line."""
