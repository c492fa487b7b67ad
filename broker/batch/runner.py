"""The loop that runs a batch: look, record, feed.

Kept: at most a window of lines is in the pool; a line is recorded (written, synced, counted) as soon as it is seen to
have ended, and is never submitted after that; a line that was submitted by an earlier runner is found again by its id,
whatever has become of it. An absent broker holds the loop up and ends nothing. Memory holds the window's lines only.
Not promised: that a line which ended unseen is generated once. If the runner is away until the pool has forgotten the
answer (`PoolConfig.result_s`), the line runs again: it was never recorded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from broker.batch.errors import BadFile, BadLine, Problem
from broker.batch.lanes import Lanes
from broker.batch.lease import LEASE_MS, BatchLease
from broker.batch.ledger import DONE, FAILED, OPEN, Entry, Ledger
from broker.batch.lines import Line, read_line
from broker.batch.outcome import Ids, answered, refused, unanswered
from broker.batch.plan import Plan
from broker.batch.pool import LinePool
from broker.batch.totals import Progress, Speed
from broker.errors import BrokerUnavailable, InvalidRequest, NotFound, QueueFull, StreamLost
from broker.events import TERMINAL
from broker.gateway.config import GatewayConfig
from broker.gateway.errors import of_error

__all__ = ["Ended", "Runner"]

Ended = Literal["completed", "cancelled", "expired", "stopped"]

FASTEST_S, EACH_S = 0.01, 0.0001
SLOWEST_S = 0.2
"""Pauses between two looks: short while lines end, plus a little for each line to look at; longer while none ends."""
RENEW_S = 1.0
AWAY_S = 0.5
STOP_WAIT_S = 30.0
"""How long cancelled lines may take to end before they are given up."""
REST_LINES = 256
"""Lines written at once when the rest becomes errors."""
LATE_S = 10.0
"""The pool's deadline of a line lies this far behind the batch's end, which is the runner's to tell."""
BROKER = "the broker"

_WHY = {
    "cancelled": ("batch_cancelled", "This request was not run to its end: the batch was cancelled."),
    "expired": ("batch_expired", "This request was not run to its end before the batch's time was over."),
}
_log = logging.getLogger("prism.batch")


@dataclass
class _Flying:
    """A line in the pool."""

    line: Line
    index: int
    attempt: int
    requests: list[str]
    group: str
    tokens: int = 0
    submitted: int = 0
    """How many of its requests have been."""


