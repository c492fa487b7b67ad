"""The chaos runner: a real pool under kills, stalls and a dying broker, with every promise checked from outside.

    python -m ops.bench.chaos --model MODEL.gguf --minutes 5 --kills 300 --seed 7

Faults: SIGKILL of a worker, SIGSTOP of a worker, often for longer than its lease, and then SIGCONT, CLIENT KILL of all
connections, SIGKILL of the broker. Load: conversations whose turns are all submitted at once, single requests, greedy
and sampled, some cancelled, some read slowly. Checked for each request, by a reader that shares no code with writers:
every event once and in order, ids equal to those of a bare Runtime in this process, one end, the record and RQ's record
final; for each conversation: order, no overlap, a complete transcript; for the pool: nothing left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from broker import embedded
from broker.config import PoolConfig
from broker.connect import connect
from broker.errors import BrokerUnavailable
from broker.keys import conversation_key, new_ulid
from broker.lua import Scripts
from broker.rqrecord import fields as rq_fields
from broker.spec import RequestSpec
from broker.store import WorkerStore
from ops.bench.verdict import OWNER, Ask, Oracle, Verdict
from ops.bench.watch import Ear, follow
from workers import flusher
from workers.config import WorkerConfig
from workers.main import DEFAULT_OPENER, resolve
from workers.supervisor import Supervisor

POOL = {"lease_ms": 1500, "beat_ms": 300, "sweep_ms": 100, "total_takes": 1000, "barren_takes": 1000}
"""Short leases, so that a stalled worker is given up in test time; patience with turns that keep meeting faults."""
FAULTS = {"kill": 10, "stop": 3, "clients": 2, "broker": 1}
TURNS = 4
QUIET_S = 120.0
PREPARE = "ops.bench.chaos:hasten"
HASTY_TICK_S = 0.001


def hasten(store: WorkerStore) -> None:
    """For `Orders.prepare`: about half of the workers send their tokens as they come, so that a storm of a tiny,
    fast model has many events of one token beside those of many."""
    if store.worker.encode()[-1] % 2:
        flusher.TICK_S = flusher.LONG_TICK_S = HASTY_TICK_S


@dataclass
class Report:
    """What a run did and found."""

    seed: int
    faults: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAULTS, 0))
    requests: int = 0
    tokens: int = 0
    events: int = 0
    heard: int = 0
    moves: int = 0
    made_again: int = 0
    """Turns of which a broker, killed while its disk stalled, lost events that were read: the same was told again."""
    submitted_again: int = 0
    """Turns that it had lost whole, and that their client sent again under the same id."""
    states: dict[str, int] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def count(self, verdict: Verdict) -> None:
        """Takes in what was judged."""
        self.requests, self.heard, self.made_again = len(verdict.stories), verdict.heard, verdict.made_again
        for story in verdict.stories:
            self.tokens += len(story.ids)
            self.events += len(story.kinds)
            self.moves += len(story.moves)
            self.gaps += story.gaps
            self.states[str(story.state)] = self.states.get(str(story.state), 0) + 1

    @property
    def kills(self) -> int:
        """Worker processes that were killed or stopped."""
        return self.faults["kill"] + self.faults["stop"]

    def to_dict(self) -> dict[str, Any]:
        """Plain figures for a table or a JSON line."""
        gaps = sorted(self.gaps)
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            **{f"faults.{name}": count for name, count in self.faults.items()},
            "requests": self.requests,
            "token_events": self.tokens,
            "events": self.events,
            "live_events_heard": self.heard,
            "moves": self.moves,
            "made_again": self.made_again,
            "submitted_again": self.submitted_again,
            **{f"ended.{name}": count for name, count in sorted(self.states.items())},
            "takeover_gap_p50_s": round(statistics.median(gaps), 3) if gaps else None,
            "takeover_gap_p99_s": round(gaps[min(len(gaps) - 1, int(len(gaps) * 0.99))], 3) if gaps else None,
            "violations": len(self.violations),
        }


class Chaos:
    """One run. `go` returns its report; violations are collected, not raised."""

    def __init__(
        self,
        *,
        model: str,
        seed: int,
        workers: int = 4,
        kills: int = 60,
        minutes: float = 60.0,
        at_once: int = 12,
        tokens: tuple[int, int] = (20, 120),
        opener: str = DEFAULT_OPENER,
        oracle: str = "",
        faults: Mapping[str, int] | None = None,
        environment: Mapping[str, str] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`at_once`: requests kept open; `tokens`: least and most of one; `faults`: weights by name; `oracle`: what
        to open for the expected answers, if not `model` itself."""
        self.random = random.Random(seed)
        self.report = Report(seed)
        self._workers, self._kills, self._minutes = workers, kills, minutes
        self._at_once, self._tokens = at_once, tokens
        self._faults = dict(FAULTS if faults is None else faults)
        self._model, self._opener, self._environment = model, opener, dict(environment or {})
        self._oracle_model = oracle or model
        self._say = say
        self._asks: list[Ask] = []
        self._open: set[str] = set()
        self._readers: list[threading.Thread] = []
        self._thaws: list[tuple[float, int]] = []
        self._due = ""
        self._config = PoolConfig(**POOL)
        self._again = threading.Lock()

    def go(self) -> Report:
        began = time.monotonic()
        self._say(f"chaos seed {self.report.seed}")
        with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as home, self._pool(Path(home)):
            self._storm(began + self._minutes * 60)
            self._say(f"storm over at {time.monotonic() - began:.1f} s")
            self._calm()
            self._say(f"calm at {time.monotonic() - began:.1f} s")
            verdict = Verdict(
                self._raw, self._oracle, self._ear, self._violate, broker_died=self.report.faults["broker"] > 0
            )
            verdict.judge(self._asks)
            self.report.count(verdict)
        self.report.seconds = time.monotonic() - began
        return self.report

    # --- the pool ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _pool(self, home: Path) -> Iterator[None]:
        share = embedded.ensure(home, idle_s=1.0)
        self._client = connect(share.url, tries=40).redis
        self._raw: Any = redis.Redis.from_url(share.url)
        self._scripts = Scripts(self._client, self._config)
        self._ear = Ear(redis.Redis.from_url(share.url))
        self._oracle = Oracle(resolve(self._opener)(self._oracle_model, threads=1, context_tokens=None))
        self._supervisor = Supervisor(
            WorkerConfig(model=self._model, redis_url=share.url),
            self._workers,
            pool=POOL,
            opener=self._opener,
            prepare=PREPARE,
            environment=self._environment,
        )
        self._watcher = threading.Thread(target=self._supervisor.run, name="supervisor")
        self._watcher.start()
        try:
            self._wait(lambda: self._raw.scard("prism:ws") >= self._workers, "the workers to join", 300)
            yield
        finally:
            self._supervisor.stop()
            self._supervisor.stop()
            self._watcher.join(60)
            self._ear.close()
            share.close()
            deadline = time.monotonic() + 15
            with contextlib.suppress(redis.RedisError):
                while time.monotonic() < deadline and self._raw.ping():  # its guardian ends it after an idle second
                    time.sleep(0.05)

    def _wait(self, condition: Callable[[], Any], what: str, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self._watcher.is_alive():
            with contextlib.suppress(redis.RedisError):
                if condition():
                    return True
            time.sleep(0.02)
        self._violate(f"waited {timeout_s:g} s for {what}")
        return False

    def _violate(self, what: str) -> None:
        self.report.violations.append(what)
        self._say(f"VIOLATION {what}")

    # --- load ----------------------------------------------------------------------------------------------------

    def _spec(self, **more: Any) -> RequestSpec:
        low, high = self._tokens
        options: dict[str, Any] = {"max_tokens": self.random.randint(low, high), "seed": self.random.getrandbits(32)}
        if self.random.random() < 0.5:
            options |= {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "frequency_penalty": 0.1}
        return RequestSpec(**options, **more)

    def _submit(self, spec: RequestSpec, conversation: str = "") -> Ask:
        ask = Ask(new_ulid(), spec, conversation)
        key = conversation_key(OWNER, conversation) if conversation else ""
        job = rq_fields(ask.request, priority="interactive", conversation=None, config=self._config)
        names = [ask.request, OWNER, "", "interactive", key, conversation, "", "", spec.pack(), spec.digest(), ""]
        ask.submission = [*names, 600_000, *job]
        reply = self._patiently("submit", ask, ask.submission)
        if reply[0] not in (b"placed", b"boxed", b"dup"):
            self._violate(f"request {ask.request}: submit said {reply[0]!r}")
        self._asks.append(ask)
        self._open.add(ask.request)
        reader = threading.Thread(target=self._read, args=(ask, 0.03 * (self.random.random() < 0.2)), daemon=True)
        self._readers.append(reader)
        reader.start()
        return ask

    def _submit_again(self, ask: Ask) -> None:
        """A killed broker lost an accepted turn (see `watch`) and what followed it: all go again, in order."""
        if not self.report.faults["broker"]:
            return
        with self._again:
            turns = [other for other in self._asks if other.conversation and other.conversation == ask.conversation]
            for turn in turns or [ask]:
                reply = self._patiently("submit", turn, turn.submission)
                self.report.submitted_again += reply[0] != b"dup"

    def _patiently(self, script: str, ask: Ask, arguments: list[Any]) -> Any:
        """A script call, sent again for as long as the broker is away: every script survives that."""
        while True:
            try:
                return self._scripts.run(script, [f"prism:r:{ask.request}"], arguments)
            except BrokerUnavailable:
                time.sleep(0.02)

    def _read(self, ask: Ask, pause_s: float) -> None:
        client = redis.Redis.from_url(self._raw_url())
        try:
            ask.story = follow(
                client,
                ask.request,
                timeout_s=self._minutes * 60 + QUIET_S,
                pause_s=pause_s,
                gone=lambda: self._submit_again(ask),
            )
        except Exception as error:
            ask.error = f"{type(error).__name__}: {error}"
        finally:
            self._open.discard(ask.request)
            client.close()

    def _raw_url(self) -> str:
        return f"unix://{self._raw.connection_pool.connection_kwargs['path']}"

    def _top_up(self) -> None:
        while len(self._open) < self._at_once:
            if self.random.random() < 0.5:
                name = f"c{len(self._asks)}"
                for turn in range(TURNS):
                    text = f"{name} turn {turn} {self.random.getrandbits(64):x}"
                    self._submit(self._spec(messages=[{"role": "user", "content": text}]), name)
            else:
                ask = self._submit(self._spec(prompt=f"once {self.random.getrandbits(64):x}"))
                ask.cancelled = self.random.random() < 0.15

    # --- faults --------------------------------------------------------------------------------------------------

    def _storm(self, until: float) -> None:
        next_fault, told = time.monotonic() + 0.3, 0
        while self.report.kills < self._kills and time.monotonic() < until and not self.report.violations:
            self._top_up()
            self._cancel_some()
            self._thaw(time.monotonic())
            if time.monotonic() >= next_fault and self._inject():
                next_fault = time.monotonic() + self.random.uniform(0.05, 0.6)
                if self.report.kills >= told + 50:
                    told = self.report.kills
                    self._say(f"{self.report.kills} kills, {len(self._asks)} requests, {len(self._open)} open")
            time.sleep(0.01)

    def _cancel_some(self) -> None:
        for ask in self._asks[-3 * self._at_once :]:
            if ask.cancelled and ask.request in self._open and self.random.random() < 0.02:
                self._patiently("cancel", ask, [ask.request, OWNER, "chaos"])

    def _inject(self) -> bool:
        """One fault; False if there is nobody to hit yet. Then the same one is due, so that the weights hold."""
        what = self._due = self._due or self.random.choices(list(self._faults), list(self._faults.values()))[0]
        try:
            hit = self._hit(what)
        except (redis.RedisError, ProcessLookupError):
            return False
        if hit:
            self.report.faults[what] += 1
            self._due = ""
        return hit

    def _hit(self, what: str) -> bool:
        if what == "clients":
            self._raw.execute_command("CLIENT", "KILL", "TYPE", self.random.choice(["normal", "pubsub"]))
        elif what == "broker":
            os.kill(self._raw.info("server")["process_id"], signal.SIGKILL)
        else:
            pid = self._victim()
            if pid is None:
                return False
            os.kill(pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
            if what == "stop":
                self._thaws.append((time.monotonic() + self.random.uniform(0.3, 3.5), pid))
        return True

    def _victim(self) -> int | None:
        """A worker that is a member and not stopped, one with a turn if there is any; never the last one standing."""
        stopped = {pid for _, pid in self._thaws}
        busy: list[int] = []
        idle: list[int] = []
        with contextlib.suppress(redis.RedisError):
            for name in sorted(self._raw.smembers("prism:ws")):
                lease = self._raw.get(b"prism:w:" + name)
                pid = json.loads(lease)["pid"] if lease else None
                if pid is not None and pid not in stopped and pid in self._supervisor.pids:
                    (busy if self._raw.scard(b"prism:w:" + name + b":run") else idle).append(pid)
        if len(busy) + len(idle) < 2:
            return None
        return self.random.choice(busy or idle)

    def _thaw(self, now: float) -> None:
        for due, pid in list(self._thaws):
            if now >= due:
                self._thaws.remove((due, pid))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _calm(self) -> None:
        self._thaw(float("inf"))
        for reader in self._readers:
            reader.join(QUIET_S)
        self._wait(lambda: not self._raw.zcard("prism:live"), "all requests to end", QUIET_S)
        self._wait(lambda: self._settled(), "all run sets to be empty", 30)

    def _settled(self) -> bool:
        runs = [self._raw.scard(key) for key in self._raw.scan_iter("prism:w:*:run")]
        return not any(runs) and self._raw.scard("prism:ws") == self._workers


def main(arguments: list[str] | None = None) -> int:
    """Runs from the command line; exit code 1 on any violation."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="GGUF file; a tiny one gives volume, a real one gives meaning")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop the storm after this long (60)")
    parser.add_argument("--kills", type=int, default=300, help="stop the storm after so many kills and stops (300)")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--at-once", type=int, default=12, help="requests kept open (12)")
    parser.add_argument("--tokens", type=int, nargs=2, default=(20, 120), metavar=("LEAST", "MOST"))
    parser.add_argument("--seed", type=int, default=int(hashlib.sha256(os.urandom(8)).hexdigest()[:8], 16))
    options = parser.parse_args(arguments)
    chaos = Chaos(
        model=options.model,
        seed=options.seed,
        workers=options.workers,
        kills=options.kills,
        minutes=options.minutes,
        at_once=options.at_once,
        tokens=tuple(options.tokens),
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    report = chaos.go()
    print(json.dumps(report.to_dict()))
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
