"""A pool for tests: clients and workers that are only calls, and checks of what must hold whatever happened."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import redis
from redis.backoff import ConstantBackoff
from redis.exceptions import ConnectionError, TimeoutError
from redis.retry import Retry

from broker import calls, events, keys
from broker.answers import Claim, Outcome
from broker.config import PoolConfig
from broker.connect import connect
from broker.lua import Scripts
from broker.reap import Reaper, reap
from broker.spec import RequestSpec
from broker.store import Lease, WorkerStore
from broker.transcript import TurnCommit, TurnRecord

CONFIG = PoolConfig(lease_ms=60_000, overdue_ms=100, preempt_ms=100)
"""No lease lapses while a test runs, unless the test makes it (`lapse`)."""
MODEL = "toy+a8.1"
QUICK = Retry(ConstantBackoff(0.001), 4, (ConnectionError, TimeoutError, OSError))
"""The product's tries without its waits."""


class Rig:
    """One broker, seen as bytes, and short cuts to the verbs."""

    def __init__(self, url: str, config: PoolConfig = CONFIG, **options: Any) -> None:
        self.connection = connect(url, **options)
        self.redis: redis.Redis = self.connection.redis
        self.config = config
        self.scripts = Scripts(self.redis, config)

    def close(self) -> None:
        self.connection.close()

    def with_config(self, **changes: Any) -> Rig:
        """Another view of the same broker, with other numbers."""
        other = object.__new__(Rig)
        other.connection, other.redis = self.connection, self.redis
        other.config = dataclasses.replace(self.config, **changes)
        other.scripts = Scripts(self.redis, other.config)
        return other

    def worker(self, name: str = "w1", model: str = MODEL, called: str = "", **facts: Any) -> WorkerStore:
        """A worker that has joined; `called` is what people call its model."""
        lease = Lease(worker=name, model=model, name=called, host="here", pid=1, **facts)
        store = WorkerStore(self.redis, lease, self.config)
        store.join()
        return store

    def submission(self, request: str | None = None, **options: Any) -> calls.Submission:
        return calls.Submission(request=request or keys.new_ulid(), **options)

    def submit(self, request: str | None = None, *, spec: RequestSpec | None = None, **options: Any) -> calls.Submitted:
        item = self.submission(request, **options)
        return self.run(calls.submit(item, spec or RequestSpec(prompt="hello", seed=1), self.config))

    def run(self, call: calls.Call[Any]) -> Any:
        return call.parse(self.scripts.run(call.script, call.keys, call.arguments))

    def cancel(self, request: str, owner: str = "local", reason: str = "") -> str:
        answer: str = self.run(calls.cancel(request, owner, reason))
        return answer

    def record(self, request: str, owner: str = "local") -> calls.Record:
        values = self.redis.hmget(keys.request(request), list(calls.RECORD_FIELDS))
        return calls.read_record(request, owner, values)

    def state(self, request: str) -> str:
        return self.record(request).state

    def rq(self, request: str, field: str = "status") -> str | None:
        value = self.redis.hget(keys.rq_job(request), field)
        return None if value is None else value.decode()

    def queue(self, name: str) -> list[str]:
        """Ids in an RQ queue, such as `w.w1` or `open.interactive` (of MODEL) or `open.any.batch`."""
        kind, _, priority = name.partition(".")
        if kind == "open" and priority in keys.PRIORITIES:
            return self.items(keys.open_queue(MODEL, priority))
        return self.items(f"{keys.RQ}:queue:{name}")

    def items(self, key: str) -> list[str]:
        return [item.decode() for item in self.redis.lrange(key, 0, -1)]

    def items_raw(self, key: str) -> list[bytes]:
        return list(self.redis.lrange(key, 0, -1))

    def log(self, request: str) -> list[events.Event]:
        """All events of a request, read directly."""
        found = []
        for entry, fields in self.redis.xrange(keys.log(request)):
            found.append(events.Event.unpack(events.parse_cursor(entry.decode()), fields[b"d"]))
        return found

    def stat(self, name: str) -> int:
        return int(self.redis.hget(keys.STATS, name) or 0)

    def turn(self, request: str, base: int, text: str = "answer", ids: Sequence[int] = (7, 8)) -> TurnCommit:
        record = TurnRecord(
            request=request,
            model=MODEL,
            messages=[{"role": "user", "content": "hello"}],
            answer={"role": "assistant", "content": text},
            answer_ids=list(ids),
            text=text,
        )
        return TurnCommit(base=base, record=record)

    def lapse(self, worker: WorkerStore) -> None:
        """What the lapse of its time does to a lease."""
        self.redis.delete(keys.worker(worker.worker))

    def age(self, request: str, ms: int = 10) -> None:
        """Put the deadline of an open request `ms` into the past, as time would."""
        seconds, micros = self.redis.time()
        deadline = seconds * 1000 + micros // 1000 - ms
        self.redis.hset(keys.request(request), "deadline", deadline)
        self.redis.zadd(keys.LIVE, {request: deadline}, xx=True)

    def kill(self, worker: WorkerStore) -> int:
        """The supervisor saw the process end."""
        return reap(self.scripts.run, worker.worker, known_gone=True)

    def reaper(self, **options: Any) -> Reaper:
        return Reaper(self.redis, self.config, **options)


