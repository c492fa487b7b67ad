"""Taking dead workers out of the pool, and the sweeps that no crash can outrun. Run by every supervisor.

Kept: what a dead worker ran or had queued is running or queued elsewhere before its name is forgotten, however often a
reaper dies in between: begun reapings stay on a list until they end. Two reapers at once do no harm.
A reaper that could not reach the broker for a while, or meets a restarted server, knows nothing about the others'
leases and waits one whole lease first, so an outage of the broker costs no worker its turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from redis import Redis

from broker import keys
from broker.config import PoolConfig
from broker.errors import NotFound
from broker.failures import translated
from broker.lua import Scripts

__all__ = ["Reaper", "Sweep", "drain", "reap", "rescue"]

Run = Callable[..., Any]


def reap(
    run: Run, worker: str, *, why: Literal["worker_lost", "drain"] = "worker_lost", known_gone: bool = False
) -> int:
    """Remove `worker`, in steps; returns how many requests were handled, or -1 if its lease is alive.

    `known_gone`: the caller saw the process end (or is it), so its lease is deleted first.
    """
    total: int = 0
    gone = "1" if known_gone else "0"
    while True:
        reply = run("reap", [keys.worker(worker)], [worker, why, gone])
        what = reply[0].decode()
        if what == "alive":
            return -1
        total += reply[1]
        if what == "done":
            return total


def rescue(run: Run, request: str, worker: str) -> str:
    """Take one request away from `worker`: moved, closed, final (it had ended) or not_there."""
    answer: str = run("rescue", [keys.request(request)], [request, worker, "worker_lost"]).decode()
    return answer


def drain(run: Run, worker: str) -> int:
    """Send `worker` no new turns and place its queued ones elsewhere; returns how many. `NotFound` if it is no
    member."""
    total: int = 0
    while True:
        reply = run("drain", [keys.worker(worker)], [worker])
        if reply[0] < 0:
            raise NotFound(f"no worker {worker}")
        total += reply[0]
        if reply[1] == 0:
            return total


@dataclass
class Sweep:
    """What one `Reaper.tick` did."""

    expired: int = 0
    """Turns ended because their deadline had passed."""
    reaped: list[str] = field(default_factory=list)
    """Workers removed."""
    handled: int = 0
    """Their requests."""
    mended: int = 0
    """Requests that the audit placed again."""
    held_off: bool = False
    """Lapsed leases were left alone for now: the broker had been away or is new."""


class Reaper:
    """The periodic duties of a supervisor. Not shared between threads; `tick` is cheap when nothing is due."""

    def __init__(
        self, redis: Redis, config: PoolConfig | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.redis = redis
        self.config = config or PoolConfig()
        self._clock = clock
        self._run = Scripts(redis, self.config).run
        self._server: str | None = None
        self._seen = 0.0
        self._trusted_from = 0.0
        self._sweep_due = 0.0
        self._audit_due = clock() + self.config.audit_ms / 1000
        self._audit_cursor = "0"

    def tick(self) -> Sweep:
        """Do what is due. Errors of the broker pass through as `BrokerUnavailable`; call again later."""
        done = Sweep()
        now = self._clock()
        if now >= self._sweep_due:
            self._sweep(now, done)
            self._sweep_due = now + self.config.sweep_ms / 1000
        if now >= self._audit_due:
            self._audit(done)
            if self._audit_cursor == "0":
                self._audit_due = now + self.config.audit_ms / 1000
        return done

    def lost(self, worker: str) -> int:
        """A child of ours exited: reap it at once, whatever its lease says."""
        return reap(self._run, worker, known_gone=True)

    def _sweep(self, now: float, done: Sweep) -> None:
        self._look_at_server(now)
        done.expired, lapsed, begun = self._run("sweep", [keys.LIVE], [self.config.reap_step])
        self._seen = self._clock()
        if lapsed and now < self._trusted_from:
            done.held_off = True
            lapsed = []
        for name in [*begun, *lapsed]:
            handled = reap(self._run, name.decode())
            if handled >= 0:
                done.reaped.append(name.decode())
                done.handled += handled

    def _look_at_server(self, now: float) -> None:
        """Begin to trust lapsed leases only one whole lease after a gap in our own contact or a new server process."""
        lease_s = self.config.lease_ms / 1000
        with translated():
            server = str(self.redis.info("server").get("run_id"))
        if server != self._server or now - self._seen > lease_s / 2:
            self._trusted_from = self._clock() + lease_s
        self._server = server
        self._seen = self._clock()

    def _audit(self, done: Sweep) -> None:
        cursor, mended = self._run("audit", [keys.LIVE], [self._audit_cursor, self.config.audit_step])
        self._audit_cursor = cursor.decode()
        done.mended = mended

    def audit_all(self) -> int:
        """One whole audit at once; returns how many requests were mended."""
        total: int = 0
        while True:
            sweep = Sweep()
            self._audit(sweep)
            total += sweep.mended
            if self._audit_cursor == "0":
                return total
