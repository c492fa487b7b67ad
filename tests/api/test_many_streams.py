"""Many clients at one gateway, a third of them slow or gone: no event lost, nothing left behind, little memory."""

from __future__ import annotations

import asyncio
import secrets
import signal
from pathlib import Path

import httpx
import pytest

from ops.bench.gateway_load import Load, memory_mib, run, sockets
from tests.api.door import Door, gateway_process
from tests.pool import FAST, Pool, wait_for

MEMORY_MIB = 200


def test_forty_clients_of_whom_a_third_are_slow_or_gone_lose_nothing(door: Door):
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    report = asyncio.run(run(Load(door.url, clients=40, tokens=12, seed=seed)))
    print(report)
    assert not report.faults
    assert (report.read, report.slow, report.gone) == (27, 6, 7)
    wait_for(lambda: door.server.connections == 0, "all connections to be gone")
    wait_for(lambda: door.gateway.departures.pending == 0, "all graces to end")
    assert door.gateway.metrics.open_streams == 0
    assert not door.call(lambda: door.gateway.pool._hub._channels)
    assert door.pool.redis.zcard("prism:live") == 0


def test_more_requests_at_once_than_connections_to_the_broker_all_are_answered(door: Door):
    async def ask() -> list[int]:
        async with httpx.AsyncClient(base_url=door.url, timeout=60, limits=httpx.Limits(max_connections=None)) as http:
            return [answer.status_code for answer in await asyncio.gather(*(http.get("/readyz") for _ in range(300)))]

    assert asyncio.run(ask()) == [200] * 300


@pytest.mark.full
def test_two_hundred_clients_need_less_than_two_hundred_mebibytes(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
):
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    with Pool(tmp_path_factory.mktemp("l"), 2, model="toy?step_s=0.002", pool=FAST) as pool:
        process, url = gateway_process(pool, tmp_path / "log")
        before = sockets(process.pid)
        report = asyncio.run(run(Load(url, clients=200, tokens=48, seed=seed)))
        wait_for(lambda: pool.redis.zcard("prism:live") == 0, "all requests to end")
        print(
            f"peak {memory_mib(process.pid):.1f} MiB, sockets {before} before and {sockets(process.pid)} after", report
        )
        assert not report.faults
        assert report.most_open > 150
        assert memory_mib(process.pid) < MEMORY_MIB
        clients = int(pool.redis.info("clients")["connected_clients"])
        # What stays is the gateway's own pool of connections to the broker.
        assert sockets(process.pid) <= before + clients
        process.send_signal(signal.SIGTERM)
        process.wait(30)
