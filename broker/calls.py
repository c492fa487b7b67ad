"""The client's calls as data: what to send and how to read the answer, shared by the sync and the async client.

Kept: one place knows the argument order of each client script and turns each answer into a value or an error of
`broker.errors`; sending is the caller's business, so it can be sent again blindly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from broker import keys, rqrecord
from broker.config import PoolConfig
from broker.errors import Conflict, Gone, InvalidRequest, NotFound, QueueFull
from broker.spec import RequestSpec
from prism_core import codec

__all__ = ["Call", "Record", "Submission", "Submitted", "cancel", "read_record", "submit"]

T = TypeVar("T")

Cancelled = Literal["cancelled", "cancelling", "ended"]


@dataclass(frozen=True)
class Call(Generic[T]):
    """One script call and the reader of its answer."""

    script: str
    keys: Sequence[str]
    arguments: Sequence[str | bytes | int | float]
    parse: Callable[[Any], T]


@dataclass(frozen=True)
class Submitted:
    """A request that the pool has accepted."""

    request: str
    outcome: Literal["placed", "boxed", "dup"]
    """placed: in a queue. boxed: behind the active turn of its conversation. dup: accepted by an earlier call."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """Everything about a submission but the spec. Validated at construction."""

    request: str
    """Request id, made once, before the first try."""
    owner: str = keys.LOCAL_OWNER
    conversation: str | None = None
    model: str = ""
    """Name or identity; empty for whatever the pool runs."""
    priority: str = "interactive"
    deadline_s: float | None = None
    """Seconds from now, queueing included; None for the pool's default."""
    idempotency_key: str | None = None
    affinity: str | None = None
    """Requests of equal affinity prefer the same idle worker; None: a hash of the prompt's beginning."""
    group: str = ""
    """Batch lines of one group share a prefix and go to one worker."""

    def __post_init__(self) -> None:
        keys.check_id(self.request, "request id")
        if self.conversation is not None:
            keys.check_id(self.conversation, "conversation")
        if self.group:
            keys.check_id(self.group, "group")
        if self.priority not in keys.PRIORITIES:
            raise InvalidRequest(
                f"priority must be one of {', '.join(keys.PRIORITIES)}, got {str(self.priority)[:40]!r}"
            )
        if not isinstance(self.model, str) or len(self.model) > 256:
            raise InvalidRequest("model must be a string of at most 256 characters")


def submit(item: Submission, spec: RequestSpec, config: PoolConfig) -> Call[Submitted]:
    """Register and queue a request. `spec` must have its seed (`seeded`); its digest is taken without a drawn one."""
    deadline_ms = _deadline_ms(item.deadline_s, config)
    packed = spec.seeded().pack()
    if len(packed) > config.max_spec_bytes:
        raise InvalidRequest(f"the request takes {len(packed)} bytes; the limit is {config.max_spec_bytes}")
    ckey = keys.conversation_key(item.owner, item.conversation) if item.conversation else ""
    idem = keys.idempotency(item.owner, item.idempotency_key) if item.idempotency_key is not None else ""
    content = [spec.digest(), item.model, item.priority, item.conversation or "", item.group]
    digest = hashlib.sha256("\0".join(content).encode()).hexdigest()
    affinity = item.affinity if item.affinity is not None else ckey or spec.affinity()
    job = rqrecord.fields(item.request, priority=item.priority, conversation=item.conversation, config=config)
    who = [item.request, item.owner, item.model, item.priority, ckey, item.conversation or "", affinity, item.group]
    arguments = [*who, packed, digest, idem, deadline_ms, *job]

    def parse(reply: Any) -> Submitted:
        return _submitted(reply, item)

    return Call("submit", [keys.request(item.request)], arguments, parse)


def _deadline_ms(deadline_s: float | None, config: PoolConfig) -> int:
    seconds = config.default_deadline_s if deadline_s is None else deadline_s
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds <= config.max_deadline_s:
        raise InvalidRequest(f"deadline must be above 0 and at most {config.max_deadline_s:g} s, got {seconds!r}")
    return max(1, round(seconds * 1000))


