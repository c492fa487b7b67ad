"""The runners inside a gateway: batches made over HTTP, run one thread each.

Kept: a batch that is on the shelf and not over is run by some gateway, whichever one made it; if that one dies, another
takes it up within seconds, from what is recorded. A gateway that is stopped leaves its batches to the others. Owners
take turns: at most `per_owner` batches of one run in a gateway at once, and whose fewest run is served first.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from broker.batch import records
from broker.batch.errors import BadFile, Busy, FilesFailed, HeldElsewhere, Interrupted, LeaseLost
from broker.batch.job import Job, JobFiles, Step
from broker.batch.ledger import part_of
from broker.batch.lock import BatchLock
from broker.batch.plan import Plan
from broker.batch.pool import LinePool
from broker.batch.shelf import KEEP_S, Shelf
from broker.batch.totals import Progress
from broker.config import PoolConfig
from broker.connect import Connection, connect
from broker.errors import BrokerUnavailable, NotFound
from broker.gateway.config import GatewayConfig
from prism_core.errors import PrismError

__all__ = ["BatchService"]

LOOK_S = 1.0
"""Time between two looks for batches that nobody runs."""
RETRY_S = 30.0
"""Pause before a batch is taken up again whose run broke, such as on a full disk."""
SWEEP_S = 3_600.0
PLAN = "plan"
CLAIM_S = 10.0
WRONG_ROOT = "this gateway's file root is not that of the pool's other gateways: set PRISM_FILE_ROOT to the same folder"
CLOSE_S = 10.0
"""How long `close` waits for runs; what still stands then ends with the process, as in a crash."""

_log = logging.getLogger("prism.batch")


@dataclass
class _Run:
    """A batch that this gateway runs."""

    owner: str
    name: str
    stop: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None


class BatchService:
    """One for each gateway process. `start`, then `close`; the rest is for any thread."""

    def __init__(
        self,
        shelf: Shelf,
        config: GatewayConfig,
        url: str | None = None,
        *,
        pool: PoolConfig | None = None,
        home: Path | None = None,
        per_owner: int = 2,
    ) -> None:
        """url, pool, home: the broker, as for `broker.connect`. per_owner: batches of one owner run here at once."""
        self.shelf = shelf
        self._config = config
        self._pool = pool or PoolConfig()
        self._where = (url, home)
        self._most, self._per_owner = config.batch_runners, per_owner
        self._connection: Connection | None = None
        self._runs: dict[str, _Run] = {}
        self._not_before: dict[str, float] = {}
        self._wake = threading.Event()
        self._closing = False
        self._sweep_due = self._claim_due = 0.0
        self.problem = ""
        """Why files and batches are not to be had here, if so."""
        self._thread = threading.Thread(target=self._scout, name="batches", daemon=True)

    def start(self) -> None:
        """Begins to look for batches. `BrokerUnavailable`."""
        self._claim()
        self._thread.start()

    def poke(self) -> None:
        """There is a new batch, or a change to one: look now."""
        self._wake.set()

    def close(self) -> None:
        """Stops all runs in order; they are taken up elsewhere."""
        self._closing = True
        self._wake.set()
        for run in list(self._runs.values()):
            run.stop.set()
        until = time.monotonic() + CLOSE_S
        for thread in [self._thread, *(run.thread for run in list(self._runs.values()) if run.thread is not None)]:
            if thread.is_alive():  # one whose start failed was never alive
                thread.join(max(0.1, until - time.monotonic()))
        if self._connection is not None:
            self._connection.close()

    def cancel(self, owner: str, name: str) -> None:
        """Has a batch cancelled by whoever runs it. `NotFound`."""
        self.shelf.cancel(owner, name)
        self.poke()

    @property
    def running(self) -> int:
        return len(self._runs)

    # --- finding work --------------------------------------------------------------------------------------------

    def _scout(self) -> None:
        while not self._closing:
            try:
                self._look()
            except (OSError, PrismError) as error:
                _log.warning("cannot look for batches", extra={"error": type(error).__name__})
            self._wake.wait(LOOK_S)
            self._wake.clear()

    def _claim(self) -> None:
        """Holds the pool to one folder: a gateway with another one would not see what its clients' others see."""
        if time.monotonic() < self._claim_due:
            return
        self._claim_due = time.monotonic() + CLAIM_S
        pool, own = self.lines(""), self.shelf.name()
        pools = pool.file_root(own, seconds=3 * round(CLAIM_S))
        problem = "" if pools == own else WRONG_ROOT
        if problem != self.problem:
            _log.error(problem or "the file root is that of the pool again", extra={"root": str(self.shelf.root)})
        self.problem = problem

    def _look(self) -> None:
        self._claim()
        if self.problem:
            return
        now = time.monotonic()
        waiting = [one for one in self.shelf.active() if one[1] not in self._runs]
        while waiting and len(self._runs) < self._most and not self._closing:
            here = Counter(run.owner for run in list(self._runs.values()))
            owner, name = min(waiting, key=lambda one: here[one[0]])
            waiting.remove((owner, name))
            if here[owner] < self._per_owner and now >= self._not_before.get(name, 0.0):
                self._take(owner, name)
        if now >= self._sweep_due:
            self._sweep_due = now + SWEEP_S
            self.shelf.sweep(time.time())

    def _take(self, owner: str, name: str) -> None:
        """Begins to run the batch, if nobody else does."""
        try:
            record = self.shelf.batch(owner, name)
        except NotFound:
            return  # it is being made
        if record["status"] in records.FINAL:
            self.shelf.over(name)
            return
        try:
            lock = BatchLock(self.shelf.batch_folder(owner, name) / PLAN)
        except Busy:
            return
        run = self._runs[name] = _Run(owner, name)
        run.thread = threading.Thread(target=self._run, args=(run, lock), name=f"batch-{name}", daemon=True)
        run.thread.start()

    # --- running one ---------------------------------------------------------------------------------------------

    def _run(self, run: _Run, lock: BatchLock) -> None:
        try:
            _Work(self, run).run(lock)
            self._not_before.pop(run.name, None)
        except (Busy, HeldElsewhere, LeaseLost, Interrupted, BrokerUnavailable) as error:
            self._not_before[run.name] = time.monotonic() + LOOK_S
            level = logging.DEBUG if isinstance(error, (Busy, HeldElsewhere)) else logging.INFO
            _log.log(level, "batch left", extra={"batch": run.name, "why": type(error).__name__})
        except Exception as error:
            self._not_before[run.name] = time.monotonic() + RETRY_S
            shown = str(error) if isinstance(error, FilesFailed) else type(error).__name__
            _log.error("batch broke off", extra={"batch": run.name, "error": shown})
        finally:
            lock.close()
            self._runs.pop(run.name, None)
            self.poke()

    def lines(self, owner: str) -> LinePool:
        """The pool, for batches of an owner. `BrokerUnavailable`."""
        if self._connection is None:
            url, home = self._where
            self._connection = connect(url, home=home)
        return LinePool(self._connection.redis, self._pool, owner)

    @property
    def config(self) -> GatewayConfig:
        return self._config


