"""Where the time of a request goes, in phases that never overlap.

Measured with `time.perf_counter`, not with the Runtime's clock, so that measuring changes no deadline. Time between
phases (validation, checks outside of them, the commit) is counted nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from time import perf_counter


@dataclass(slots=True)
class Timings:
    """Seconds of one request by phase; `generate` sets them all anew, also when the request fails.

    `completion_snapshot` includes the snapshots of `save_at`; `recovery` includes giving back the sampler's state.
    """

    sampler_copy: float = 0.0
    rollback_snapshot: float = 0.0
    prefix_preparation: float = 0.0
    prefill_ingestion: float = 0.0
    prefill_evaluation: float = 0.0
    decode_evaluation: float = 0.0
    sampling: float = 0.0
    callback: float = 0.0
    completion_snapshot: float = 0.0
    recovery: float = 0.0
    _phase: str | None = field(default=None, init=False, repr=False, compare=False)
    _since: float = field(default=0.0, init=False, repr=False, compare=False)

    def begin(self) -> None:
        """Sets every phase to zero."""
        for phase in fields(self):
            setattr(self, phase.name, phase.default)

    def enter(self, phase: str | None) -> None:
        """Ends the present phase and starts `phase`, or none."""
        now = perf_counter()
        if self._phase is not None:
            setattr(self, self._phase, getattr(self, self._phase) + now - self._since)
        self._phase, self._since = phase, now


class Untimed(Timings):
    """For a request that nobody asked to be timed: looking at a clock after each decode step would cost something."""

    def begin(self) -> None:
        """Nothing."""

    def enter(self, phase: str | None) -> None:
        """Nothing."""
