"""Committed turns of a conversation, as `prism:c:C:hist` keeps them.

Kept: a list of turns in order, each holding exactly the messages that it added (as the client gave them), the answer,
and the token ids of that answer, so that committed text is never tokenised again. A turn joins the list in the same
atomic step that ends its request, and only if it ended as done.
Not promised: that the ids fit another model; `model` says whose they are.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from prism_core import codec

__all__ = ["TurnCommit", "TurnRecord"]


@dataclass(frozen=True, kw_only=True)
class TurnRecord:
    """One committed turn."""

    request: str
    """Request id."""
    model: str
    """Model identity whose token ids these are."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Messages that this turn added, role and content as given, without the answer. Empty for a turn of plain text."""
    answer: dict[str, Any] = field(default_factory=dict)
    """The answer as a message (role, content, ...); empty for a turn of plain text."""
    answer_ids: list[int] = field(default_factory=list)
    """Token ids of the answer, as generated."""
    text: str = ""
    """Text of the answer, as streamed."""
    prompt_ids: list[int] | None = None
    """Token ids that this turn put before its answer, beyond those of the turns before; for turns of plain text or
    ids."""
    tokens: int = 0
    """Length of the whole prompt and the answer together when this turn was made: where its prefix ends."""
    digest: str = ""
    """Hash of the message list up to and including this answer, for a quick test of whether a list goes on from
    here."""

    def pack(self) -> bytes:
        return codec.pack(asdict(self))

    @classmethod
    def unpack(cls, data: bytes) -> TurnRecord:
        value = codec.unpack(data)
        if type(value) is not dict:
            raise codec.CodecError("an entry of a transcript is no turn")
        known = {name: value[name] for name in cls.__dataclass_fields__ if name in value}
        try:
            return cls(**known)
        except TypeError as error:
            raise codec.CodecError(f"an entry of a transcript is incomplete: {error}") from error


@dataclass(frozen=True, kw_only=True)
class TurnCommit:
    """What `finish` does to the transcript: keep the first `base` turns, drop the rest, append `record`.

    `base` is the number of turns read at the begin for a plain next turn; smaller when the client's list differs from
    the transcript after `base` turns, which is an EDIT and replaces what followed.
    """

    base: int
    record: TurnRecord