def _submitted(reply: Any, item: Submission) -> Submitted:
    what: Any
    what, *rest = [part.decode() if isinstance(part, bytes) else part for part in reply]
    if what in ("placed", "boxed", "dup"):
        return Submitted(rest[0], what)
    if what == "full":
        where = {
            "pool": "the pool holds",
            "batch": "the pool holds, of batch priority,",
            "conversation": f"conversation {item.conversation} has, behind its active turn,",
        }[rest[0]]
        raise QueueFull(f"{where} {rest[1]} open requests, the most it may: try again later")
    if what == "gone":
        raise Gone(f"idempotency key {item.idempotency_key!r} was used by request {rest[0]}, whose record has expired")
    if what == "unknown_model":
        raise NotFound(f"no worker of this pool has ever run model {item.model!r}")
    raise Conflict(
        {
            "id": f"request id {item.request} is taken by another request",
            "key": f"idempotency key {item.idempotency_key!r} was used with a different request",
            "tokenizer": f"conversation {item.conversation} has another tokenizer than {item.model!r}",
        }[rest[0]]
    )


def cancel(request: str, owner: str, reason: str) -> Call[Cancelled]:
    """Cancel; the four answers are `cancelled` (it waited), `cancelling` (it runs), `ended` before, and `NotFound`."""
    keys.check_id(request, "request id")

    def parse(reply: Any) -> Cancelled:
        what = reply[0].decode()
        if what == "unknown":
            raise NotFound(f"no request {request}")
        answers: dict[str, Cancelled] = {"cancelled": "cancelled", "flagged": "cancelling", "ended": "ended"}
        return answers[what]

    return Call("cancel", [keys.request(request)], [request, owner, (reason or "cancelled")[:500]], parse)


@dataclass(frozen=True, kw_only=True)
class Record:
    """What the pool knows of a request, from `prism:r:R`."""

    request: str
    owner: str
    state: str
    reason: str
    epoch: int
    ev: int
    n: int
    attempt: int
    priority: str
    conversation: str
    model: str
    worker: str
    submitted_ms: int
    deadline_ms: int
    ended_ms: int
    text: str
    token_ids: list[int]
    usage: dict[str, int]


RECORD_FIELDS = (
    *("owner", "state", "reason", "epoch", "ev", "n", "attempt", "priority", "conversation", "model", "worker"),
    *("submitted", "deadline", "ended", "text", "ids", "usage"),
)


def read_record(request: str, owner: str, values: Sequence[bytes | None]) -> Record:
    """The record from `HMGET RECORD_FIELDS`; `NotFound` if there is none or it belongs to another owner ('' may see
    all)."""
    found = dict(zip(RECORD_FIELDS, values, strict=True))
    its_owner = found["owner"]
    if its_owner is None or (owner and its_owner.decode() != owner):
        raise NotFound(f"no request {request}")
    texts = {name: (value or b"").decode() for name, value in found.items() if name not in ("ids", "usage")}
    numbers = {
        name: int(texts[name] or 0) for name in ("epoch", "ev", "n", "attempt", "submitted", "deadline", "ended")
    }
    return Record(
        request=request,
        owner=texts["owner"],
        state=texts["state"],
        reason=texts["reason"],
        epoch=numbers["epoch"],
        ev=numbers["ev"],
        n=numbers["n"],
        attempt=numbers["attempt"],
        priority=texts["priority"],
        conversation=texts["conversation"],
        model=texts["model"],
        worker=texts["worker"],
        submitted_ms=numbers["submitted"],
        deadline_ms=numbers["deadline"],
        ended_ms=numbers["ended"],
        text=texts["text"],
        token_ids=codec.unpack(found["ids"]) if found["ids"] else [],
        usage=codec.unpack(found["usage"]) if found["usage"] else {},
    )
