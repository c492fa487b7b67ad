"""Many streams at one gateway, a third of their clients slow or gone: is any event lost, is anything left behind?

    python -m ops.bench.gateway_load --url http://127.0.0.1:8000 --clients 200 --pid PID_OF_THE_GATEWAY

Each client is a bare socket that asks for a streamed response of its own. Two thirds read as fast as it comes; of the
rest, half read a little at a time from a small buffer, and half vanish at a random moment. Checked for each that read
to the end: sequence numbers 0, 1, 2, ... without holes or repeats, and the text equal to the response fetched
afterwards. For each that vanished: its request ends. Printed: the checks, the time, and with --pid the gateway's
peak memory and its open sockets before and after (Linux).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import socket
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

SLOW_BYTES = 2048
SLOW_PAUSE_S = 0.02
ENDED = ("completed", "incomplete", "failed", "cancelled")


@dataclass
class Load:
    """What a run is."""

    url: str
    clients: int = 200
    tokens: int = 48
    model: str = ""
    key: str = ""
    seed: int = 0


@dataclass
class Report:
    """What a run found."""

    seed: int
    read: int = 0
    slow: int = 0
    gone: int = 0
    events: int = 0
    bytes: int = 0
    seconds: float = 0.0
    most_open: int = 0
    states: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


@dataclass
class _Client:
    number: int
    role: str
    leaves_after: int
    data: bytes = b""
    response: str = ""


async def run(load: Load) -> Report:
    """Runs all clients at once, then checks what each of them saw."""
    chance = random.Random(load.seed)
    report = Report(load.seed)
    clients = []
    for number in range(load.clients):
        role = ("read", "read", "slow" if number % 2 else "gone")[number % 3]
        clients.append(_Client(number, role, chance.choice([0, 1, chance.randint(2, 40_000)])))
    began = time.monotonic()
    open_now: set[int] = set()
    await asyncio.gather(*(_talk(load, client, report, open_now) for client in clients))
    report.seconds = time.monotonic() - began
    for client in clients:
        setattr(report, client.role, getattr(report, client.role) + 1)
        report.bytes += len(client.data)
        await _check(load, client, report)
    return report


async def _talk(load: Load, client: _Client, report: Report, open_now: set[int]) -> None:
    address = urlsplit(load.url)
    raw = socket.socket()
    if client.role == "slow":
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BYTES)
    raw.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(raw, (address.hostname, address.port))
    open_now.add(client.number)
    report.most_open = max(report.most_open, len(open_now))
    body: dict[str, Any] = {"input": f"client {client.number}", "max_output_tokens": load.tokens, "stream": True}
    body |= {"model": load.model} if load.model else {}
    if client.role == "slow":
        body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
    data = json.dumps(body).encode()
    head = [
        "POST /v1/responses HTTP/1.1",
        f"Host: {address.netloc}",
        "Connection: close",
        f"Authorization: Bearer {load.key or 'none'}",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    ]
    try:
        await loop.sock_sendall(raw, "\r\n".join([*head, "", ""]).encode() + data)
        while client.role != "gone" or len(client.data) < client.leaves_after:
            part = await loop.sock_recv(raw, SLOW_BYTES if client.role == "slow" else 65_536)
            if not part:
                break
            client.data += part
            if client.role == "slow":
                await asyncio.sleep(SLOW_PAUSE_S)
    except OSError as error:
        report.faults.append(f"client {client.number}: {error}")
    finally:
        raw.close()
        open_now.discard(client.number)


async def _check(load: Load, client: _Client, report: Report) -> None:
    events = _events(client.data)
    report.events += len(events)
    numbers = [event["sequence_number"] for event in events]
    if numbers != list(range(len(numbers))):
        report.faults.append(f"client {client.number} ({client.role}): events {numbers[:50]} have holes or repeats")
    if not events:
        if client.role != "gone":
            report.faults.append(f"client {client.number} ({client.role}): no events in {client.data[:200]!r}")
        return
    client.response = events[0]["response"]["id"]
    found = await asyncio.to_thread(_ended, load, client.response)
    report.states[found["status"]] = report.states.get(found["status"], 0) + 1
    if client.role != "gone":
        text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        whole = "".join(part["text"] for item in found["output"] for part in item["content"])
        if text != whole or events[-1]["type"] not in ("response.completed", "response.incomplete"):
            report.faults.append(f"client {client.number} ({client.role}): read {len(text)} of {len(whole)} characters")


def _events(data: bytes) -> list[dict[str, Any]]:
    """The complete events of a chunked answer."""
    _, _, rest = data.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size or b"0", 16)
        body += rest[:length]
        rest = rest[length + 2 :]
    blocks = body.decode(errors="replace").split("\n\n")[:-1]
    lines = [line for block in blocks for line in block.split("\n") if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines]


def _ended(load: Load, response: str, timeout_s: float = 60.0) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while True:
        found = _get(load, f"/v1/responses/{response}")
        if found["status"] in ENDED or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def _get(load: Load, path: str) -> dict[str, Any]:
    request = urllib.request.Request(load.url + path, headers={"Authorization": f"Bearer {load.key or 'none'}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def memory_mib(pid: int) -> float:
    """Peak resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def sockets(pid: int) -> int:
    """Open sockets of a process."""
    count = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:")
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--model", default="")
    parser.add_argument("--key", default=os.environ.get("PRISM_API_KEYS", "").partition(",")[0])
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--pid", type=int, help="the gateway's process, to watch its memory and sockets")
    options = parser.parse_args()
    load = Load(options.url, options.clients, options.tokens, options.model, options.key, options.seed)
    print(f"seed {load.seed}", file=sys.stderr)
    before = sockets(options.pid) if options.pid else 0
    report = asyncio.run(run(load))
    if options.pid:
        print(f"peak memory {memory_mib(options.pid):.1f} MiB; sockets {before} before, {sockets(options.pid)} after")
    print(json.dumps(report.__dict__, indent=1))
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
