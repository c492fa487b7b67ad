"""The pool beside the bare Runtime: what the queue, the broker and a takeover cost, each against its promise.

    python -m ops.bench.pool --model MODEL.gguf

Every figure is measured on a fresh pool (P10: of one worker, else of two) through the public client, and is what
remains after the engine's own time, which the end event reports. The promises are those of the protocol, section 9.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker import Client, Request, embedded
from broker.events import Event
from ops.bench import beside
from workers.config import WorkerConfig
from workers.main import DEFAULT_OPENER, resolve
from workers.supervisor import Supervisor

PROMPT = "Once upon a time, in a village by the sea, there lived"
MS = 1e3


@dataclass(frozen=True)
class Figure:
    """One measured promise."""

    promise: str
    what: str
    value: float
    unit: str
    limit: float
    at_most: bool = True

    @property
    def holds(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def line(self) -> str:
        """A row of a Markdown table."""
        sign = "<=" if self.at_most else ">="
        verdict = "met" if self.holds else "MISSED"
        return f"| {self.promise} | {self.what} | {self.value:.3g} {self.unit} | {sign} {self.limit:g} | {verdict} |"


class Bench:
    """One pool, measured."""

    def __init__(self, client: Client, workers: int, model: Any) -> None:
        self.client, self.workers, self.model = client, workers, model

    def overhead(self, rounds: int) -> list[Figure]:
        """P11: an idle pool, one token."""
        beyond: list[float] = []
        for _ in range(rounds):
            began = time.monotonic()
            request = self.client.submit(prompt=PROMPT, max_tokens=1)
            first = next(time.monotonic() for event in request.events(timeout=60) if event.kind == "delta")
            usage = request.result(timeout=60).usage
            beyond.append((first - began) * MS - (usage["prefill_us"] + usage["decode_us"]) / 1000)
        what = "submit to first token, beyond prefill and one step"
        return [Figure("P11", f"{what}, p{part * 100:.0f}", quantile(beyond, part), "ms", 50) for part in (0.5, 0.99)]

    def decode(self, pairs: int, tokens: int) -> list[Figure]:
        """P10: tokens per second of the pool's one worker over those of the bare Runtime in its process, in turn."""
        prompt = [int(token) for token in self.model.tokenizer.encode(PROMPT)]
        ratios: list[float] = []
        flushes: list[float] = []

        def pooled() -> float:
            usage = self.client.submit(prompt=PROMPT, max_tokens=tokens, temperature=0).result(timeout=120).usage
            flushes.append(usage["flush_us"] / usage["flushes"] / 1000)
            spent: int = usage["decode_us"] + usage["sampling_us"] + usage["emit_us"]
            return spent / 1e6 / max(1, usage["completion_tokens"])

        def bare() -> float:
            return beside.bare_step(self.client.redis, prompt, tokens)

        for sides in ((pooled, bare), (bare, pooled)) * (pairs // 2):  # who is second finds the machine as warm
            took = {side: side() for side in sides}
            ratios.append(took[bare] / took[pooled])
        return [
            Figure("P10", "pool decode over bare decode, median", statistics.median(ratios), "", 0.98, at_most=False),
            Figure("P10", "flush of one step, median", statistics.median(flushes), "ms", 1.0),
        ]

    def cancel(self, rounds: int) -> list[Figure]:
        """P8: from the call to the end event, in mid-generation, less one step."""
        beyond: list[float] = []
        for _ in range(rounds):
            request = self.client.submit(prompt=PROMPT, max_tokens=self.model.context_tokens - 64)
            asked, ended, deltas = 0.0, 0.0, []
            for event in request.events(timeout=60):
                ended = time.monotonic()
                if event.kind == "delta":
                    deltas.append((ended, event.data["n"]))
                if not asked and event.kind == "delta" and event.data["n"] >= 8:
                    request.cancel()
                    asked = time.monotonic()
            if request.result(timeout=10).state == "cancelled":
                # A delta may carry several steps' tokens.
                steps = [(b - a) / max(1, n - m) for (a, m), (b, n) in itertools.pairwise(deltas)]
                beyond.append((ended - asked - statistics.median(steps)) * MS)
        return [
            Figure("P8", f"cancel to end, beyond one step, p{part * 100:.0f}", quantile(beyond, part), "ms", 10)
            for part in (0.5, 0.99)
        ]

    def takeover(self, rounds: int, number: int) -> list[float]:
        """Seconds without a token around the loss of a worker, less the new one's prefill, with a warm spare."""
        gaps: list[float] = []
        for _ in range(rounds):
            self.wait_for_workers()
            request = self.client.submit(prompt=PROMPT, max_tokens=400)
            pid, last = 0, 0.0
            for event in request.events(timeout=120):
                if event.kind == "delta" and not pid and event.data["n"] >= 10:
                    pid = self.pid_of(request)
                    os.kill(pid, number)
                    last = time.monotonic()
                elif event.kind == "delta" and pid and _moved(event, request):
                    gaps.append(time.monotonic() - last)
                    break
                elif event.kind == "delta":
                    last = time.monotonic()
            usage = request.result(timeout=120).usage
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            if gaps:
                gaps[-1] -= usage["prefill_us"] / 1e6
        return gaps

    def pid_of(self, request: Request) -> int:
        """The process that runs it."""
        running = next(worker for worker in self.client.workers() if request.id in worker.running)
        assert running.lease is not None
        return running.lease.pid

    def wait_for_workers(self) -> None:
        """Until all workers are members again and idle."""
        deadline = time.monotonic() + 300
        while sum(worker.state == "idle" for worker in self.client.workers()) < self.workers:
            if time.monotonic() > deadline:
                raise TimeoutError("the workers did not come up within 300 s")
            time.sleep(0.05)


def _moved(event: Event, request: Request) -> bool:
    """Whether a delta was written after a move: every move makes a new epoch."""
    return event.cursor.epoch > 1


def quantile(values: list[float], part: float) -> float:
    """The value that so large a part of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(part * len(ordered)) - 1)] if ordered else math.nan


@contextlib.contextmanager
def pool_of(
    path: Path, opener: str, context: int | None, *, workers: int = 2, with_bare: bool = False
) -> Iterator[tuple[Bench, float]]:
    """A fresh pool of one-thread workers, and the seconds that its broker took to start.

    `with_bare`: its one worker is ready for `Bench.decode`.
    """
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as home:
        began = time.monotonic()
        share = embedded.ensure(Path(home), idle_s=1.0)
        started = time.monotonic() - began
        config = WorkerConfig(model=str(path), redis_url=share.url, context_tokens=context)
        hooks: dict[str, Any] = {"opener": opener}
        if with_bare:
            environment = {beside.REAL_OPENER: opener}
            hooks = {"opener": beside.OPENER, "prepare": beside.PREPARE, "environment": environment}
        supervisor = Supervisor(config, workers, **hooks)
        watcher = threading.Thread(target=supervisor.run, name="supervisor")
        watcher.start()
        try:
            with Client(share.url) as client:
                bench = Bench(client, workers, resolve(opener)(str(path), threads=1, context_tokens=context))
                bench.wait_for_workers()
                yield bench, started
        finally:
            supervisor.stop()
            supervisor.stop()
            watcher.join(60)
            share.close()


def bench_pool(
    path: Path,
    *,
    opener: str = DEFAULT_OPENER,
    context: int | None = None,
    rounds: int = 20,
    kills: int = 10,
    stalls: int = 3,
    say: Callable[[str], None] = lambda line: None,
) -> list[Figure]:
    """All figures. `rounds` of the short measures, `kills` and `stalls` of the long ones."""
    with pool_of(path, opener, context) as (bench, started):
        figures = [Figure("P17", "cold start of the broker", started, "s", 0.5)]
        say("submit to first token")
        figures += bench.overhead(rounds)
        say("cancellation")
        figures += bench.cancel(rounds)
        what = "takeover gap after {}, beyond re-prefill, {}"
        say("takeover of a killed worker")
        gaps = bench.takeover(kills, signal.SIGKILL)
        figures.append(Figure("P6", what.format("SIGKILL", "p99"), quantile(gaps, 0.99), "s", 1.0))
        say("takeover of a stalled worker")
        gaps = bench.takeover(stalls, signal.SIGSTOP)
        lease = bench.client.config.lease_ms / 1000
        figures.append(Figure("P7", what.format("SIGSTOP", "most"), max(gaps, default=math.nan), "s", lease + 0.5))
    with pool_of(path, opener, context, workers=1, with_bare=True) as (bench, _):
        say("decode beside the bare Runtime")
        # A single ratio swings by a twentieth on a shared machine, with what its neighbours do for a tenth of a second
        # or so: many short pairs say more than few long ones.
        figures += bench.decode(25 * rounds, 32)
    return figures


def main(arguments: list[str] | None = None) -> int:
    """Prints a table, or JSON; exit code 1 if a promise was missed."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.pool", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--context", type=int)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--stalls", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    figures = bench_pool(
        options.model,
        context=options.context,
        rounds=options.rounds,
        kills=options.kills,
        stalls=options.stalls,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if options.json:
        print(json.dumps([vars(figure) | {"holds": figure.holds} for figure in figures]))
    else:
        print("| promise | what | measured | promised | |", "| --- | --- | --- | --- | --- |", sep="\n")
        print(*(figure.line() for figure in figures), sep="\n")
    return 0 if all(figure.holds for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
