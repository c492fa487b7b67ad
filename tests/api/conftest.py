"""Pools and gateways shared by the tests of the API. No test breaks a shared one; those that kill make their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.api.door import Door
from tests.pool import FAST, Pool


@pytest.fixture(scope="session")
def toy_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Two workers of the toy, 4 ms a step."""
    with Pool(tmp_path_factory.mktemp("t"), 2, model="toy?step_s=0.004", pool=FAST) as pool:
        yield pool


@pytest.fixture(scope="session")
def parrot_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """One worker that says what the user said."""
    with Pool(tmp_path_factory.mktemp("p"), 1, opener="tests.api.parrot:open_parrot", pool=FAST) as pool:
        yield pool


@pytest.fixture(scope="session")
def door(toy_pool: Pool) -> Iterator[Door]:
    """A gateway without keys over the toy."""
    with Door(toy_pool, disconnect_grace_s=0.3) as door:
        yield door


@pytest.fixture(scope="session")
def parrot(parrot_pool: Pool) -> Iterator[Door]:
    """A gateway without keys over the parrot."""
    with Door(parrot_pool) as door:
        yield door
