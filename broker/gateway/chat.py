"""`/v1/chat/completions`: from the body to requests, and from events to chunks or one completion.

What OpenAI's API has and this has not is refused with its name: answers kept to JSON or a schema, forced tools,
`logit_bias`, audio and images, web search, predictions, and the old `functions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from broker.events import Event
from broker.gateway import options
from broker.gateway.answer import AnswerParser, Piece
from broker.gateway.asked import Asked, Chunk, created_at
from broker.gateway.body import Body
from broker.gateway.config import GatewayConfig
from broker.gateway.errors import invalid, of_end
from broker.gateway.logprobs import chat_logprobs
from broker.gateway.messages import check_format, check_messages, tool_variables
from broker.gateway.usage import chat_usage, estimated_share, timings_ms
from broker.spec import MAX_LOGPROBS, RequestSpec

__all__ = ["ChatAnswer", "read_chat", "stream_options"]

API = "chat"


def read_chat(value: object, config: GatewayConfig) -> Asked:
    """The requests of a body; `ApiError` (400) names the field at fault."""
    body = Body(value)
    messages = body.array("messages", most=config.max_messages)
    if messages is None:
        raise invalid("messages is required", "messages", "missing_required_parameter")
    count = body.integer("n", 1, config.max_choices) or 1
    common = {
        "messages": check_messages(messages, config),
        "max_tokens": options.max_tokens(body, "max_completion_tokens", "max_tokens", default=None),
        "stop": options.stops(body),
        "logprobs": _logprobs(body),
        "template": _template(body),
        "note": {"api": API},
        **options.sampling(body),
    }
    asked = Asked(
        api=API,
        model=body.text("model") or "",
        specs=[RequestSpec(**common, seed=seed) for seed in options.seeds(body, count)],
        stream=body.flag("stream"),
        n=count,
        include_usage=stream_options(body),
    )
    check_format(body.get("response_format"), "response_format")
    body.ignore(*options.IGNORED, "verbosity")
    body.refuse("modalities", "answers are text", allowed=[["text"]])
    body.refuse("logit_bias", "the sampler has no biases for single tokens")
    body.refuse("functions", "use tools")
    body.refuse("function_call", "use tools and tool_choice", allowed=["none", "auto"])
    for name in ("audio", "prediction", "web_search_options", "moderation"):
        body.refuse(name, "this pool has no such service")
    body.finish()
    return asked


def stream_options(body: Body) -> bool:
    """`stream_options.include_usage`."""
    given = body.object("stream_options")
    if given is None:
        return False
    inner = Body(given, "stream_options.")
    wanted = inner.flag("include_usage")
    inner.ignore("include_obfuscation")
    inner.finish()
    return wanted


def _logprobs(body: Body) -> int | None:
    top = body.integer("top_logprobs", 0, MAX_LOGPROBS)
    if body.flag("logprobs"):
        return top or 0
    if top:
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    return None


def _template(body: Body) -> dict[str, Any]:
    variables = {**options.template_variables(body), **tool_variables(body)}
    effort = body.text("reasoning_effort", most=32)
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
        if effort == "none":
            variables.setdefault("enable_thinking", False)
    return variables


@dataclass
class _Choice:
    parser: AnswerParser | None = None
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None
    usage: dict[str, int] = field(default_factory=dict)

    def reasoning_tokens(self) -> int:
        thought = sum(map(len, self.reasoning))
        return estimated_share(self.usage.get("completion_tokens", 0), thought, thought + sum(map(len, self.content)))


class ChatAnswer:
    """Chunks and completion of one chat request, of any number of choices."""

    sequence = 0

    def __init__(self, asked: Asked, requests: Sequence[str], model: str) -> None:
        """`requests`: ids in the order of the choices. `model`: the name to answer with."""
        self._asked = asked
        self._requests = requests
        self._tools = bool(asked.specs[0].template.get("tools"))
        self._with_logprobs = asked.specs[0].logprobs is not None
        self._choices = [_Choice() for _ in requests]
        self._head = {"id": f"chatcmpl-{requests[0]}", "created": created_at(requests[0]), "model": model}

    def push(self, index: int, event: Event) -> list[Chunk]:
        choice = self._choices[index]
        if event.kind == "start":
            return self._start(index, choice, event)
        if event.kind == "delta":
            if choice.parser is None:
                choice.parser = AnswerParser(tools=self._tools)
            entries = chat_logprobs(event.data.get("lp") or ()) if self._with_logprobs else []
            choice.logprobs += entries
            deltas = [self._take(index, choice, piece) for piece in choice.parser.push(event.text)]
            if entries and not deltas:
                deltas = [{"content": ""}]
            chunks = [self._chunk(index, delta) for delta in deltas]
            if entries:
                chunks[0]["choices"][0]["logprobs"] = {"content": entries, "refusal": None}
            return chunks
        return self._end(index, choice, event) if event.kind == "end" else []

    def closing(self) -> list[Chunk]:
        if not self._asked.include_usage:
            return []
        return [self._object("chat.completion.chunk", [], usage=self._usage(), timings=self._timings())]

    def result(self) -> Chunk:
        choices = [self._message(index, choice) for index, choice in enumerate(self._choices)]
        return self._object("chat.completion", choices, usage=self._usage(), timings=self._timings())

    def _start(self, index: int, choice: _Choice, event: Event) -> list[Chunk]:
        if choice.parser is not None:
            return []
        choice.parser = AnswerParser(thinking=bool(event.data.get("thinking")), tools=self._tools)
        return [self._chunk(index, {"role": "assistant", "content": ""})]

    def _end(self, index: int, choice: _Choice, event: Event) -> list[Chunk]:
        reason = str(event.data.get("reason", ""))
        choice.usage = dict(event.data.get("usage") or {})
        if event.state != "done":
            raise of_end(str(event.state), reason)
        pieces = choice.parser.finish() if choice.parser else []
        chunks = [self._chunk(index, self._take(index, choice, piece)) for piece in pieces]
        choice.finish = "tool_calls" if choice.calls and reason == "stop" else reason
        return [*chunks, self._chunk(index, {}, choice.finish)]

    def _take(self, index: int, choice: _Choice, piece: Piece) -> dict[str, Any]:
        """Adds a piece to the choice; returns the delta that tells of it."""
        if piece.call is not None:
            at = len(choice.calls)
            function = {"name": piece.call.name, "arguments": piece.call.arguments}
            call = {"id": f"call_{self._requests[index]}_{at}", "type": "function", "function": function}
            choice.calls.append(call)
            return {"tool_calls": [{"index": at, **call}]}
        if piece.kind == "reasoning":
            choice.reasoning.append(piece.text)
            return {"reasoning_content": piece.text}
        choice.content.append(piece.text)
        return {"content": piece.text}

    def _chunk(self, index: int, delta: dict[str, Any], finish: str | None = None) -> Chunk:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        extra = {"usage": None} if self._asked.include_usage else {}
        return self._object("chat.completion.chunk", [choice], **extra)

    def _message(self, index: int, choice: _Choice) -> dict[str, Any]:
        content = "".join(choice.content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = "".join(choice.reasoning)
        if choice.calls:
            message |= {"content": content or None, "tool_calls": choice.calls}
        logprobs = {"content": choice.logprobs, "refusal": None} if self._with_logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish}

    def _usage(self) -> dict[str, Any]:
        thought = sum(choice.reasoning_tokens() for choice in self._choices)
        return chat_usage([choice.usage for choice in self._choices], thought)

    def _timings(self) -> dict[str, float]:
        return timings_ms(self._choices[0].usage)

    def _object(self, kind: str, choices: list[Any], **extra: Any) -> Chunk:
        return {"id": self._head["id"], "object": kind, **self._head, "choices": choices, **extra}
