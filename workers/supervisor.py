"""Keeps N worker processes running, and does the pool's periodic duties while it is at it.

Invariant: a worker process never outlives its supervisor (on Linux; elsewhere its lease does the rest), a child that
exits is reaped at once, so its turn moves without waiting for the lease, and a child that cannot start is not tried for
ever. Processes are spawned afresh, never forked: a forked process dies in its first parallel kernel.
Not promised: that RQ's scheduled jobs are run; nothing of the pool is scheduled there, and RQ's queues hold turns only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from broker import keys
from broker.config import PoolConfig
from broker.connect import connect
from broker.errors import BrokerUnavailable
from broker.failures import translated
from broker.reap import Reaper
from prism_core.errors import InvalidRequest, PrismError
from workers.config import MAX_WORKERS, WorkerConfig
from workers.main import DEFAULT_OPENER, EXIT_UNUSABLE, Orders
from workers.rq_adapter import forget_expired
from workers.worker import EXIT_DRAINED, EXIT_REAPED, incarnation

log = logging.getLogger(__name__)

DUTY_S = 0.1
RQ_DUTY_S = 60.0
MEMBERS_S = 1.0  # how often it is asked who is a member: nobody joins and is reaped in less than a lease
AWAY_S = 0.5
FIRST_PAUSE_S = 0.5
LAST_PAUSE_S = 30.0
STEADY_S = 3.0  # a member of the pool that lived this long was no crash loop
LATE_S = 10.0  # what a stopping child may take beyond its grace time
HUNG_S = 10.0  # what a child that was reaped may take to notice it and exit


class WorkersFailed(PrismError):
    """No worker can run: the text is the first one's reason, or says where its log is."""


@dataclass
class Child:
    """One slot of the pool: a process, or the time of its next start."""

    process: subprocess.Popen[bytes] | None = None
    name: str = ""
    started: float = 0.0
    start_at: float = 0.0
    crashes: int = 0
    done: bool = False
    unreaped: list[str] = field(default_factory=list)
    joined: bool = False
    gone_since: float | None = None


