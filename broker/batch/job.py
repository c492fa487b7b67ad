"""One batch from its input file to its finished output, whoever asks: the command line or a gateway.

    lock the plan -> take the lease -> check every line (or find the plan of an earlier run) -> run -> name the files

Kept: each step may be cut off at any point and begun again; a plan that exists is never made anew, so a line keeps its
request for ever. The lease is renewed in all steps. Errors of the input come before anything is run.
"""

from __future__ import annotations

import contextlib
import glob
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from broker.batch.errors import BadFile, Busy, FilesFailed, Interrupted, Problem
from broker.batch.lease import BatchLease
from broker.batch.ledger import Ledger, part_of
from broker.batch.lock import BatchLock
from broker.batch.plan import Plan, PlanUnreadable
from broker.batch.pool import LinePool
from broker.batch.runner import Ended, Runner
from broker.batch.totals import Progress, Totals, facts_of
from broker.batch.validate import digest, validate
from broker.errors import BrokerUnavailable
from broker.gateway.config import GatewayConfig

__all__ = ["WINDOW", "Job", "JobFiles", "JobResult"]

WINDOW = 4
"""Lines in the pool for each worker."""
RENEW_S = 1.0
GENTLE_S = 0.0002
"""A real pause, if short: without one a thread that computes keeps the interpreter for 5 ms at a time."""

Step = Literal["validating", "running", "finishing"]


@dataclass(frozen=True)
class JobFiles:
    """Where a batch's files are. `output` and `errors` get their names when it ends; until then they are `.part`."""

    input: Path
    output: Path
    errors: Path
    plan: Path


@dataclass(frozen=True)
class JobResult:
    """How a batch ended."""

    batch: str
    ended: Ended
    totals: Totals