def eventually(what: Callable[[], Any], within_s: float = 10.0) -> Any:
    """What `what` gives once it is true."""
    deadline = time.monotonic() + within_s
    while not (value := what()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)
    return value


def play(worker: WorkerStore, claim: Claim, ids: Sequence[int], **finish: Any) -> Outcome:
    """Run a whole turn: start, one delta for each id, end."""
    begin(worker, claim)
    emit(worker, claim, ids)
    return end(worker, claim, ids=ids, **finish)


def begin(worker: WorkerStore, claim: Claim) -> None:
    start = events.start(attempt=claim.attempt, worker=worker.worker, prompt_tokens=3, reused_tokens=0)
    flags = worker.append(claim.request, claim.epoch, claim.ev + 1, [start], claim.n)
    assert flags.status == "ok", flags
    object.__setattr__(claim, "ev", claim.ev + 1)


def emit(worker: WorkerStore, claim: Claim, ids: Sequence[int]) -> None:
    """One event for each id; keeps the claim's counts as a worker would."""
    for token in ids:
        delta = events.delta(n=claim.n + 1, ids=[token], text=f"<{token}>")
        flags = worker.append(claim.request, claim.epoch, claim.ev + 1, [delta], claim.n + 1)
        assert flags.status == "ok", flags
        object.__setattr__(claim, "ev", claim.ev + 1)
        object.__setattr__(claim, "n", claim.n + 1)


def end(worker: WorkerStore, claim: Claim, *, state: Any = "done", settle: bool = True, **options: Any) -> Outcome:
    ids = options.pop("ids", ())
    outcome = worker.finish(
        claim.request,
        claim.epoch,
        claim.ev + 1,
        state=state,
        reason=options.pop("reason", "stop"),
        n=claim.n,
        usage={"prompt_tokens": 3, "completion_tokens": claim.n},
        ids=ids,
        text="".join(f"<{token}>" for token in ids),
        **options,
    )
    if settle and outcome.status in ("ok", "again"):
        worker.settle(claim.request)
    return outcome


def must_take(worker: WorkerStore, running: Sequence[str] = ()) -> Claim:
    claim = worker.take(running)
    assert claim is not None, "nothing to take"
    return claim


def check_stream(stream: Sequence[events.Event]) -> None:
    """What holds of every ended request's events: ev without holes, epochs rising, one end, tokens counted once."""
    assert [event.sequence for event in stream] == list(range(1, len(stream) + 1))
    epochs = [event.cursor.epoch for event in stream]
    assert epochs == sorted(epochs)
    assert [event.kind for event in stream].count("end") == 1
    assert stream[-1].kind == "end"
    n = 0
    for event in stream:
        if event.kind == "delta":
            n += len(event.token_ids)
            assert event.data["n"] == n
    assert stream[-1].data["n"] == n


def tokens(stream: Sequence[events.Event]) -> list[int]:
    return [token for event in stream for token in event.token_ids]


def check_settled(rig: Rig) -> None:
    """Nothing is open or running any more: no list, set or box holds anything."""
    assert rig.redis.zcard(keys.LIVE) == 0
    assert rig.redis.zcard(keys.LIVE + ":batch") == 0
    leftovers = []
    for key in rig.redis.keys("prism:*"):
        name = key.decode()
        waiting = ":queue:" in name or name.endswith((":box", ":act", ":run")) or name.startswith("prism:rq:wip:")
        if waiting:
            leftovers.append(name)
    assert leftovers == []