class Supervisor:
    """`run` until `stop` was called twice, or once and all children have drained.

    The kernel ends a child when the thread that spawned it ends, so `run` must not be called from a short-lived one.
    """

    def __init__(
        self,
        config: WorkerConfig,
        workers: int = 1,
        *,
        label: str = "",
        pool: Mapping[str, Any] | None = None,
        opener: str = DEFAULT_OPENER,
        prepare: str = "",
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`label`: the model's name for clients; `pool`: fields of PoolConfig; `environment` adds to the children's."""
        if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= MAX_WORKERS:
            raise InvalidRequest(f"workers: must be a whole number in 1..{MAX_WORKERS}, got {workers!r}")
        self._config, self._label, self._pool = config, label, dict(pool or {})
        self._opener, self._prepare = opener, prepare
        self._environment = {**os.environ, **(environment or {})}
        self._clock = clock
        self._children = [Child() for _ in range(workers)]
        self._client = connect(config.redis_url).redis
        self._reaper = Reaper(self._client, PoolConfig(**self._pool), clock=clock)
        # Set in a signal handler, which a second signal may interrupt: nothing there may take a lock, as an Event does.
        self._stop = self._stop_now = False
        self._told_twice = False
        self._kill_at: float | None = None
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()  # the one kind that a signal handler may fill
        self._tick_due = self._rq_due = self._members_due = 0.0
        self.failure = ""

    @property
    def pids(self) -> list[int]:
        """Process ids of the living children, in slot order."""
        return [child.process.pid for child in self._children if child.process is not None]

    @property
    def names(self) -> list[str]:
        """Worker names of the living children, in slot order."""
        return [child.name for child in self._children if child.process is not None]

    def stop(self) -> None:
        """First call: drain. Second call: stop now. Safe in a signal handler and from any thread."""
        self._stop_now = self._stop
        self._stop = True
        self._news.put(None)

    def run(self) -> None:
        """Spawns and watches until stopped. Raises `WorkersFailed` when no child can ever run."""
        try:
            while self._step():
                self._wait()
        finally:
            self._kill_all()
        if self.failure and not self._stop:
            raise WorkersFailed(self.failure)

    def run_with_signals(self) -> None:
        """`run` on the main thread, with SIGTERM and SIGINT as `stop`."""
        handled = (signal.SIGTERM, signal.SIGINT)
        previous = {number: signal.signal(number, lambda *_: self.stop()) for number in handled}
        try:
            self.run()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    # --- one step ------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Until a child ends or `stop` is called, and for no longer than duties may wait."""
        with contextlib.suppress(queue.Empty):
            self._news.get(timeout=DUTY_S)

    def _tell_of_end(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self._news.put(None)

    def _step(self) -> bool:
        """False once there is nothing left to watch."""
        for child in self._children:
            self._watch(child)
        self._duties()
        if self._stop:
            self._end()
            return any(child.process is not None for child in self._children)
        return not all(child.done for child in self._children)

    def _watch(self, child: Child) -> None:
        if child.process is not None:
            code = child.process.poll()
            if code is None:
                return
            self._exited(child, code)
        if not child.done and not self._stop and self._clock() >= child.start_at:
            self._spawn(child)

    def _spawn(self, child: Child) -> None:
        child.name = incarnation()
        orders = Orders(
            config=self._config,
            name=child.name,
            parent=os.getpid(),
            label=self._label,
            opener=self._opener,
            prepare=self._prepare,
            pool=self._pool,
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "workers.main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,  # a Ctrl-C at the terminal reaches the supervisor alone, which then drains
        )
        assert process.stdin is not None
        try:
            process.stdin.write(orders.to_json().encode() + b"\n")
            process.stdin.close()
        except BrokenPipeError:
            pass  # it died at once: the next step sees that
        child.process, child.started = process, self._clock()
        child.joined, child.gone_since = False, None
        threading.Thread(target=self._tell_of_end, args=(process,), name=f"wait-{child.name}", daemon=True).start()
        log.info("worker started", extra={"worker": child.name, "pid": process.pid})

    def _exited(self, child: Child, code: int) -> None:
        lived = self._clock() - child.started
        log.info("worker exited", extra={"worker": child.name, "code": code, "lived_s": round(lived, 3)})
        assert child.process is not None
        assert child.process.stdout is not None
        with child.process.stdout as report:
            os.set_blocking(report.fileno(), False)  # should anything that it started hold the other end
            said = (report.read() or b"").decode(errors="replace")
        child.process = None
        steady = lived >= STEADY_S and self._was_member(child.name)
        child.unreaped.append(child.name)
        self._reap(child)
        if code == EXIT_DRAINED:
            child.done = True
        elif code == EXIT_UNUSABLE:
            child.done = True
            self.failure = self.failure or said or "a worker cannot use its model or configuration: see its log line"
        else:
            child.crashes = 0 if steady or code == EXIT_REAPED else child.crashes + 1
            # The first crash restarts at once: most are a kill, and a spare worker is worth having.
            pause = min(FIRST_PAUSE_S * 2 ** (child.crashes - 2), LAST_PAUSE_S) if child.crashes > 1 else 0.0
            child.start_at = self._clock() + pause

    def _was_member(self, name: str) -> bool:
        """Whether a child had come up and joined; unknown counts as yes: an absent broker is no crash of ours."""
        try:
            with translated():
                return bool(self._client.sismember(keys.WORKERS, name))
        except BrokerUnavailable:
            return True

    # --- the pool's duties ---------------------------------------------------------------------------------------

    def _reap(self, child: Child) -> None:
        while child.unreaped:
            try:
                self._reaper.lost(child.unreaped[0])
            except BrokerUnavailable:
                return
            del child.unreaped[0]

    def _duties(self) -> None:
        now = self._clock()
        if now < self._tick_due:
            return
        try:
            for child in self._children:
                self._reap(child)
            sweep = self._reaper.tick()
            self._end_the_hung(now)
            self._tidy_rq(now)
        except BrokerUnavailable:
            self._tick_due = now + AWAY_S
            return
        except Exception as error:
            # The children go on whatever becomes of the pool's duties; other supervisors have the same ones.
            log.error("sweep failed", extra={"error": f"{type(error).__name__}: {error}"})
            self._tick_due = now + AWAY_S
            return
        self._tick_due = now + DUTY_S
        if sweep.reaped or sweep.mended or sweep.expired:
            log.info("swept", extra={"reaped": sweep.reaped, "mended": sweep.mended, "expired": sweep.expired})

    def _tidy_rq(self, now: float) -> None:
        if now >= self._rq_due:
            self._rq_due = now + RQ_DUTY_S
            with translated():
                forget_expired(self._client)

    def _end_the_hung(self, now: float) -> None:
        """A child that the pool has reaped exits as soon as it sees that; one that sees nothing any more is killed."""
        if now < self._members_due:
            return
        self._members_due = now + MEMBERS_S
        with translated():
            members = {bytes(name).decode() for name in self._client.smembers(keys.WORKERS)}  # type: ignore[arg-type]
        for child in self._children:
            if child.process is None:
                continue
            if child.name in members:
                child.joined, child.gone_since = True, None
            elif child.joined:
                child.gone_since = child.gone_since or now
                if now - child.gone_since >= HUNG_S:
                    log.warning("worker hangs", extra={"worker": child.name, "pid": child.process.pid})
                    child.process.kill()

    # --- the end -------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Passes the two kinds of stop on to the children, and kills those that take far too long."""
        now = self._clock()
        if self._kill_at is None:
            self._kill_at = now + self._config.grace_s + LATE_S
            self._signal_all()
        if self._stop_now:
            if not self._told_twice:
                self._told_twice = True
                self._kill_at = min(self._kill_at, now + LATE_S)
            self._signal_all()  # at every step: a child takes two signals that come close together for one
        if now >= self._kill_at:
            self._kill_all()

    def _signal_all(self) -> None:
        for child in self._children:
            if child.process is not None and child.process.poll() is None:
                child.process.send_signal(signal.SIGTERM)

    def _kill_all(self) -> None:
        for child in self._children:
            if child.process is not None and child.process.poll() is None:
                child.process.kill()
                child.process.wait()