class _Work:
    """One batch being run: keeps its record."""

    def __init__(self, service: BatchService, run: _Run) -> None:
        self._service, self._run, self._shelf = service, run, service.shelf
        self._record = self._shelf.batch(run.owner, run.name)
        output, errors = (self._shelf.path(run.owner, name) for name in self._record["files"])
        source = self._shelf.path(run.owner, self._record["input_file_id"])
        self._files = JobFiles(source, output, errors, self._shelf.batch_folder(run.owner, run.name) / PLAN)

    def run(self, lock: BatchLock) -> None:
        record, owner, name = self._record, self._run.owner, self._run.name
        if record["status"] in records.FINAL:
            self._shelf.over(name)  # its last runner ended it between our look and our lock
            return
        if self._is_cancelled() and not self._files.plan.stat().st_size:
            self._end("cancelled")
            return
        pool = self._service.lines(owner)
        job = Job(
            self._files,
            pool,
            name.removeprefix("batch_"),
            config=self._service.config,
            endpoint=record["endpoint"],
            expires_at=record["expires_at"],
            gentle=True,
            stop=self._run.stop,
            cancelled=self._is_cancelled,
            on_step=self._on_step,
            on_progress=self._on_progress,
        )
        try:
            result = job.run(lock)
        except BadFile as error:
            record["errors"] = records.problems_of(error.problems)
            self._end("failed")
            return
        records.count(record, result.totals)
        self._end(result.ended)

    def _end(self, status: str) -> None:
        """Makes what there is files, and the batch over."""
        self._publish("output_file_id", self._files.output, "output")
        self._publish("error_file_id", self._files.errors, "errors")
        records.step(self._record, status)
        self._save()
        self._shelf.over(self._run.name)
        extra = {"batch": self._run.name, "status": status, "counts": self._record["request_counts"]}
        _log.info("batch ended", extra=extra)

    def _publish(self, field_name: str, path: Path, what: str) -> None:
        if part_of(path).exists():
            os.replace(part_of(path), path)
        if not path.exists() or not path.stat().st_size:
            path.unlink(missing_ok=True)
            return
        filename = f"{self._run.name}_{what}.jsonl"
        until = int(time.time()) + (self._record.get("keep_s") or KEEP_S)
        self._shelf.describe(self._run.owner, path.name, filename, "batch_output", until)
        self._record[field_name] = path.name

    def _on_step(self, at: Step, plan: Plan | None) -> None:
        if plan is not None:
            self._record["request_counts"]["total"] = plan.count
            self._record["model"] = next(iter(plan.models)) if len(plan.models) == 1 else None
        if at == "running":
            records.step(self._record, "in_progress")
        elif at == "finishing":
            records.step(self._record, "finalizing")
        self._save()

    def _on_progress(self, progress: Progress) -> None:
        records.count(self._record, progress.totals)
        self._save()

    def _save(self) -> None:
        self._shelf.save_batch(self._run.owner, self._run.name, self._record)

    def _is_cancelled(self) -> bool:
        return self._shelf.cancelled_at(self._run.owner, self._run.name) is not None
