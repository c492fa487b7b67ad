"""What an endpoint made of a body: requests for the pool, and how to answer. Shared by all endpoints that generate.

Kept: an `Answer` is a function of the events it was given, in order, and of what was asked; so a repeated or resumed
stream shows the same chunks under the same names. It does no input or output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from broker.events import Event
from broker.spec import RequestSpec

__all__ = ["Answer", "Asked", "created_at"]

Chunk = dict[str, Any]

_CROCKFORD = {letter: value for value, letter in enumerate("0123456789ABCDEFGHJKMNPQRSTVWXYZ")}


@dataclass(frozen=True)
class Asked:
    """A body, read."""

    api: str
    """chat, completions or responses."""
    model: str
    """As the client named it; empty for whatever the pool runs."""
    specs: Sequence[RequestSpec]
    """One request for each answer."""
    stream: bool
    n: int = 1
    """Answers to each prompt."""
    background: bool = False
    conversation: str | None = None
    include_usage: bool = False
    """`stream_options.include_usage`."""


class Answer(Protocol):
    """Turns events into what the client reads."""

    sequence: int
    """Chunks numbered so far; 0 where they have no numbers."""

    def push(self, index: int, event: Event) -> list[Chunk]:
        """The chunks of a stream for the next event of answer `index`. Raises `ApiError` for an end that is none."""
        ...

    def closing(self) -> list[Chunk]:
        """Chunks after the last end."""
        ...

    def result(self) -> Chunk:
        """The whole object, once every answer has ended."""
        ...


def created_at(request: str) -> int:
    """Unix seconds in which a request's id (a ULID) was made: the same at every reading. Of a batch's line (`b`, then
    the batch's ULID): those of its batch."""
    time = request.removeprefix("b")[:10]
    return sum(_CROCKFORD[letter] << (45 - 5 * at) for at, letter in enumerate(time)) // 1000
