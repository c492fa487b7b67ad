"""A whole pool for a test: a broker of its own, a supervisor, worker processes, a reader that knows only the log."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from ops.bench.watch import Story, follow
from tests.brokers import PrivateBroker
from tests.submit import cancel, submit
from workers.config import WorkerConfig
from workers.supervisor import Supervisor

ROOT = Path(__file__).parent.parent
FAST: dict[str, Any] = {"lease_ms": 1500, "beat_ms": 300, "sweep_ms": 100}
"""Pool numbers for tests that wait for a lease to lapse."""


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
    """The first true value of `condition`, or an error naming what did not come."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {what}")
        time.sleep(0.005)


class Pool:
    """Use as a context manager."""

    def __init__(
        self,
        folder: Path,
        workers: int = 2,
        *,
        model: str = "toy",
        opener: str = "tests.toy:open_toy",
        pool: dict[str, Any] | None = None,
        config: dict[str, Any] | None = None,
        prepare: str = "",
        environment: dict[str, str] | None = None,
        broker: PrivateBroker | None = None,
    ) -> None:
        self.broker = broker or PrivateBroker(folder)
        self.broker.start()
        self.redis: redis.Redis = self.broker.client()
        self.count = workers
        self.settings = dict(pool or {})
        path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        self.supervisor = Supervisor(
            WorkerConfig(model=model, redis_url=self.broker.url, **(config or {})),
            workers,
            pool=self.settings,
            opener=opener,
            prepare=prepare,
            label="toy",
            environment={"PYTHONPATH": path, **(environment or {})},
        )
        self._thread = threading.Thread(target=self.supervisor.run, name="supervisor")

    def __enter__(self) -> Pool:
        self._thread.start()
        try:
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.supervisor.stop()
        self.supervisor.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()
        self.redis.close()
        self.broker.stop()

    def wait_ready(self) -> None:
        wait_for(lambda: len(self.workers()) >= self.count, f"{self.count} workers", 120)

    def workers(self) -> list[str]:
        return sorted(name.decode() for name in self.redis.smembers("prism:ws"))

    def submit(self, *, conversation: str = "", deadline_ms: int = 120_000, **options: Any) -> str:
        return submit(self.redis, self.settings, conversation=conversation, deadline_ms=deadline_ms, **options)

    def cancel(self, request: str) -> None:
        cancel(self.redis, self.settings, request)

    def follow(self, request: str, until: Callable[[Story], bool] | None = None, timeout_s: float = 60.0) -> Story:
        """Reads the log from its beginning until the end event, or until `until` is true."""
        return follow(self.redis, request, until, timeout_s)

    def record(self, request: str) -> dict[str, bytes]:
        return {name.decode(): value for name, value in self.redis.hgetall(f"prism:r:{request}").items()}

    def worker_of(self, request: str) -> str:
        return str(wait_for(lambda: self.record(request).get("worker"), "a worker").decode())

    def pid_of(self, worker: str) -> int:
        lease = self.redis.get(f"prism:w:{worker}")
        assert lease is not None
        return int(json.loads(lease)["pid"])

    def kill(self, worker: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid_of(worker), number)
