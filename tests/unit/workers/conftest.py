"""A real broker and one real worker's store for the tests of a turn's parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.brokers import PrivateBroker


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateBroker]:
    folder: Path = tmp_path_factory.mktemp("b")
    broker = PrivateBroker(folder)
    broker.start()
    yield broker
    broker.stop()


@pytest.fixture
def broker(server: PrivateBroker) -> PrivateBroker:
    """The session's server, emptied."""
    server.start()
    server.flush()
    return server
