"""A whole pool for a test: a broker of its own, a supervisor, worker processes, and a reader that knows only the log.

The reader shares no code with the writers: it reads the stream with plain Redis commands and msgpack.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import redis

from tests.brokers import PrivateBroker
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


@dataclass
class Story:
    """What the log of one request says, checked while it is read."""

    request: str
    kinds: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    text: str = ""
    starts: list[dict[str, Any]] = field(default_factory=list)
    moves: list[str] = field(default_factory=list)
    end: dict[str, Any] | None = None
    last: tuple[int, int] = (0, 0)
    seen_at: float = 0.0

    def take(self, entry: bytes, payload: bytes) -> None:
        """One log entry: numbered without holes, epochs never falling, nothing after the end."""
        epoch, ev = map(int, entry.decode().split("-"))
        assert ev == self.last[1] + 1, f"{self.request}: event {ev} follows event {self.last[1]}"
        assert epoch >= self.last[0], f"{self.request}: epoch {epoch} follows epoch {self.last[0]}"
        assert self.end is None, f"{self.request}: an event after the end"
        self.last = (epoch, ev)
        event = msgpack.unpackb(payload)
        self.kinds.append(event["k"])
        self.seen_at = time.monotonic()
        if event["k"] == "start":
            self.starts.append(event)
        elif event["k"] == "delta":
            self.ids += event["t"]
            self.text += event["x"]
            assert event["n"] == len(self.ids), f"{self.request}: n is {event['n']} after {len(self.ids)} tokens"
        elif event["k"] == "moved":
            self.moves.append(event["why"])
        else:
            self.end = event
            assert event["n"] == len(self.ids)

    @property
    def state(self) -> str | None:
        return self.end["state"] if self.end else None

    @property
    def reused(self) -> int:
        return int(self.starts[-1]["reused_tokens"])


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
        from tests.submit import submit

        return submit(self.redis, self.settings, conversation=conversation, deadline_ms=deadline_ms, **options)

    def cancel(self, request: str) -> None:
        from tests.submit import cancel

        cancel(self.redis, self.settings, request)

    def follow(self, request: str, until: Callable[[Story], bool] | None = None, timeout_s: float = 60.0) -> Story:
        """Reads the log from its beginning until the end event, or until `until` is true."""
        story = Story(request)
        key, last = f"prism:r:{request}:log", "0-0"
        deadline = time.monotonic() + timeout_s
        while story.end is None and not (until and until(story)):
            left = deadline - time.monotonic()
            assert left > 0, f"{request}: no end within {timeout_s:g} s, got {story.kinds[-5:]} ({len(story.ids)} ids)"
            try:
                reply = self.redis.xread({key: last}, block=200)
            except redis.ConnectionError:
                time.sleep(0.05)
                continue
            for _, entries in reply or []:
                for entry, fields in entries:
                    story.take(entry, fields[b"d"])
                    last = entry
        return story

    def record(self, request: str) -> dict[str, bytes]:
        return {name.decode(): value for name, value in self.redis.hgetall(f"prism:r:{request}").items()}

    def worker_of(self, request: str) -> str:
        return str(wait_for(lambda: self.record(request).get("worker"), "a worker")).removeprefix("b'").rstrip("'")

    def pid_of(self, worker: str) -> int:
        lease = self.redis.get(f"prism:w:{worker}")
        assert lease is not None
        import json

        return int(json.loads(lease)["pid"])

    def kill(self, worker: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid_of(worker), number)