@dataclass
class Job:
    """One batch, and how it is to be run. `run` may be called once."""

    files: JobFiles
    pool: LinePool
    batch: str
    """Id of a batch that has no plan yet."""
    config: GatewayConfig = field(default_factory=GatewayConfig)
    endpoint: str = ""
    model: str = ""
    window: int = WINDOW
    ordered: bool = False
    """Sort the output by the input's lines at the end."""
    retry_failed: bool = False
    """Run failed lines again."""
    gentle: bool = False
    """Let the process's other threads run all the time: it is a gateway."""
    afresh: bool = False
    """Nothing is recorded yet, so a plan that is there counts for nothing."""
    expires_at: float | None = None
    """Unix seconds."""
    stop: threading.Event = field(default_factory=threading.Event)
    cancelled: Callable[[], bool] = lambda: False
    on_step: Callable[[Step, Plan | None], None] = lambda step, plan: None
    on_check: Callable[[int, int], None] = lambda done, total: None
    """Bytes of the input checked, and in all."""
    on_progress: Callable[[Progress], None] = lambda progress: None
    _totals: Totals | None = None

    def run(self, lock: BatchLock | None = None) -> JobResult:
        """To the end. `lock`: the one of the plan, if the caller has taken it; it is closed here in any case.

        `BadFile`: nothing of it is run. `Interrupted`: told to stop; begin again later. `Busy`, `HeldElsewhere`,
        `LeaseLost`, `FilesFailed`; `BrokerUnavailable` only before the first line.
        """
        lock = lock or BatchLock(self.files.plan)
        try:
            self._clear_away()
            known = self._known_plan()
            lease = BatchLease(self.pool.redis, self.pool.config, known.batch if known else self.batch, self.pool.owner)
            lease.take({"state": "validating"}, forget_cancel=self.retry_failed)
            return self._under(lease, known)
        except BadFile:
            self._forget_empty()
            raise
        except OSError as error:
            raise FilesFailed(f"{error.filename or self.files.output}: {error.strerror}") from error
        finally:
            lock.close()

    def _clear_away(self) -> None:
        """Removes what a crash in the middle of a rename left, and the plan of a run that is not gone on with."""
        if self.afresh:
            if self._has_begun():
                raise Busy(f"{self.files.output} was begun by another run meanwhile")
            os.truncate(self.files.plan, 0)
        for path in (self.files.output, self.files.errors):
            for leftover in path.parent.glob(f"{glob.escape(path.name)}.*.tmp"):
                leftover.unlink(missing_ok=True)

    def _known_plan(self) -> Plan | None:
        """The plan of an earlier run; None if it did not come so far."""
        if not self.files.plan.stat().st_size:
            return None
        try:
            return Plan.load(self.files.plan)
        except PlanUnreadable:
            if self._has_begun():
                raise
            return None  # the earlier run died while it wrote it, before its first line

    def _has_begun(self) -> bool:
        """Something is recorded."""
        paths = [self.files.output, self.files.errors]
        return any(path.exists() and path.stat().st_size for path in [*paths, *map(part_of, paths)])

    def _forget_empty(self) -> None:
        """Of a batch that never began, nothing stays."""
        if not self._has_begun():
            for path in (part_of(self.files.output), part_of(self.files.errors), self.files.plan):
                path.unlink(missing_ok=True)

    def _under(self, lease: BatchLease, plan: Plan | None) -> JobResult:
        last = "stopped"
        try:
            if plan is None:
                plan = self._check(lease)
            else:
                self._same_input(plan, lease)
            self.on_step("running", plan)
            result = self._run(plan, lease)
            last = result.ended
            return result
        except BadFile:
            last = "failed"
            raise
        finally:
            with contextlib.suppress(BrokerUnavailable):  # it lapses by itself
                lease.release({"state": last, "running": 0, **(facts_of(self._totals) if self._totals else {})})

    def _run(self, plan: Plan, lease: BatchLease) -> JobResult:
        ledger = Ledger(plan, self.files.output, self.files.errors)
        self._totals = ledger.totals
        try:
            if self.retry_failed:
                ledger.retry_failed()
            ended = self._loop(plan, lease, ledger) if ledger.totals.left else "completed"
            if ended == "stopped":
                raise Interrupted("stopped before its end")
            self.on_step("finishing", plan)
            ledger.finish(ordered=self.ordered)
            return JobResult(plan.batch, ended, ledger.totals)
        finally:
            ledger.close()

    def _loop(self, plan: Plan, lease: BatchLease, ledger: Ledger) -> Ended:
        source = os.open(self.files.input, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if ledger.totals.left == plan.count:
                self._wait_for_models(plan, lease)
            return Runner(
                plan=plan,
                source=source,
                ledger=ledger,
                pool=self.pool,
                lease=lease,
                config=self.config,
                window=self.window,
                expires_at=self.expires_at,
                stop=self.stop,
                cancelled=self.cancelled,
                report=self.on_progress,
            ).run()
        finally:
            os.close(source)

    def _check(self, lease: BatchLease) -> Plan:
        self.on_step("validating", None)
        plan = validate(
            self.files.input,
            self.config,
            endpoint=self.endpoint,
            model=self.model,
            batch=self.batch,
            report=_Watch(self, lease),
        )
        plan.save(self.files.plan)
        return plan

    def _same_input(self, plan: Plan, lease: BatchLease) -> None:
        """The file is the one that the plan was made from; `BadFile` if not."""
        path = self.files.input
        try:
            same = path.stat().st_size == plan.size and digest(path, _Watch(self, lease)) == plan.sha256
        except FileNotFoundError as error:
            raise BadFile([Problem(None, "unreadable", f"cannot read {path}: {error.strerror}")]) from error
        if not same:
            message = f"{path} is not the file that the batch was begun with: it has changed since"
            raise BadFile([Problem(None, "input_changed", message)])

    def _wait_for_models(self, plan: Plan, lease: BatchLease) -> None:
        """`BadFile` if lines name a model that the pool has never run, naming the first; waits for a first worker."""
        watch = _Watch(self, lease)
        wanted = {plan.model: 1} if plan.model else plan.models
        while wanted and not (known := self.pool.models()):
            watch(0, 0)
            if self.cancelled() or lease.cancelled or (self.expires_at and time.time() >= self.expires_at):
                return
            self.stop.wait(RENEW_S / 4)
        problems = [
            Problem(line, "model_not_found", f"the pool has never run model {name!r}; it has {_some(known)}", "model")
            for name, line in sorted(wanted.items(), key=lambda item: item[1])
            if not self.pool.knows(name)
        ]
        if problems:
            raise BadFile(problems)


class _Watch:
    """Renews the lease during long steps, and stops them when asked."""

    def __init__(self, job: Job, lease: BatchLease) -> None:
        self._job, self._lease = job, lease
        self._due = 0.0

    def __call__(self, done: int, total: int) -> None:
        if self._job.stop.is_set():
            raise Interrupted("stopped before its end")
        self._job.on_check(done, total)
        if self._job.gentle:
            time.sleep(GENTLE_S)
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + RENEW_S
            with contextlib.suppress(BrokerUnavailable):  # asked again in a second
                self._lease.renew({"state": "validating"})


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
