"""Two batches, one of the command line and one over HTTP, while every process is killed at random: workers, the runner,
the gateway, and once the broker. The seed is printed; give it again as PRISM_TEST_SEED."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from prism_core.runtime import Generation, Limits, Runtime
from tests.e2e.gateways import GatewayProcess, over
from tests.pool import FAST, ROOT, Pool, wait_for
from tests.toy import ToyModel

CHAT = "/v1/chat/completions"
TOKENS = 24
LIVES = {"worker": 5, "runner": 4, "gateway": 3}
"""How often each kind is chosen, relative to the others."""
PAUSE_S = (0.2, 1.2)


def messages(name: str) -> list[dict[str, Any]]:
    number = int(name.rpartition("-")[2])
    system = f"You are assistant {number % 7}. " + "Weigh every word. " * 20
    return [{"role": "system", "content": system}, {"role": "user", "content": f"Question {name}?"}]


def lines(names: list[str]) -> bytes:
    rows = []
    for name in names:
        body = {"model": "toy", "messages": messages(name), "max_tokens": TOKENS, "temperature": 0}
        rows.append(json.dumps({"custom_id": name, "method": "POST", "url": CHAT, "body": body}))
    return "\n".join(rows).encode()


def bare(name: str) -> str:
    """The answer of an uninterrupted run on a Runtime of this process."""
    model = ToyModel()
    runtime = Runtime(model.decoder(), Limits(4096, 8, 64 << 20))
    ids: list[int] = []
    prompt = model.chat.encode_turn(messages(name)).token_ids
    runtime.generate(prompt, Generation(TOKENS, stop_tokens=model.tokenizer.stop_tokens), emit=ids.append)
    return model.tokenizer.decode(ids)


class Runner:
    """`prism batch run`, begun again with `--resume` until the batch is over."""

    def __init__(self, pool: Pool, folder: Path, count: int) -> None:
        self.names = [f"cli-{number}" for number in range(count)]
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.input.write_bytes(lines(self.names))
        self._pool = pool
        self.process: subprocess.Popen[str] | None = None
        self.code: int | None = None
        self.starts: list[float] = []

    def tend(self) -> None:
        """Starts it if it has died; notes its end."""
        if self.process is not None:
            code = self.process.poll()
            if code is None:
                return
            if code in (0, 1) and not self.output.with_name("out.jsonl.part").exists():
                self.code = code
                return
        self.starts.append(time.monotonic())
        command = [sys.executable, "-m", "ops.cli", "batch", "run", str(self.input), "-o", str(self.output), "--resume"]
        environment = {**os.environ, "PRISM_REDIS_URL": self._pool.broker.url}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate()

    def found(self) -> list[dict[str, Any]]:
        paths = [self.output, self.output.with_name("out.errors.jsonl")]
        return [json.loads(row) for path in paths if path.exists() for row in path.read_bytes().splitlines()]


class Killer(threading.Thread):
    """Kills until told to stop, at most `most` times."""

    def __init__(self, pool: Pool, runner: Runner, gateway: GatewayProcess, seed: int, most: int) -> None:
        super().__init__(name="killer")
        self._dice = random.Random(seed)
        self._pool, self._runner, self._gateway = pool, runner, gateway
        self._most = most
        self.stop = threading.Event()
        self.kills: Counter[str] = Counter()
        self.lock = threading.Lock()

    def run(self) -> None:
        broker_at = self._dice.randint(2, 4)
        while sum(self.kills.values()) < self._most and not self.stop.wait(self._dice.uniform(*PAUSE_S)):
            if sum(self.kills.values()) == broker_at:
                self._kill_broker()
                continue
            kind = self._dice.choices(list(LIVES), list(LIVES.values()))[0]
            with self.lock:
                self.kills[kind] += 1
                if kind == "worker":
                    self._kill_worker()
                elif kind == "runner":
                    self._runner.kill()
                else:
                    self._gateway.kill()

    def _kill_worker(self) -> None:
        pids = self._pool.supervisor.pids
        if pids:
            try:
                os.kill(self._dice.choice(sorted(pids)), signal.SIGKILL)
            except ProcessLookupError:
                return

    def _kill_broker(self) -> None:
        self.kills["broker"] += 1
        self._pool.broker.kill()
        self.stop.wait(self._dice.uniform(0.0, 0.5))
        self._pool.broker.start()


def survive(folder: Path, cli_lines: int, http_lines: int, kills: int, timeout_s: float) -> None:
    seed = int(os.environ.get("PRISM_TEST_SEED") or secrets.randbits(32))
    print(f"PRISM_TEST_SEED={seed}")
    with Pool(folder, 2, model="toy?step_s=0.002", pool=FAST) as pool:
        runner = Runner(pool, folder, cli_lines)
        http_names = [f"http-{number}" for number in range(http_lines)]
        with GatewayProcess(pool, folder / "files") as gateway:
            client = gateway.openai()
            source = client.files.create(file=("in.jsonl", lines(http_names)), purpose="batch")
            batch = client.batches.create(input_file_id=source.id, endpoint=CHAT, completion_window="24h")
            killer = Killer(pool, runner, gateway, seed, kills)
            runner.tend()
            killer.start()
            began = time.monotonic()
            ended = None
            try:
                while runner.code is None or ended is None:
                    assert time.monotonic() - began < timeout_s, f"not over after {timeout_s:g} s: {killer.kills}"
                    with killer.lock:
                        runner.tend()
                        gateway.start()
                        ended = ended or look(gateway, batch.id)
                    killer.stop.wait(0.05)
            finally:
                killer.stop.set()
                killer.join()
                runner.kill()
            print(f"{time.monotonic() - began:.1f} s, kills {dict(killer.kills)}, {len(runner.starts)} runner starts")
            gateway.start()
            client = gateway.openai()
            done = over(lambda: client.batches.retrieve(batch.id))
            assert done.status == "completed"
            files = [name for name in (done.output_file_id, done.error_file_id) if name]
            rows = [json.loads(row) for name in files for row in client.files.content(name).text.splitlines()]
            check(pool, runner.found(), runner.names)
            check(pool, rows, http_names)
            assert (done.request_counts.total, done.request_counts.completed + done.request_counts.failed) == (
                len(http_names),
                len(rows),
            )
            check_generated_once(pool, runner.found() + rows, len(runner.names) + len(http_names))


def look(gateway: GatewayProcess, name: str) -> bool | None:
    """Whether the batch is over, if the gateway can be asked."""
    try:
        return gateway.openai().batches.retrieve(name).status == "completed" or None
    except Exception:
        return None


def check(pool: Pool, found: list[dict[str, Any]], names: list[str]) -> None:
    """Each line once, its answer that of an uninterrupted run; errors only where every worker of a line was killed."""
    assert Counter(row["custom_id"] for row in found) == Counter(names)
    failed = [row for row in found if row["response"]["status_code"] != 200]
    assert all(row["response"]["body"]["error"]["code"] == "worker_lost" for row in failed)
    print(f"{len(found)} lines, {len(failed)} lost their workers too often")
    for row in random.Random(1).sample([row for row in found if row not in failed], 12):
        assert row["response"]["body"]["choices"][0]["message"]["content"] == bare(row["custom_id"])


def check_generated_once(pool: Pool, found: list[dict[str, Any]], count: int) -> None:
    """No line had a second request, and no token was added to any log twice."""
    stats = {name.decode(): int(value) for name, value in pool.redis.hgetall("prism:stats").items()}
    assert stats["submitted"] == count
    recorded = 0
    for row in found:
        body = row["response"]["body"]
        if "usage" in body:
            recorded += body["usage"]["completion_tokens"]
            assert row["id"].endswith("-1")
        else:
            recorded += int(pool.record(row["response"]["request_id"])["n"])
    assert stats["generation_tokens"] == recorded
    assert pool.redis.zcard("prism:live") == 0


def test_every_line_is_answered_once_whoever_is_killed(tmp_path: Path) -> None:
    survive(tmp_path, 100, 50, 12, 150)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_two_thousand_lines_are_answered_once_whoever_is_killed(tmp_path: Path) -> None:
    survive(tmp_path, 1500, 500, 200, 1000)


@pytest.mark.full
def test_a_resumed_runner_is_back_at_work_at_once(tmp_path: Path) -> None:
    """Prints the time from the start of `prism batch run --resume` to its first new line, of 2,000 lines."""
    with Pool(tmp_path, 2, model="toy?step_s=0.002", pool=FAST) as pool:
        runner = Runner(pool, tmp_path, 2000)
        part = tmp_path / "out.jsonl.part"

        def recorded() -> int:
            return part.read_bytes().count(b"\n") if part.exists() else 0

        runner.tend()
        for _ in range(5):
            before = recorded()
            wait_for(lambda before=before: recorded() >= before + 100, "a hundred lines", 60)
            runner.kill()
            before = recorded()
            began = time.monotonic()
            runner.tend()
            wait_for(lambda before=before: recorded() > before, "one more line", 60)
            print(f"{before} lines were there; the next one after {time.monotonic() - began:.2f} s")
        runner.kill()
        names = [json.loads(row)["id"] for row in part.read_bytes().splitlines()]
        assert len(set(names)) == len(names)