class Runner:
    """One run of one batch, on one thread."""

    def __init__(
        self,
        *,
        plan: Plan,
        source: int,
        ledger: Ledger,
        pool: LinePool,
        lease: BatchLease,
        config: GatewayConfig,
        window: int,
        expires_at: float | None = None,
        stop: threading.Event | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        report: Callable[[Progress], None] = lambda progress: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """source: descriptor of the input. expires_at: Unix seconds. stop: leaves the batch to be resumed. cancelled:
        asked each second, beside the lease's own flag. report: told how far it is, each second."""
        self._plan, self._source, self._ledger, self._pool, self._lease = plan, source, ledger, pool, lease
        self._config, self._expires_at, self._clock, self._wall = config, expires_at, clock, wall
        self._stop = stop or threading.Event()
        self._cancelled, self._report = cancelled, report
        self._facts = os.fstat(source)
        state = ledger.state
        self._lanes = Lanes(plan, lambda index: state[index] == OPEN, ledger.totals.left, window)
        self._window = window
        self._flying: dict[int, _Flying] = {}
        self._speed = Speed(clock)
        self._renewed = clock()
        self._renew_due = 0.0
        self._pause = FASTEST_S
        self._waiting_for = ""
        self._give_up_by: float | None = None

    def run(self) -> Ended:
        """Until every line is recorded, or told to stop. `LeaseLost`, `FilesFailed`, `BadFile` (the input changed)."""
        why: Literal["cancelled", "expired"] | None = None
        while self._ledger.totals.left:
            if self._stop.is_set():
                return "stopped"
            try:
                why = why or self._turn()
                if why is not None:
                    self._give_up(why)
            except BrokerUnavailable as error:
                self._wait_for_broker(error)
        return why or "completed"

    def progress(self) -> Progress:
        """How far it is."""
        totals = self._ledger.totals
        tokens = totals.completion_tokens + sum(flying.tokens for flying in self._flying.values())
        lines_per_s, tokens_per_s = self._speed.look(totals.done + totals.failed, tokens)
        eta = totals.left / lines_per_s if lines_per_s > 0 else None
        return Progress(totals, len(self._flying), tokens, tokens_per_s, lines_per_s, eta, self._waiting_for)

    # --- one turn ------------------------------------------------------------------------------------------------

    def _turn(self) -> Literal["cancelled", "expired"] | None:
        self._renew_if_due("running")
        if self._lease.cancelled or self._cancelled():
            return "cancelled"
        if self._expires_at is not None and self._wall() >= self._expires_at:
            return "expired"
        ended = self._look()
        self._waiting_for = ""
        self._feed()
        fastest = FASTEST_S + len(self._flying) * EACH_S
        self._pause = fastest if ended else min(SLOWEST_S, max(fastest, self._pause * 1.5))
        if self._ledger.totals.left:
            self._stop.wait(self._pause)
        return None

    def _renew_if_due(self, state: str) -> None:
        if self._clock() >= self._renew_due:
            self._check_input()
            workers = self._pool.workers()
            self._lanes.serve(workers)
            if not workers:
                self._waiting_for = "a worker"
            elif self._waiting_for == BROKER:
                self._waiting_for = ""
            self._tell(state)

    def _tell(self, state: str) -> None:
        progress = self.progress()
        asked = self._clock()
        self._lease.renew({"state": state, "window": self._window, **progress.facts()})
        self._renewed, self._renew_due = asked, asked + RENEW_S
        self._report(progress)

    def _wait_for_broker(self, error: BrokerUnavailable) -> None:
        if self._waiting_for != BROKER:
            self._waiting_for = BROKER
            _log.warning("batch waits for the broker", extra={"batch": self._plan.batch, "error": str(error)})
        self._report(self.progress())
        self._stop.wait(AWAY_S)

    def _check_input(self) -> None:
        now = os.fstat(self._source)
        if (now.st_size, now.st_mtime_ns) != (self._facts.st_size, self._facts.st_mtime_ns):
            raise BadFile([Problem(None, "input_changed", "the input file was changed while the batch was running")])

    def _look(self) -> int:
        """Records the lines that have ended; returns how many."""
        flying = list(self._flying.values())
        requests = [request for one in flying for request in one.requests[: one.submitted]]
        seen = iter(self._pool.look(requests) if requests else ())
        ended: list[Entry] = []
        for one in flying:
            states = [next(seen) for _ in range(one.submitted)]
            one.tokens = sum(state[1] for state in states if state is not None)
            if None in states:
                # The broker lost it, or has forgotten it: it was not recorded, so it runs again under the same name.
                one.submitted = states.index(None)
            elif one.submitted == len(one.requests) and all(state and state[0] in TERMINAL for state in states):
                entry = self._entry_of(one)
                if entry is not None:
                    ended.append(entry)
        self._record(ended)
        return len(ended)

    def _entry_of(self, one: _Flying) -> Entry | None:
        """The line of output of an ended line; None if its answer is not to be had and it has to run again."""
        ids = Ids(self._plan.line_id(one.index, one.attempt), one.requests)
        whole_log = one.line.asked.specs[0].logprobs is not None
        try:
            ends = [self._pool.end_of(request, whole_log=whole_log) for request in one.requests]
            name = one.line.asked.model or self._pool.name_of(ends[0][0])
        except NotFound:
            one.submitted = 0
            return None
        except StreamLost:
            # The answer is there, but not its log-probabilities: another try, under another name.
            one.attempt += 1
            one.requests = self._plan.requests(one.index, one.attempt, len(one.requests))
            one.submitted = 0
            return None
        try:
            return answered(one.line, one.index, one.attempt, name, [events for _, events in ends], ids)
        except Exception as error:
            # One answer that nobody can make sense of must not hold up all others.
            _log.error("line failed", extra={"request": one.requests[0], "error": type(error).__name__})
            return refused(one.line.custom_id, one.index, one.attempt, of_error(error), ids)

    def _record(self, entries: list[Entry]) -> None:
        if not entries:
            return
        if self._clock() - self._renewed > LEASE_MS / 2000:
            # This process stood still: is the batch still ours?
            self._tell("running")
        self._ledger.record(entries)
        for entry in entries:
            one = self._flying.pop(entry.index, None)
            self._lanes.ended(entry.index)
            with contextlib.suppress(BrokerUnavailable):  # then they go by themselves, later
                for request in one.requests[: one.submitted] if one is not None else ():
                    self._pool.forget(request)

    # --- feeding -------------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Submits until the window is full, the pool is, or no line waits."""
        try:
            for one in list(self._flying.values()):
                self._submit(one)
            while (found := self._lanes.next()) is not None:
                index, group = found
                try:
                    one = self._flying[index] = self._opened(index, group)
                except BadLine as error:
                    raise BadFile([error.at(index + 1)]) from error
                self._submit(one)
        except QueueFull:
            self._waiting_for = "room in the queue"

    def _opened(self, index: int, group: str) -> _Flying:
        data = self._plan.read(self._source, index)
        line = read_line(data, self._config, endpoint=self._plan.endpoint, model=self._plan.model)
        attempt = self._ledger.attempts[index] + 1
        requests = self._plan.requests(index, attempt, len(line.asked.specs))
        return _Flying(line, index, attempt, requests, group)

    def _submit(self, one: _Flying) -> None:
        """Submits what has not been of a line. What the pool refuses for good is recorded as the line's error."""
        left = float("inf") if self._expires_at is None else self._expires_at - self._wall() + LATE_S
        for at in range(one.submitted, len(one.requests)):
            model = one.line.asked.model
            spec = one.line.asked.specs[at]
            try:
                self._pool.submit(one.requests[at], spec, model=model, group=one.group, deadline_s=left)
            except NotFound:
                # It was known when the batch began: the pool lost its data, and no worker has come back yet.
                self._waiting_for = f"a worker of {model}"
                return
            except InvalidRequest as error:
                ids = Ids(self._plan.line_id(one.index, one.attempt), one.requests)
                self._record([refused(one.line.custom_id, one.index, one.attempt, of_error(error), ids)])
                return
            one.submitted = at + 1

    # --- the end before the end ----------------------------------------------------------------------------------

    def _give_up(self, why: Literal["cancelled", "expired"]) -> None:
        """Cancels what is in the pool, keeps what had ended, and makes the rest errors."""
        code, message = _WHY[why]
        state = "cancelling" if why == "cancelled" else "finalizing"
        if self._give_up_by is None:
            self._find_strays()
            self._give_up_by = self._clock() + STOP_WAIT_S
        for one in self._flying.values():
            for request in one.requests[: one.submitted]:
                self._cancel(request, message)
        while self._flying and self._clock() < self._give_up_by:
            self._renew_if_due(state)
            self._look_last(code, message)
            if self._stop.is_set():
                return
            if self._flying:
                self._stop.wait(FASTEST_S)
        self._rest(code, message, state)

    def _find_strays(self) -> None:
        """What an earlier runner submitted and did not live to record is in the pool too."""
        recorded, flying = self._ledger.state, self._flying
        waiting = [index for index in self._plan.order if recorded[index] == OPEN and index not in flying]
        for at in range(0, len(waiting), REST_LINES):
            some = waiting[at : at + REST_LINES]
            names = [self._plan.requests(index, self._ledger.attempts[index] + 1, 1)[0] for index in some]
            for index, seen in zip(some, self._pool.look(names), strict=True):
                if seen is not None:
                    one = flying[index] = self._opened(index, "")
                    one.submitted = len(one.requests)

    def _cancel(self, request: str, message: str) -> None:
        with contextlib.suppress(NotFound):
            self._pool.cancel(request, message)

    def _look_last(self, code: str, message: str) -> None:
        """Records the flying lines that are done; those that were cut are left to the rest."""
        flying = list(self._flying.values())
        for one in flying:
            states = self._pool.look(one.requests[: one.submitted]) if one.submitted else []
            if any(state is not None and state[0] not in TERMINAL for state in states):
                continue
            cut = one.submitted < len(one.requests) or any(
                state is None or state[0] in ("cancelled", "expired") for state in states
            )
            entry = None if cut else self._entry_of(one)
            if entry is None:
                ids = Ids(self._plan.line_id(one.index, one.attempt), one.requests)
                entry = unanswered(one.line.custom_id, one.index, one.attempt, code, message, ids)
            self._record([entry])

    def _rest(self, code: str, message: str, state: str) -> None:
        """Makes every line that is not recorded an error."""
        entries: list[Entry] = []
        recorded = self._ledger.state
        for index in range(self._plan.count):
            if recorded[index] in (DONE, FAILED):
                continue
            one = self._flying.get(index) or self._opened(index, "")
            ids = Ids(self._plan.line_id(index, one.attempt), one.requests)
            entries.append(unanswered(one.line.custom_id, index, one.attempt, code, message, ids))
            if len(entries) >= REST_LINES:
                self._renew_if_due(state)
                self._record(entries)
                entries = []
        self._record(entries)
