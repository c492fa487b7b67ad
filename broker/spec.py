"""What a client asks for: one validated record, and its msgpack form.

Kept: a `RequestSpec` that exists is within every documented limit, so neither broker nor worker checks again; what
cannot be known without the model (context length, vocabulary) is checked by the worker.
Not promised: that a newer field is understood by an older worker; it refuses the request and names the field.
"""

from __future__ import annotations

import difflib
import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from prism_core import codec
from prism_core.errors import InvalidRequest

__all__ = ["MAX_STOPS", "MAX_TOKENS", "RequestSpec"]

MAX_TOKENS = 262_144
MAX_STOPS = 16
MAX_STOP_CHARS = 1_024
MAX_MESSAGES = 10_000
MAX_LOGPROBS = 20
MAX_TOKEN_ID = 1 << 20
MAX_TRACE_CHARS = 128
HISTORIES = ("auto", "append", "replace")
ENGINE_VARIABLES = frozenset(("messages", "answers", "add_generation_prompt"))
"""What a worker gives to a template itself, beside a request's own variables."""


@dataclass(frozen=True, kw_only=True)
class RequestSpec:
    """One generation. Exactly one of `prompt`, `messages` and `token_ids` is given; the rest has defaults (greedy)."""

    prompt: str | None = None
    """Text to continue, encoded literally."""
    messages: list[dict[str, Any]] | None = None
    """Chat messages, each with `role`; they go through the model's template."""
    token_ids: list[int] | None = None
    """A ready prompt."""
    max_tokens: int | None = 256
    """Most tokens to generate; None: as many as the context leaves after the prompt."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    """None: one is drawn at submission, so that a resumed generation equals an uninterrupted one."""
    stop: list[str] = field(default_factory=list)
    """Strings that end the text, not included in it."""
    logprobs: int | None = None
    """Number of alternatives to report for each token; None: no log-probabilities."""
    template: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, such as `tools` or `enable_thinking`."""
    history: str = "auto"
    """How `messages` relate to the conversation's transcript. `append`: they are new ones after it. `replace`: they
    are the whole list. `auto`: the whole list if an assistant message is among them or a system message comes first,
    else new."""
    note: dict[str, Any] = field(default_factory=dict)
    """What the caller wants to find again with the request, such as the form of its answer. No worker looks at it."""
    trace: str = ""
    """W3C `traceparent` of the span that asked. Not part of what is asked for: a retry comes with another one."""

    def __post_init__(self) -> None:
        self._check_input()
        if self.max_tokens is not None:
            _integer(self, "max_tokens", 1, MAX_TOKENS)
        _integer(self, "top_k", 0, MAX_TOKEN_ID)
        _number(self, "temperature", 0.0, 100.0)
        _number(self, "top_p", 0.0, 1.0, open_low=True)
        _number(self, "min_p", 0.0, 1.0)
        _number(self, "repetition_penalty", 0.0, 100.0, open_low=True)
        _number(self, "presence_penalty", -100.0, 100.0)
        _number(self, "frequency_penalty", -100.0, 100.0)
        if self.seed is not None:
            _integer(self, "seed", 0, (1 << 64) - 1)
        if self.logprobs is not None:
            _integer(self, "logprobs", 0, MAX_LOGPROBS)
        if type(self.stop) is not list or len(self.stop) > MAX_STOPS:
            raise InvalidRequest(f"stop must be a list of at most {MAX_STOPS} strings, got {_short(self.stop)}")
        for text in self.stop:
            if type(text) is not str or not 1 <= len(text) <= MAX_STOP_CHARS:
                raise InvalidRequest(
                    f"each stop must be a string of 1 to {MAX_STOP_CHARS} characters, got {_short(text)}"
                )
        if type(self.template) is not dict:
            raise InvalidRequest(f"template must be a map of template variables, got {_short(self.template)}")
        for name in self.template:
            if type(name) is not str:
                raise InvalidRequest(f"template: the name of a variable must be a string, got {_short(name)}")
            if name in ENGINE_VARIABLES:
                raise InvalidRequest(f"template: the variable {name!r} is set by the engine")
        _plain(self.template, "template")
        if type(self.note) is not dict:
            raise InvalidRequest(f"note must be a map, got {_short(self.note)}")
        _plain(self.note, "note")
        if type(self.trace) is not str or len(self.trace) > MAX_TRACE_CHARS:
            raise InvalidRequest(f"trace must be a string of at most {MAX_TRACE_CHARS} characters")
        if self.history not in HISTORIES:
            raise InvalidRequest(f"history must be one of {', '.join(HISTORIES)}, got {_short(self.history)}")

    def _check_input(self) -> None:
        given = [name for name in ("prompt", "messages", "token_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequest(
                f"give exactly one of prompt, messages and token_ids, got {' and '.join(given) if given else 'none'}"
            )
        if self.prompt is not None:
            if type(self.prompt) is not str or not self.prompt:
                raise InvalidRequest(f"prompt must be a string that is not empty, got {_short(self.prompt)}")
            _encodable(self.prompt, "prompt")
        elif self.messages is not None:
            self._check_messages(self.messages)
        elif self.token_ids is not None:
            if type(self.token_ids) is not list or not 1 <= len(self.token_ids) <= MAX_TOKENS:
                raise InvalidRequest(f"token_ids must be a list of 1 to {MAX_TOKENS} ids, got {_short(self.token_ids)}")
            for token in self.token_ids:
                if type(token) is not int or not 0 <= token < MAX_TOKEN_ID:
                    raise InvalidRequest(f"each of token_ids must be 0 to {MAX_TOKEN_ID - 1}, got {_short(token)}")

    @staticmethod
    def _check_messages(messages: list[dict[str, Any]]) -> None:
        if type(messages) is not list or not 1 <= len(messages) <= MAX_MESSAGES:
            raise InvalidRequest(f"messages must be a list of 1 to {MAX_MESSAGES} messages, got {_short(messages)}")
        for index, message in enumerate(messages):
            if type(message) is not dict or type(message.get("role")) is not str or not message["role"]:
                raise InvalidRequest(f"messages[{index}] must be a map with a role, got {_short(message)}")
            _plain(message, f"messages[{index}]")

    def pack(self) -> bytes:
        """The msgpack form: a map of the fields that differ from their defaults."""
        return codec.pack(
            {
                item.name: getattr(self, item.name)
                for item in fields(self)
                if getattr(self, item.name) != (item.default if item.default_factory is not list else [])
                and not (item.name in ("stop", "template", "note") and not getattr(self, item.name))
            }
        )

    @classmethod
    def unpack(cls, data: bytes) -> RequestSpec:
        """The spec that `pack` wrote; `InvalidRequest` or `CodecError` for anything else."""
        value = codec.unpack(data)
        if type(value) is not dict:
            raise InvalidRequest(f"a request must be a map, got {_short(value)}")
        return cls.of(value)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> RequestSpec:
        """A spec from named options; an unknown name is refused with the nearest known one."""
        known = [item.name for item in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise InvalidRequest(f"unknown option {name!r}" + (f": did you mean {near[0]!r}?" if near else ""))
        given = dict(options)
        if isinstance(given.get("stop"), str):
            given["stop"] = [given["stop"]]
        return cls(**given)

    def digest(self) -> str:
        """Hash of everything asked for, so that a repeated submission can be told from another one."""
        return hashlib.sha256((replace(self, trace="") if self.trace else self).pack()).hexdigest()

    def affinity(self) -> str:
        """Hash of the prompt's beginning: a client that sends its whole list again and again meets the same worker."""
        head: Any
        if self.messages is not None:
            # Up to the first message of the user: what stays the same while a chat grows.
            first = next((i for i, message in enumerate(self.messages) if message["role"] == "user"), 0)
            head = self.messages[: first + 1]
        elif self.token_ids is not None:
            head = self.token_ids[:64]
        else:
            head = (self.prompt or "")[:256]
        return hashlib.sha256(codec.pack(head)).hexdigest()[:32]

    def seeded(self) -> RequestSpec:
        """This spec with a seed: its own, or one drawn now."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))


def _integer(spec: RequestSpec, name: str, low: int, high: int) -> None:
    value = getattr(spec, name)
    if type(value) is not int or not low <= value <= high:
        raise InvalidRequest(f"{name} must be an integer from {low} to {high}, got {_short(value)}")


def _number(spec: RequestSpec, name: str, low: float, high: float, *, open_low: bool = False) -> None:
    value = getattr(spec, name)
    fits = type(value) in (int, float) and low <= value <= high  # NaN is in no range
    if not fits or (open_low and value == low):
        bound = f"above {low:g} up to {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise InvalidRequest(f"{name} must be a number {bound}, got {_short(value)}")


def _plain(value: Any, what: str) -> None:
    try:
        codec.pack(value)
    except codec.CodecError as error:
        raise InvalidRequest(f"{what}: {error}") from error


def _encodable(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{what} is no valid Unicode text: {error.reason} at character {error.start}") from error


def _short(value: object) -> str:
    try:
        shown = repr(value)
    except ValueError:  # an integer of more digits than Python writes out
        return "a value too long to show"
    return shown if len(shown) <= 60 else shown[:57] + "..."
