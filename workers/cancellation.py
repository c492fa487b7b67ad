"""Why a running turn must stop, read by the Runtime between decoder steps.

Invariant: `is_cancelled` only reads flags in this process: it never raises, never waits and never asks the broker. The
flusher brings the broker's flags here (from append replies, and from a poll when nothing is being appended); signal
handlers and the beat thread bring the others. The first reason that is seen stays the reason.
Not promised: that a turn stops inside a decoder step; a step, or a prefill call of at most 250 ms, is the grain.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable


class Halt(enum.Enum):
    """Why a turn was stopped before its end."""

    CANCELLED = "cancelled"  # the client asked
    FENCED = "fenced"  # the turn runs elsewhere now, or is gone: nothing may be written any more
    PREEMPTED = "preempted"  # an interactive turn waits for this worker
    DRAINED = "drained"  # the worker is going away: the turn is handed back
    BROKEN = "broken"  # the broker refused an event for a reason that resending cannot heal


class Progress:
    """The loop's progress stamp: the beat thread renews the lease only while this is young."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stamped = clock()

    def stamp(self) -> None:
        self._stamped = self._clock()

    def age_s(self) -> float:
        return self._clock() - self._stamped


class TurnCancellation:
    """The Runtime's cancellation object for one turn."""

    def __init__(self, progress: Progress, also: Callable[[], Halt | None] = lambda: None) -> None:
        self._progress = progress
        self._also = also
        self._lock = threading.Lock()
        self._halt: Halt | None = None
        self.detail = ""

    def stop(self, halt: Halt, detail: str = "") -> None:
        """Asks the turn to stop; from any thread. Only the first call counts, except that FENCED always wins."""
        with self._lock:
            if self._halt is None or (halt is Halt.FENCED and self._halt is not Halt.FENCED):
                self._halt, self.detail = halt, detail

    @property
    def halt(self) -> Halt | None:
        return self._halt

    @property
    def is_cancelled(self) -> bool:
        self._progress.stamp()
        if self._halt is None and (outside := self._also()) is not None:
            self.stop(outside)
        return self._halt is not None
