"""The response object of `/v1/responses`: from a request's spec and its answer's items.

Kept: an object is a function of the spec, the record's state and the items, so it reads the same in a stream, at
creation and when it is fetched later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from broker.calls import Record
from broker.events import BEGIN, Event
from broker.gateway.answer import AnswerParser, Piece
from broker.gateway.asked import created_at
from broker.gateway.errors import of_end
from broker.gateway.usage import estimated_share, response_usage, timings_ms
from broker.spec import RequestSpec

__all__ = ["Frame", "Item", "Items", "events_of", "items_of", "message_of", "request_of", "response_id"]

PREFIX = "resp_"


def response_id(request: str) -> str:
    return PREFIX + request


def request_of(name: str) -> str:
    """The request that a response's id stands for (the bare id is taken too)."""
    return name.removeprefix(PREFIX)


@dataclass
class Item:
    """One entry of `output`."""

    kind: str
    """reasoning, message or function_call."""
    id: str
    text: list[str] = field(default_factory=list)
    name: str = ""
    call_id: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def shown(self, status: str) -> dict[str, Any]:
        """The item with the text so far."""
        text = "".join(self.text)
        if self.kind == "function_call":
            extra = {"call_id": self.call_id, "name": self.name, "arguments": text}
            return {"id": self.id, "type": self.kind, "status": status, **extra}
        if self.kind == "reasoning":
            content = [{"type": "reasoning_text", "text": text}] if text else []
            return {"id": self.id, "type": self.kind, "status": status, "summary": [], "content": content}
        content = [self.part()] if text or status != "in_progress" else []
        return {"id": self.id, "type": self.kind, "status": status, "role": "assistant", "content": content}

    def part(self) -> dict[str, Any]:
        """The only content part of a message or a reasoning item."""
        text = "".join(self.text)
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self.logprobs)}


class Items:
    """The output items of one answer, grown piece by piece. Ids are made of the request's id and a count."""

    def __init__(self, request: str) -> None:
        self._request = request
        self.all: list[Item] = []

    def add(self, kind: str) -> Item:
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        item = Item(kind, f"{prefix}_{self._request}_{len(self.all)}")
        if kind == "function_call":
            item.call_id = f"call_{self._request}_{len(self.all)}"
        self.all.append(item)
        return item

    def take(self, piece: Piece) -> Item:
        """The item that the piece belongs to, with the piece in it."""
        kind = {"reasoning": "reasoning", "content": "message", "call": "function_call"}[piece.kind]
        item = self.all[-1] if self.all and self.all[-1].kind == kind != "function_call" else self.add(kind)
        if piece.call is not None:
            item.name, item.text = piece.call.name, [piece.call.arguments]
        else:
            item.text.append(piece.text)
        return item

    def shown(self, status: str) -> list[dict[str, Any]]:
        """All items; `status` is the last one's, those before it are complete."""
        return [item.shown("completed" if item is not self.all[-1] else status) for item in self.all]

    def reasoning_tokens(self, tokens: int) -> int:
        lengths = [(item.kind, sum(map(len, item.text))) for item in self.all]
        thought = sum(length for kind, length in lengths if kind == "reasoning")
        return estimated_share(tokens, thought, sum(length for _, length in lengths))


class Frame:
    """Everything of a response object but its state and output."""

    def __init__(self, request: str, spec: RequestSpec, model: str) -> None:
        note = spec.note
        self.request = request
        self.spec = spec
        self.background = bool(note.get("background"))
        first = (spec.messages or [{}])[0]
        conversation = note.get("conversation")
        self._fixed: dict[str, Any] = {
            "id": response_id(request),
            "object": "response",
            "created_at": created_at(request),
            "background": self.background,
            "instructions": first.get("content") if note.get("instructions") else None,
            "max_output_tokens": spec.max_tokens,
            "metadata": note.get("metadata") or {},
            "model": model,
            "parallel_tool_calls": True,
            "previous_response_id": note.get("previous"),
            "reasoning": {"effort": spec.template.get("reasoning_effort"), "summary": None},
            "store": True,
            "temperature": spec.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": note.get("tool_choice") or "auto",
            "tools": note.get("tools") or [],
            "top_logprobs": spec.logprobs or 0,
            "top_p": spec.top_p,
            "truncation": "disabled",
            **({"conversation": {"id": conversation}} if conversation else {}),
        }

    @property
    def tools(self) -> bool:
        return bool(self.spec.template.get("tools"))

    def open(self, status: str) -> dict[str, Any]:
        """The object of a request that has not ended."""
        return self._object(status, [])

    def ended(self, state: str, reason: str, items: Items, usage: dict[str, int]) -> dict[str, Any]:
        """The object of a request that ended as `state`. Output of one that is not done is kept as incomplete."""
        status = final_status(state, reason)
        done = status == "completed"
        error = of_end(state, reason) if status == "failed" else None
        code = "invalid_prompt" if error and error.status == 400 else "server_error"
        tokens = usage.get("completion_tokens", 0)
        return self._object(
            status,
            items.shown("completed" if done else "incomplete"),
            error={"code": code, "message": error.message} if error else None,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            usage=response_usage(usage, items.reasoning_tokens(tokens)),
            timings=timings_ms(usage),
        )

    def of_record(self, record: Record) -> dict[str, Any]:
        """The object of a request as the pool knows it now."""
        if record.state == "queued":
            return self.open("queued" if self.background or not record.ev else "in_progress")
        if record.state == "running":
            return self.open("in_progress")
        items = items_of(record, tools=self.tools)
        return self.ended(record.state, record.reason, items, record.usage)

    def _object(self, status: str, output: Sequence[dict[str, Any]], **changed: Any) -> dict[str, Any]:
        rest = {"error": None, "incomplete_details": None, "usage": None, **changed}
        return {**self._fixed, "status": status, "output": list(output), **rest}


def final_status(state: str, reason: str) -> str:
    if state == "done":
        return "incomplete" if reason == "length" else "completed"
    return "cancelled" if state == "cancelled" else "failed"


def items_of(record: Record, *, tools: bool) -> Items:
    """The output items in an ended record's text."""
    items = Items(record.request)
    parser = AnswerParser(tools=tools, thinking=bool(record.usage.get("thinking")))
    for piece in [*parser.push(record.text), *parser.finish()]:
        items.take(piece)
    if record.state == "done" and not items.all:
        items.add("message")
    return items


def message_of(items: Items) -> dict[str, Any]:
    """An answer as the message that a chat goes on from."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls = []
    for item in items.all:
        text = "".join(item.text)
        if item.kind == "message":
            message["content"] += text
        elif item.kind == "reasoning":
            message["reasoning_content"] = message.get("reasoning_content", "") + text
        else:
            function = {"name": item.name, "arguments": text}
            calls.append({"id": item.call_id, "type": "function", "function": function})
    return message | ({"tool_calls": calls} if calls else {})


def events_of(record: Record) -> list[Event]:
    """An ended record as the shortest stream that tells the same: for a log that has expired."""
    usage = record.usage
    start = {
        "attempt": record.attempt,
        "worker": record.worker,
        "prompt_tokens": usage.get("prompt_tokens", 0),
        "reused_tokens": usage.get("reused_tokens", 0),
        "thinking": bool(usage.get("thinking")),
    }
    delta = {"n": record.n, "t": record.token_ids, "x": record.text}
    end = {"state": record.state, "reason": record.reason, "usage": usage, "n": record.n}
    return [Event(BEGIN, "start", start), Event(BEGIN, "delta", delta), Event(BEGIN, "end", end)]
