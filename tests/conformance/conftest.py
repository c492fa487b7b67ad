"""The conformance suite runs once for each server that this machine has: the bundled Valkey always."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.embedded import find_server
from tests.brokers import PrivateBroker
from tests.conformance.proxy import LossyProxy
from tests.conformance.rig import Rig
from tests.conformance.sides import QUICK, SIDES


def _servers() -> dict[str, Path]:
    found = {"bundled": find_server()}
    for name in ("redis-server", "valkey-server"):
        path = shutil.which(name)
        if path:
            found[name] = Path(path)
    return found


SERVERS = _servers()


@pytest.fixture(scope="session", params=sorted(SERVERS))
def server(request: pytest.FixtureRequest) -> Iterator[PrivateBroker]:
    """A running server; short path, because Unix socket paths are."""
    with tempfile.TemporaryDirectory(prefix="pz") as folder:
        broker = PrivateBroker(Path(folder), SERVERS[request.param])
        broker.start()
        yield broker
        broker.stop()


@pytest.fixture
def own_server(request: pytest.FixtureRequest, server: PrivateBroker) -> Iterator[PrivateBroker]:
    """A server of this test alone, of the same kind, to be killed or stopped."""
    with tempfile.TemporaryDirectory(prefix="pz") as folder:
        broker = PrivateBroker(Path(folder), server.server)
        broker.start()
        yield broker
        broker.stop()


@pytest.fixture
def rig(server: PrivateBroker) -> Iterator[Rig]:
    """An empty pool."""
    server.flush()
    rig = Rig(server.url)
    yield rig
    rig.close()


@pytest.fixture
def lossy(server: PrivateBroker) -> Iterator[LossyProxy]:
    """An empty pool whose every reply passes a proxy that can lose it."""
    server.flush()
    with tempfile.TemporaryDirectory(prefix="pz") as folder:
        proxy = LossyProxy(Path(folder) / "p", server.socket)
        yield proxy
        proxy.close()


@pytest.fixture(params=sorted(SIDES))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def side(rig: Rig, server: PrivateBroker, kind: str) -> Iterator[Any]:
    made = SIDES[kind](server.url, QUICK)
    yield made
    made.close()
