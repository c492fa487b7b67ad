"""Tests of this folder pack weights into a home of their own: they make hundreds of files that nobody needs again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.engine.stepping import home_with_shared_caches


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRISM_HOME", str(home_with_shared_caches(tmp_path_factory.mktemp("prism") / "home")))
        yield
