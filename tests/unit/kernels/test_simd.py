"""Every operation of the vector vocabulary against numpy, in every form that the processor can run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import prism_core

ROOT = Path(prism_core.__file__).parents[1]
PROGRAM = Path(__file__).parent / "simd_checks.py"
FORMS = {
    "host": {},
    "AVX2 without VNNI": {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2"},
    "AVX without AVX2": {"NUMBA_CPU_NAME": "ivybridge", "NUMBA_CPU_FEATURES": ""},
    "SSSE3 without AVX2": {"NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": ""},
    "plain SSE2": {"NUMBA_CPU_NAME": "generic"},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_operation_agrees_with_numpy(form: str, tmp_path: Path) -> None:
    environment = {**os.environ, **FORMS[form], "PRISM_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.split()[-1] == "passed"
