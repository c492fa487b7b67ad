"""A Valkey server that a test owns and may kill: no guardian brings it back."""

from __future__ import annotations

import secrets
import signal
import subprocess
import time
from pathlib import Path

import redis

from broker.embedded import find_server
from broker.guardian import configuration


class PrivateBroker:
    """One server on a Unix socket in `folder`, with the embedded broker's own configuration."""

    def __init__(self, folder: Path, server: Path | None = None) -> None:
        """`server`: another binary than the one that `find_server` prefers."""
        self.folder = folder
        self.server = server or find_server()
        self.socket = folder / "s"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def client(self) -> redis.Redis:
        """A plain client of the test's own."""
        return redis.Redis.from_url(self.url)

    def start(self) -> None:
        """Starts it, unless it runs, and waits until it answers."""
        if self.process is not None and self.process.poll() is None:
            return
        config = self.folder / "conf"
        config.write_text(configuration(str(self.folder), str(self.socket)))
        with open(self.folder / "out.log", "ab") as output:
            self.process = subprocess.Popen([str(self.server), str(config)], stdout=output, stderr=output)
        deadline = time.monotonic() + 20
        while True:
            try:
                with self.client() as client:
                    client.set("prism:boot", secrets.token_hex(13), nx=True)
                return
            except redis.RedisError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)

    def flush(self) -> None:
        """Empties it and gives it a new boot id."""
        with self.client() as client:
            client.flushall()
            client.set("prism:boot", secrets.token_hex(13))

    def kill(self) -> None:
        """SIGKILL, as a machine or the kernel would."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            self.process.wait()
