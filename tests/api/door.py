"""A gateway for a test: a real pool of worker processes, a real server on a port of its own, real clients."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai

from broker.config import PoolConfig
from broker.gateway.config import GatewayConfig
from broker.gateway.gateway import Gateway
from broker.gateway.server import Server
from tests.pool import ROOT, Pool, wait_for

__all__ = ["Door", "Raw", "body_of", "frames", "gateway_process"]


class Door:
    """One gateway over `pool`, in a thread of this process. Use as a context manager."""

    def __init__(self, pool: Pool, **config: Any) -> None:
        self.pool = pool
        usual = {
            "port": 0,
            "read_timeout_s": 5.0,
            "shutdown_grace_s": 1.0,
            "file_root": str(pool.broker.folder / "files"),
        }
        self.config = GatewayConfig(**{**usual, **config})
        self.server = Server(self.config, pool.broker.url, pool=PoolConfig(**pool.settings))
        self._thread = threading.Thread(target=self._run, name="gateway")
        self._loop: asyncio.AbstractEventLoop | None = None

    def _run(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            await self.server.serve()

        asyncio.run(serve())

    def __enter__(self) -> Door:
        self._thread.start()
        wait_for(lambda: self.server.started or not self._thread.is_alive(), "the gateway")
        assert self.server.started
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()
        self._thread.join(30)
        assert not self._thread.is_alive()

    @property
    def gateway(self) -> Gateway:
        gateway: Gateway = self.server.app.state.gateway
        return gateway

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def openai(self, key: str = "none", **options: Any) -> openai.OpenAI:
        """OpenAI's own client, as it comes; no retries, so that a test sees the first answer."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **{"max_retries": 0, "timeout": 60.0, **options})

    def http(self, key: str | None = None) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60.0)

    def call(self, work: Callable[[], Any]) -> Any:
        """Runs `work` in the gateway's loop."""

        async def run() -> Any:
            return work()

        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(30)

    def call_async(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Awaits `work()` in the gateway's loop."""

        async def run() -> Any:
            return await work()

        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(30)

    def cut(self) -> None:
        """Breaks every connection of the gateway, as a network does."""
        self.call(lambda: [one.transport.abort() for one in list(self.server.server_state.connections)])  # type: ignore[union-attr]

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample of `/metrics`."""
        wanted = f"{name}{{" if labels else f"{name} "
        with self.http() as client:
            lines = client.get("/metrics").text.splitlines()
        for line in lines:
            if line.startswith(wanted) and all(f'{key}="{value}"' in line for key, value in labels.items()):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no sample {name} {labels}")


class Raw:
    """A client that is only a socket: it can stop reading, or vanish, at any moment."""

    def __init__(
        self,
        door: Door,
        path: str,
        body: dict[str, Any] | None,
        headers: dict[str, str] | None = None,
        buffer_bytes: int | None = None,
    ) -> None:
        """`buffer_bytes`: what the kernel may keep for this client while it does not read."""
        self._socket = socket.socket()
        if buffer_bytes is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self._socket.connect(("127.0.0.1", door.server.port))
        data = json.dumps(body).encode() if body is not None else b""
        method = "GET" if body is None else "POST"
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(data)}"]
        lines += ["Content-Type: application/json", *(f"{name}: {value}" for name, value in (headers or {}).items())]
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode() + data)
        self.text = ""

    def read_until(self, wanted: str, timeout_s: float = 30.0) -> str:
        """Reads until `wanted` has come; returns everything so far."""
        self._socket.settimeout(timeout_s)
        while wanted not in self.text:
            part = self._socket.recv(4096)
            assert part, f"the connection was closed before {wanted!r} came: {self.text[-300:]!r}"
            self.text += part.decode()
        return self.text

    def read_to_end(self, timeout_s: float = 30.0) -> str:
        """Reads until the other side closes."""
        self._socket.settimeout(timeout_s)
        while part := self._receive():
            self.text += part.decode()
        return self.text

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(65536)
        except ConnectionResetError:
            return b""

    def vanish(self) -> None:
        self._socket.close()


def body_of(**changes: Any) -> dict[str, Any]:
    """A chat request."""
    return {"model": "toy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 10, "seed": 1, **changes}


def frames(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    """(id, data) of a stream's events; data is the value, or the text if it is no JSON."""
    name = ""
    for line in response.iter_lines():
        if line.startswith("id: "):
            name = line[4:]
        elif line.startswith("data: "):
            data = line[6:]
            yield name, data if data == "[DONE]" else json.loads(data)
            name = ""


def gateway_process(pool: Pool, log: Path, **environment: str) -> tuple[subprocess.Popen[bytes], str]:
    """A gateway as `prism serve` runs it; returns it and its address."""
    code = (
        "import json, sys; from broker.config import PoolConfig; from broker.gateway.config import GatewayConfig;"
        "from broker.gateway.server import run;"
        "config = GatewayConfig.from_environment(port=0, shutdown_grace_s=1.0);"
        "run(config, sys.argv[1], pool=PoolConfig(**json.loads(sys.argv[2])))"
    )
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", code, pool.broker.url, json.dumps(pool.settings)],
            stderr=output,
            cwd=ROOT,
            env={**os.environ, **environment},
        )

    def port() -> str | None:
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        return next((str(line["port"]) for line in lines if "port" in line), None)

    return process, f"http://127.0.0.1:{wait_for(port, 'the gateway')}"
