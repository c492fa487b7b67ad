"""Every number of the pool protocol that a test or an operator may want to change, in one validated record.

Kept: all processes of a pool must use equal values (the scripts are composed from them). A field out of range is
refused at construction with its name, limit and value. Durations carry their unit in the name.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from prism_core.errors import InvalidRequest

__all__ = ["PoolConfig"]

_DAY_S = 86_400


@dataclass(frozen=True)
class PoolConfig:
    """Times, limits and caps of one pool; the defaults are the protocol's."""

    lease_ms: int = 5_000
    """Life of a worker's lease without a beat. A dead host is noticed after this, plus one sweep."""
    beat_ms: int = 1_000
    """Time between two beats of a healthy worker; at most half of the lease."""
    bell_wait_ms: int = 1_000
    """Longest sleep of an idle worker at its bell, so a lost bell costs at most this."""
    sweep_ms: int = 500
    """Time between two sweeps (expired turns, lapsed leases) of a supervisor."""
    audit_ms: int = 30_000
    """Time between two audits, which place again what is queued but in no list."""
    audit_step: int = 200
    """Requests that one audit call looks at, so no script runs long."""
    reap_step: int = 200
    """Requests that one reap call rescues or places again."""
    pin_s: int = 1_800
    """Idle time after which a conversation forgets its worker."""
    conversation_s: int = 7 * _DAY_S
    """Idle time after which a transcript is forgotten."""
    result_s: int = _DAY_S
    """Time for which the record of an ended request is kept."""
    log_s: int = 3_600
    """Time for which the event log of an ended request is kept."""
    idempotency_s: int = 7 * _DAY_S
    """Time after the end for which an idempotency key is remembered; past `result_s` its use is refused as gone."""
    default_deadline_s: float = float(_DAY_S)
    """Deadline of a request that names none, so nothing stays parked for ever."""
    max_deadline_s: float = 7.0 * _DAY_S
    """Longest deadline that a request may ask for."""
    overdue_ms: int = 5_000
    """A running turn this far past its deadline is ended by the sweep, in case its worker hangs."""
    max_open: int = 10_000
    """Open requests (queued, boxed or running) of the whole pool."""
    max_open_batch: int = 5_000
    """Of these, requests of batch priority: interactive turns always find room."""
    max_box: int = 64
    """Turns that may wait behind the active one of a conversation."""
    max_spec_bytes: int = 8 << 20
    """Longest packed request specification."""
    barren_takes: int = 3
    """Takes without a new token after which a turn that keeps losing its worker fails."""
    total_takes: int = 20
    """Takes after which such a turn fails even though tokens came."""
    take_step: int = 100
    """Dead or expired queue entries that one take call clears before it answers."""
    preempt_ms: int = 1_000
    """For how long one batch worker is the one asked to yield to an open interactive turn."""
    silence_ms: int = 700
    """Silence on a stream after which its reader looks at the log itself (0.5 to 1 s by the protocol)."""
    reader_outage_s: float = 120.0
    """Longest outage of the broker that a reader sits out."""
    reader_queue: int = 256
    """Events buffered for one reader; beyond it the reader falls back to the log at its own pace."""
    read_page: int = 512
    """Log entries read in one XRANGE."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            number = (int, float) if field.type == "float" else (int,)
            if isinstance(value, bool) or not isinstance(value, number) or not value > 0 or value == float("inf"):
                raise InvalidRequest(f"pool config: {field.name} must be a positive {field.type}, got {value!r}")
        for short, long in _ORDERED:
            if getattr(self, short) > getattr(self, long):
                raise InvalidRequest(
                    f"pool config: {short} ({getattr(self, short)}) must not exceed {long} ({getattr(self, long)})"
                )
        if self.beat_ms * 2 > self.lease_ms:
            raise InvalidRequest(
                f"pool config: beat_ms ({self.beat_ms}) must be at most half of lease_ms ({self.lease_ms})"
            )


_ORDERED = (
    ("default_deadline_s", "max_deadline_s"),
    ("max_open_batch", "max_open"),
    ("log_s", "result_s"),
    ("result_s", "idempotency_s"),
    ("max_deadline_s", "conversation_s"),
    ("barren_takes", "total_takes"),
)
