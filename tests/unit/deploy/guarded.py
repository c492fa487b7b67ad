"""A broker as the deployment guide sets it up: the shipped configuration, users and certificates, none of them edited
beyond paths and the port."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import redis

from tests.brokers import PrivateBroker
from tests.unit.deploy.commands import ROOT, free_port

DEPLOY = ROOT / "ops" / "deploy"
ROLES = ("client", "worker", "operator", "admin")


class GuardedBroker(PrivateBroker):
    """Listens on a free port of localhost; `url` is the workers', `urls` has everybody's, `client()` administers."""

    def __init__(self, folder: Path, server: Path | None = None, *, tls: bool = False) -> None:
        super().__init__(folder, server)
        self.port = free_port()
        self.secrets = folder / "secrets"
        version = subprocess.run([str(self.server), "--version"], capture_output=True, text=True, check=True).stdout
        flags = [*([] if tls else ["--plain"]), *(["--redis-7.0"] if "v=7.0." in version else [])]
        command = [str(DEPLOY / "broker" / "credentials.sh"), *flags, str(self.secrets), f"localhost:{self.port}"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        self.settings = dict(
            line.split("=", 1) for line in (self.secrets / "prism.env").read_text().splitlines() if "=" in line
        )
        self.urls = {role: self.settings[f"PRISM_{role.upper()}_URL"] for role in ROLES}
        (folder / "data").mkdir()
        parts = ["broker.conf", *(["tls.conf"] if tls else [])]
        text = "\n".join((DEPLOY / "broker" / part).read_text() for part in parts)
        text = text.replace("/etc/prism/tls", str(self.secrets)).replace("/etc/prism", str(self.secrets))
        text = text.replace(" 6379", f" {self.port}").replace("dir /data", f"dir {folder}/data")
        self.config = folder / "broker.conf"
        self.config.write_text(text)

    @property
    def url(self) -> str:
        return self.urls["worker"]

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.urls["admin"])

    def start(self) -> None:
        if self.process is not None and self.process.poll() is None:
            return
        with open(self.folder / "out.log", "ab") as output:
            self.process = subprocess.Popen([str(self.server), str(self.config)], stdout=output, stderr=output)
        deadline = time.monotonic() + 20
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.RedisError:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    raise AssertionError((self.folder / "out.log").read_text()) from None
                time.sleep(0.005)

    def denied(self) -> list[str]:
        """What users were refused so far, each once: who, why, and what."""
        with self.client() as client:
            entries = client.acl_log()
        return sorted({f"{e['username']}: {e['reason']} {e['object']} ({e['context']})" for e in entries})


def distribution_server() -> Path:
    """The distribution's redis-server, which has TLS; the test environment installs it."""
    found = shutil.which("redis-server")
    assert found, "these tests need redis-server on PATH: apt-get install redis-server"
    return Path(found)
