"""`prism bench promises`: every promise of the pool protocol, tried on real pools, in one table.

The timed ones come from `ops.bench.pool`. P1 to P5, P9 and P12 come from one storm of `ops.bench.chaos`, whose
invariants are checked from outside; P13 to P16 are each one scene played here. Nothing is taken from a record of an
earlier run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from broker.events import TERMINAL
from ops.bench.chaos import Chaos
from ops.bench.pool import Bench, Figure, bench_pool, pool_of
from workers.main import DEFAULT_OPENER

PROMPT = "Tell me a long story about a lighthouse."
OUTAGE_S = 30.0
LINES = 60

Say = Callable[[str], None]


def bench_promises(
    model: Path, *, volume: Path, kills: int, minutes: float, rounds: int, seed: int, say: Say
) -> list[Figure]:
    """P1 to P17. `volume`: a tiny model for the storm, where the number of events counts; `model` for all else."""
    figures = bench_pool(model, rounds=rounds, kills=rounds, stalls=3, say=say)
    with pool_of(model, DEFAULT_OPENER, None) as (bench, _):
        for scene in (idempotency, drain, outage, batch):
            say(scene.__doc__ or "")
            figures.append(scene(bench))
    say(f"storm of {kills} kills, seed {seed}")
    figures += storm(volume, kills, minutes, seed, say)
    return sorted(figures, key=lambda figure: int(figure.promise[1:].partition("-")[0].partition(",")[0]))


def storm(model: Path, kills: int, minutes: float, seed: int, say: Say) -> list[Figure]:
    """P1 to P5, P9, P12: what a storm of kills, stalls and broker deaths broke."""
    chaos = Chaos(
        model=str(model), seed=seed, workers=3, kills=kills, minutes=minutes, at_once=16, tokens=(50, 400), say=say
    )
    report = chaos.go()
    what = (
        f"violations in {report.kills} kills and stops, {report.faults['broker']} broker deaths, "
        f"{report.requests} requests, {report.tokens} tokens, {report.events} events"
    )
    return [Figure("P1-P5, P9, P12", what, float(len(report.violations)), "", 0.0)]


def idempotency(bench: Bench) -> Figure:
    """P16: one key, submitted ten times"""
    requests = [bench.client.submit(prompt=PROMPT, max_tokens=8, idempotency_key="same") for _ in range(10)]
    requests[0].result(timeout=60)
    return Figure("P16", "generations of one key submitted 10 times", float(len({r.id for r in requests})), "", 1.0)


def drain(bench: Bench) -> Figure:
    """P14: a worker drains while it runs a turn"""
    bench.wait_for_workers()
    requests = [bench.client.submit(prompt=PROMPT, max_tokens=300) for _ in range(4)]
    for event in requests[0].events(timeout=60):
        if event.kind == "delta":
            os.kill(bench.pid_of(requests[0]), signal.SIGTERM)
            break
    failed = sum(request.result(timeout=120).state != "done" for request in requests)
    return Figure("P14", "turns that a drain failed, of 4", float(failed), "", 0.0)


def outage(bench: Bench) -> Figure:
    """P13: the broker is away for 30 seconds in mid-stream"""
    before = {worker.lease.pid for worker in bench.client.workers() if worker.lease is not None}
    request = bench.client.submit(prompt=PROMPT, max_tokens=400)
    server = int(bench.client.redis.info("server")["process_id"])
    os.kill(server, signal.SIGSTOP)
    try:
        time.sleep(OUTAGE_S)
    finally:
        os.kill(server, signal.SIGCONT)
    deadline = time.monotonic() + 60
    while bench.client.record(request.id).state not in TERMINAL and time.monotonic() < deadline:
        time.sleep(0.05)
    bad = float(bench.client.record(request.id).state != "done")
    bad += sum(not Path(f"/proc/{pid}").exists() for pid in before) if sys.platform == "linux" else 0
    return Figure("P13", f"workers or turns lost to {OUTAGE_S:.0f} s without the broker", bad, "", 0.0)


def batch(bench: Bench) -> Figure:
    """P15: a batch whose runner is killed and resumed"""
    with tempfile.TemporaryDirectory(prefix="promise-") as folder:
        source, out = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        lines = (
            {
                "custom_id": f"line-{n}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"prompt": f"Number {n} is", "max_tokens": 16, "temperature": 0},
            }
            for n in range(LINES)
        )
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        command = [sys.executable, "-m", "ops.cli", "batch", "run", str(source), "-o", str(out), "--resume"]
        environment = os.environ | {"PRISM_REDIS_URL": bench.client.connection.url}
        part = out.with_name(out.name + ".part")
        for _ in range(2):
            seen = part.stat().st_size if part.exists() else 0
            runner = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while runner.poll() is None and (part.stat().st_size if part.exists() else 0) <= seen:
                time.sleep(0.005)
            runner.kill()
            runner.wait()
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        counts = Counter(json.loads(line)["custom_id"] for line in out.read_text().splitlines())
    wrong = sum(counts[f"line-{n}"] != 1 for n in range(LINES)) + max(0, len(counts) - LINES)
    return Figure(
        "P15", f"lines not recorded exactly once, of {LINES}, after 2 kills of the runner", float(wrong), "", 0
    )
