"""Workers that are only calls, each on a thread, over a real broker: they answer lines at once, or as a test says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from broker import keys
from broker.answers import Claim
from broker.batch.job import Job, JobFiles, JobResult
from broker.batch.pool import LinePool
from broker.batch.totals import Progress
from broker.errors import NotMember
from broker.keys import new_ulid
from broker.store import WorkerStore
from tests.conformance.rig import MODEL, Rig, begin, emit, end

Act = Callable[["Player", Claim], bool]
"""What to do with a claim; True if it has been dealt with."""


class Player:
    """One worker. Use as a context manager."""

    def __init__(self, rig: Rig, name: str, *, model: str = MODEL, called: str = "toy", act: Act | None = None) -> None:
        self.rig, self.name, self.model, self.called = rig, name, model, called
        self.act = act
        self.taken: list[str] = []
        self.groups: list[str] = []
        self.most_open = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name)
        self.store: WorkerStore | None = None

    def __enter__(self) -> Player:
        self.store = self.rig.worker(self.name, self.model, self.called)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(20)
        assert not self._thread.is_alive()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def _run(self) -> None:
        store = self.store
        assert store is not None
        while not self._stop.is_set():
            try:
                store.beat()
                claim = store.take()
            except NotMember:
                store.join()
                continue
            if claim is None:
                store.wait_bell(0.01)
                continue
            self.taken.append(claim.request)
            self.groups.append(claim.group)
            self.most_open = max(self.most_open, self.rig.redis.zcard(keys.LIVE + ":batch"))
            if self.act is None or not self.act(self, claim):
                self.answer(claim)

    def answer(self, claim: Claim, **how: Any) -> None:
        assert self.store is not None
        begin(self.store, claim)
        emit(self.store, claim, [1, 2])
        end(self.store, claim, ids=[1, 2], **how)


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 20.0) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.002)
    return value


class Bench:
    """One batch in a folder, run by any number of jobs one after the other."""

    def __init__(self, rig: Rig, folder: Path, values: list[Any]) -> None:
        from tests.unit.batch.samples import written

        self.rig = rig
        self.files = JobFiles(written(folder / "in", values), folder / "out", folder / "err", folder / "plan")
        self.batch = new_ulid()
        self.seen: list[Progress] = []
        self.stop = threading.Event()

    def job(self, **options: Any) -> Job:
        pool = LinePool(self.rig.redis, self.rig.config)
        options = {"stop": self.stop, "on_progress": self.seen.append, **options}
        return Job(self.files, pool, self.batch, **options)

    def run(self, **options: Any) -> JobResult:
        return self.job(**options).run()

    def start(self, **options: Any) -> Running:
        return Running(self.job(**options))

    def request(self, line: int, attempt: int = 1) -> str:
        return f"b{self.batch}-{line}-{attempt}"


class Running:
    """A job on a thread."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.result: JobResult | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="job")
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self.job.run()
        except BaseException as error:
            self.error = error

    def wait(self, timeout_s: float = 30.0) -> JobResult:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the job does not end"
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result
