"""The look-up kernels give the same bits on every processor, and touch nothing beyond their buffers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import prism_core

ROOT = Path(prism_core.__file__).parents[1]
PROGRAM = Path(__file__).parent / "lut_checks.py"
FORMS = {
    "AVX2 without AVX-512": {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2"},
    "SSSE3 without AVX2": {"NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": ""},
    "plain SSE2": {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""},
}


ALL = ["Q1_0", "Q1_0_V1", "Q2_0", "PQ2_0", "PTQ1_0", "TQ1_0", "TQ2_0"]
TYPES = {"AVX2 without AVX-512": ALL, "SSSE3 without AVX2": ["Q1_0", "Q2_0"], "plain SSE2": ["Q1_0"]}
"""Fewer where a look-up is many instructions and takes long to compile."""


def digests(home: Path, form: dict[str, str], types: list[str]) -> dict[str, str]:
    """Digest of every type."""
    environment = {**os.environ, **form, "PRISM_HOME": str(home), "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, str(PROGRAM), *types], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = dict(line.split() for line in run.stdout.splitlines()[1:])
    assert list(found) == types
    return found


@pytest.fixture(scope="module")
def of_this_processor(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return digests(tmp_path_factory.mktemp("home"), {}, ALL)


@pytest.mark.parametrize("form", FORMS)
def test_every_processor_gives_the_same_bits(form: str, of_this_processor: dict[str, str], tmp_path: Path) -> None:
    found = digests(tmp_path, FORMS[form], TYPES[form])
    assert found == {name: of_this_processor[name] for name in found}
