"""Events of a request's stream: their kinds, their msgpack form, and their ids.

    start{attempt, worker, prompt_tokens, reused_tokens, thinking?}    a worker begins (again, after a move)
    delta{n, t: [ids], x: text, lp?}                        new tokens; n = tokens emitted so far, these included
    moved{why}                                              the turn left its worker; n goes on
    end{state, reason, usage, n}                            exactly once, last

Kept: `ev` counts 1, 2, 3, ... without holes over a request's life; epochs rise but may skip. The id of an event is
`<epoch>-<ev>`. Deltas are provisional until `end` says "done": after any other state the consumer disowns them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from broker.errors import InvalidCursor
from prism_core import codec

__all__ = ["MOVES", "TERMINAL", "Cursor", "Event", "delta", "end", "parse_cursor", "start"]

TERMINAL = ("done", "failed", "cancelled", "expired")
"""States that nothing leaves. The open ones are queued and running."""

MOVES = ("worker_lost", "preempted", "drain")
"""Why a turn moved."""

_CURSOR = re.compile(r"(0|[1-9][0-9]{0,14})-(0|[1-9][0-9]{0,14})\Z")


@dataclass(frozen=True, order=True)
class Cursor:
    """Position of an event in a stream; prints as its id."""

    epoch: int
    ev: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.ev}"


BEGIN = Cursor(0, 0)


@dataclass(frozen=True)
class Event:
    """One event as a reader sees it. `data` holds the fields of its kind, under the protocol's names."""

    cursor: Cursor
    kind: str
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """`<epoch>-<ev>`, good as `after=` of a later read."""
        return str(self.cursor)

    @property
    def sequence(self) -> int:
        """Position in the stream, from 1, without holes."""
        return self.cursor.ev

    @property
    def text(self) -> str:
        """Text of a delta, else empty."""
        return str(self.data.get("x", ""))

    @property
    def token_ids(self) -> list[int]:
        """Token ids of a delta, else empty."""
        return list(self.data.get("t", ()))

    @property
    def state(self) -> str | None:
        """Final state, of an end event only."""
        return self.data.get("state") if self.kind == "end" else None

    @classmethod
    def unpack(cls, cursor: Cursor, payload: bytes) -> Event:
        """The event in a log entry or a live message; `CodecError` if it is none."""
        value = codec.unpack(payload)
        if type(value) is not dict or type(value.get("k")) is not str:
            raise codec.CodecError(f"entry {cursor} of a log is no event")
        return cls(cursor, value.pop("k"), value)


def start(*, attempt: int, worker: str, prompt_tokens: int, reused_tokens: int, thinking: bool = False) -> bytes:
    """`thinking`: the prompt ends inside an open `<think>`, so the text begins with reasoning."""
    value: dict[str, Any] = {
        "k": "start",
        "attempt": attempt,
        "worker": worker,
        "prompt_tokens": prompt_tokens,
        "reused_tokens": reused_tokens,
    }
    if thinking:
        value["thinking"] = True
    return codec.pack(value)


def delta(*, n: int, ids: Sequence[int], text: str, logprobs: Any = None) -> bytes:
    value: dict[str, Any] = {"k": "delta", "n": n, "t": list(ids), "x": text}
    if logprobs is not None:
        value["lp"] = logprobs
    return codec.pack(value)


def end(*, state: str, reason: str, usage: Mapping[str, int], n: int) -> bytes:
    return codec.pack({"k": "end", "state": state, "reason": reason, "usage": dict(usage), "n": n})


def parse_cursor(text: object) -> Cursor:
    """A cursor from its id, such as a `Last-Event-ID`; `InvalidCursor` for anything else, never "from the start"."""
    match = _CURSOR.match(text) if isinstance(text, str) else None
    if match is None:
        raise InvalidCursor(f"a cursor looks like '3-17' (<epoch>-<ev>), got {str(text)[:60]!r}")
    return Cursor(int(match[1]), int(match[2]))
