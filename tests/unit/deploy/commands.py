"""The command line and the gateway as processes, for the tests of this folder."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.pool import wait_for

ROOT = Path(__file__).parents[3]
PRISM = [sys.executable, "-m", "ops.cli"]


def environment(**more: str) -> dict[str, str]:
    """This process's, without what would point a command at another pool."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PRISM_REDIS_URL", "PRISM_API_KEYS")}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


def prism(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PRISM, *arguments], capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment(**more)
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(url: str, path: str = "/readyz") -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url + path, timeout=10).status_code == 200
    return False


@contextlib.contextmanager
def gateway(broker: str, *arguments: str, **more: str) -> Iterator[str]:
    """`prism gateway` on a free port; gives its address, and sees it end with 0 at SIGTERM."""
    port = free_port()
    command = [*PRISM, "gateway", "--redis-url", broker, "--port", str(port), *arguments]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:  # no pipe: nobody would read it, and a full one stops the writer

        def said() -> str:
            log.seek(0)
            return log.read().decode()

        process = subprocess.Popen(command, cwd=ROOT, env=environment(**more), stderr=log, stdout=subprocess.DEVNULL)
        try:
            wait_for(lambda: answers(url) or process.poll() is not None, "the gateway", 60)
            assert process.poll() is None, said()
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        assert process.returncode == 0, said()
