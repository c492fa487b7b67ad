"""A broker for the tests of batches."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.brokers import PrivateBroker
from tests.conformance.rig import Rig


@pytest.fixture(scope="session")
def batch_broker() -> Iterator[PrivateBroker]:
    with tempfile.TemporaryDirectory(prefix="pb") as folder:
        broker = PrivateBroker(Path(folder))
        broker.start()
        yield broker
        broker.stop()


@pytest.fixture
def rig(batch_broker: PrivateBroker) -> Iterator[Rig]:
    """An empty pool."""
    batch_broker.flush()
    rig = Rig(batch_broker.url)
    yield rig
    rig.close()
