"""The end of a turn: finish it, or hand it back, once every event before that is stored.

Invariant: nothing is written for a turn that the broker has given to somebody else, and an absent broker is waited for:
every verb used here survives being sent again. Only a worker that must leave at once stops waiting, for a rescue.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from broker.answers import Claim, Outcome
from broker.errors import BrokerUnavailable
from broker.failures import translated
from broker.store import WorkerStore
from broker.transcript import TurnCommit
from prism_core.errors import PrismError
from workers.cancellation import Progress
from workers.flusher import SLICE_S, Flusher

MAX_REASON_CHARS = 500

State = Literal["done", "failed", "cancelled", "expired"]
Disposition = Literal["ended", "handed_back", "lost"]
Handover = Literal["preempted", "drain"]
T = TypeVar("T")


class EventsRefused(PrismError):
    """The broker refuses this turn's events for a reason that sending them again does not heal."""


@dataclass
class Ending:
    """What `finish` will be told."""

    state: State
    reason: str
    ids: list[int] = field(default_factory=list)
    text: str = ""
    turn: TurnCommit | None = None


class Closer:
    """Brings one claim to its end. Used on the loop's thread, like the flusher."""

    def __init__(
        self,
        store: WorkerStore,
        claim: Claim,
        flusher: Flusher,
        progress: Progress,
        abandoned: Callable[[], bool],
    ) -> None:
        """`abandoned`: the worker must leave at once, so an absent broker is not waited for any longer."""
        self._store, self._claim, self._flusher = store, claim, flusher
        self._progress, self._abandoned = progress, abandoned

    def finish(self, ending: Ending, usage: Callable[[], dict[str, int]]) -> Disposition:
        """The one commit point. `usage` is asked when all events are stored."""
        while self._events_are_stored():
            outcome = self._try(lambda: self._finish(ending, usage()))
            if outcome is None:
                if self._abandoned():
                    break
                continue
            if outcome.status == "behind":
                self._flusher.resend(outcome.stored_ev)
                continue
            return "ended" if outcome.status in ("ok", "again") else "lost"
        return "lost"

    def hand_back(self, why: Handover) -> Disposition:
        """To the front of its queue, to go on after the last stored token."""
        while self._events_are_stored():
            outcome = self._try(lambda: self._store.give_back(self._claim.request, self._claim.epoch, why))
            if outcome is not None:
                return "handed_back" if outcome.status in ("ok", "again") else "lost"
            if self._abandoned():
                break
        return "lost"

    def _finish(self, ending: Ending, usage: dict[str, int]) -> Outcome:
        return self._store.finish(
            self._claim.request,
            self._claim.epoch,
            self._flusher.ev + 1,
            state=ending.state,
            reason=ending.reason[:MAX_REASON_CHARS],
            n=len(ending.ids),
            usage=usage,
            ids=ending.ids,
            text=ending.text,
            turn=ending.turn,
        )

    def _events_are_stored(self) -> bool:
        """Waits for that; False if the turn is not ours any more, or nobody can wait."""
        while not self._flusher.flush(SLICE_S):
            self._progress.stamp()
            if self._abandoned():
                return False
        return not self._flusher.is_dead

    def _try(self, call: Callable[[], T]) -> T | None:
        """One call; None, a little later, if the broker is away."""
        try:
            return call()
        except BrokerUnavailable:
            self._progress.stamp()
            time.sleep(SLICE_S)
            return None


def patiently(call: Callable[[], T], check: Callable[[], None]) -> T:
    """A call that waits for an absent broker for as long as `check`, which may raise, lets it."""
    while True:
        try:
            with translated():
                return call()
        except BrokerUnavailable:
            check()
            time.sleep(SLICE_S)
