"""Names: every key of the pool, and the ids they are made of.

Kept: a foreign id can never reach another owner's keys, because the owner is hashed into conversation and idempotency
keys; ids are checked before they become part of a name. The Lua prelude spells the same names; a test compares the two.
"""

from __future__ import annotations

import hashlib
import os
import re
import time

from prism_core.errors import InvalidRequest

__all__ = [
    "BATCHES",
    "BOOT",
    "DRAINING",
    "FILES",
    "LIVE",
    "LOCAL_OWNER",
    "MODELS",
    "NAMES",
    "PRIORITIES",
    "PRISM",
    "REAPING",
    "RQ",
    "RQ_QUEUES",
    "STATS",
    "WORKERS",
    "batch",
    "check_id",
    "conversation",
    "conversation_key",
    "conversation_part",
    "home_queues",
    "idempotency",
    "log",
    "model_tag",
    "new_ulid",
    "open_queue",
    "owner_of",
    "request",
    "rq_job",
    "worker",
]

PRISM = "prism:"
RQ = "prism:rq"
"""What `RQ_KEY_PREFIX` must be in every process that imports rq."""

BOOT = "prism:boot"
LIVE = "prism:live"
WORKERS = "prism:ws"
DRAINING = "prism:draining"
REAPING = "prism:reaping"
STATS = "prism:stats"
MODELS = "prism:models"
NAMES = "prism:names"
BATCHES = "prism:batches"
FILES = "prism:files"
RQ_QUEUES = RQ + ":queues"

PRIORITIES = ("interactive", "background", "batch")
LOCAL_OWNER = "local"

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def check_id(value: object, what: str) -> str:
    """`value` if it may be part of a key, else `InvalidRequest` naming `what`."""
    if not isinstance(value, str) or not _ID.match(value):
        raise InvalidRequest(f"{what} must be 1 to 64 letters, digits, '_' or '-', got {str(value)[:80]!r}")
    return value


def new_ulid() -> str:
    """A new ULID: 48 bits of milliseconds, 80 random bits, 26 characters that sort by time."""
    number = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10), "big")
    return "".join(_CROCKFORD[number >> shift & 31] for shift in range(125, -1, -5))


def owner_of(api_key: str | None) -> str:
    """The owner that an API key stands for; None is the local user. The key itself is stored nowhere."""
    if api_key is None:
        return LOCAL_OWNER
    return hashlib.sha256(api_key.encode()).hexdigest()[:32]


def model_tag(identity: str) -> str:
    """The short name of a model identity in queue names; `any` for a request that takes whatever the pool runs."""
    return hashlib.sha1(identity.encode()).hexdigest()[:16] if identity else "any"


def conversation_key(owner: str, name: str) -> str:
    """What stands for conversation `name` of `owner` in keys."""
    return hashlib.sha256(f"{owner}\0{check_id(name, 'conversation')}".encode()).hexdigest()[:32]


def request(request_id: str) -> str:
    """Record of a request; also the name of its live channel."""
    return f"{PRISM}r:{request_id}"


def end(request_id: str) -> str:
    """Channel on which the state of a request is told once it has ended, for those who only wait for that."""
    return f"{PRISM}r:{request_id}:end"


def log(request_id: str) -> str:
    return f"{PRISM}r:{request_id}:log"


def worker(name: str) -> str:
    """Lease of a worker; its other keys hang below it (`:run`, `:bell`, `:stat`)."""
    return f"{PRISM}w:{name}"


def conversation(ckey: str) -> str:
    return f"{PRISM}c:{ckey}"


def conversation_part(ckey: str, part: str) -> str:
    """`part` is one of pin, act, box, hist, info."""
    return f"{PRISM}c:{ckey}:{part}"


def idempotency(owner: str, key: str) -> str:
    if not isinstance(key, str) or not 1 <= len(key) <= 255:
        raise InvalidRequest("idempotency_key must be a string of 1 to 255 characters")
    return f"{PRISM}idem:" + hashlib.sha256(f"{owner}\0{key}".encode()).hexdigest()


def batch(name: str) -> str:
    """Lease and counts of a batch."""
    return f"{PRISM}b:{check_id(name, 'batch id')}"


def open_queue(identity: str, priority: str) -> str:
    return f"{RQ}:queue:open.{model_tag(identity)}.{priority}"


def home_queues(name: str) -> tuple[str, str, str]:
    """Home queues of a worker for interactive, background and batch turns."""
    base = f"{RQ}:queue:w.{name}"
    return base, base + ".bg", base + ".batch"


def rq_job(request_id: str) -> str:
    return f"{RQ}:job:{request_id}"
