"""Gateway processes for tests: real ones, that can be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai

from tests.pool import ROOT, Pool, wait_for

SERVE = """
import asyncio, json, sys
from broker.config import PoolConfig
from broker.gateway.config import GatewayConfig
from broker.gateway.server import Server
from broker.log import set_up

async def main(config, url, pool):
    config["api_keys"] = tuple(config.get("api_keys", ()))
    server = Server(GatewayConfig(**config), url, pool=PoolConfig(**pool))
    task = asyncio.create_task(server.serve())
    while not (server.started or task.done()):
        await asyncio.sleep(0.01)
    print(server.port, flush=True)
    await task

set_up()
asyncio.run(main(*json.loads(sys.argv[1])))
"""


class GatewayProcess:
    """One gateway over `pool` in a process of its own."""

    def __init__(self, pool: Pool, root: Path, **config: Any) -> None:
        self._given = json.dumps(
            [{"port": 0, "file_root": str(root), "shutdown_grace_s": 1.0, **config}, pool.broker.url, pool.settings]
        )
        self.process: subprocess.Popen[str] | None = None
        self.port = 0

    def __enter__(self) -> GatewayProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts it, unless it runs, and waits until it listens; it may fail to (no broker)."""
        if self.alive:
            return
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, self._given],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline() or 0)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self._wait()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if that does not help."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        self._wait()

    def _wait(self) -> None:
        assert self.process is not None
        try:
            self.process.wait(30)
        finally:
            if self.process.poll() is None:
                self.process.kill()
            if self.process.stdout is not None:
                self.process.stdout.close()

    def openai(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, max_retries=0, timeout=30.0)


def over(ask: Any, what: str = "the end of the batch", timeout_s: float = 120.0) -> Any:
    """The batch that `ask` gives, once it is over; errors of the way there are waited out."""

    def look() -> Any:
        try:
            batch = ask()
        except openai.APIError:
            return None
        return batch if batch.status in ("completed", "failed", "cancelled", "expired") else None

    return wait_for(look, what, timeout_s)
