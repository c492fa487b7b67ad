"""What the broker answers a worker: the scripts' raw replies, read into values that say what they mean.

Kept: a protocol outcome (fenced, gone, behind) is a value, never an exception, and each number of a reply has its place
here alone; the scripts' own headers say the same from the other side.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from broker import events
from broker.spec import RequestSpec

__all__ = ["Beat", "Claim", "Flags", "Outcome"]

_STATUS: dict[int, Any] = {0: "ok", 1: "again", -1: "fenced", -2: "gone", -3: "behind"}


@dataclass(frozen=True)
class Beat:
    """Answer to a beat."""

    draining: bool
    """Somebody asked this worker to drain: finish or give back what runs, take no more, leave."""
    boot: str
    """The broker's boot id; a change means that it lost its data."""


class Flags(NamedTuple):
    """Answer to append and poll: was it accepted, and what should the decoder loop do next."""

    status: Literal["ok", "fenced", "gone", "behind"]
    """ok: stored (or stored before). fenced: the turn is no longer ours: stop, write nothing. gone: the request's
    record does not exist. behind: events before these are missing in the log: resend from `stored_ev + 1`."""
    stored_ev: int = 0
    """Number of the last event in the log."""
    cancel: str | None = None
    """Reason of a cancellation, set by a client; roll back and finish as cancelled."""
    yield_now: bool = False
    """An interactive turn waits for this worker, which runs a batch line: roll back and `give_back(...,
    "preempted")`."""

    @classmethod
    def read(cls, reply: Any) -> Flags:
        """From what `append.lua` or `poll.lua` returned."""
        status = _STATUS[reply[0]]
        if status != "ok":
            return cls(status, reply[1] if len(reply) > 1 else 0)
        return cls("ok", reply[1], reply[2].decode() or None, reply[3] == 1)


@dataclass(frozen=True)
class Outcome:
    """Answer to finish, settle and give_back."""

    status: Literal["ok", "again", "fenced", "gone", "behind"]
    """ok: done now. again: done before by this same epoch. Others as in `Flags`."""
    stored_ev: int = 0

    @classmethod
    def read(cls, reply: Any) -> Outcome:
        """From what `finish.lua`, `settle.lua` or `yield.lua` returned."""
        return cls(_STATUS[reply[0]], reply[1] if len(reply) > 1 else 0)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A turn that this worker now runs, under `epoch`."""

    request: str
    epoch: int
    ev: int
    """Events in the log so far: the next one is `ev + 1`."""
    n: int
    """Tokens emitted so far by earlier attempts."""
    attempt: int
    """Takes so far, this one included; yields and drains do not count."""
    remaining_ms: int
    """Broker time left until the deadline, at the moment of the take."""
    cancel: str | None
    """Reason if it was cancelled already (only for a turn given again after a lost reply)."""
    priority: str
    conversation: str
    """Key of the conversation for `transcript`, empty without one."""
    model: str
    group: str
    """Batch group, empty without one."""
    owner: str
    queued_ms: int
    """Broker time from submission (or the last move) to this take."""
    spec_bytes: bytes
    emitted: list[int] = field(default_factory=list)
    """Ids of the `n` tokens emitted by earlier attempts, in order; generation goes on after them."""
    emitted_text: str = ""
    """All text that the log holds for them; it may run ahead of them by a tail that was held back."""
    prompt_tokens: int = 0
    """Prompt tokens that an earlier attempt reported; 0 before the first."""

    @cached_property
    def spec(self) -> RequestSpec:
        """The request; `InvalidRequest` or `CodecError` if this worker cannot read it: finish it as failed."""
        return RequestSpec.unpack(self.spec_bytes)

    @classmethod
    def read(cls, reply: Any) -> Claim:
        """From the reply of `take.lua` that begins with `claim`."""
        emitted: list[int] = []
        texts: list[str] = []
        prompt_tokens = 0
        for payload in reply[15]:
            event = events.Event.unpack(events.BEGIN, payload)
            emitted += event.token_ids
            texts.append(event.text)
            prompt_tokens = event.data.get("prompt_tokens", prompt_tokens)
        return cls(
            request=reply[1].decode(),
            epoch=reply[2],
            ev=reply[3],
            n=reply[4],
            attempt=reply[5],
            remaining_ms=reply[6],
            cancel=reply[7].decode() or None,
            priority=reply[8].decode(),
            conversation=reply[9].decode(),
            model=reply[10].decode(),
            group=reply[11].decode(),
            owner=reply[12].decode(),
            queued_ms=reply[13],
            spec_bytes=reply[14],
            emitted=emitted,
            emitted_text="".join(texts),
            prompt_tokens=prompt_tokens,
        )
