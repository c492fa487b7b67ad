"""The families on other processors: the same bits wherever there is fused multiply-add, and never a crash."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import prism_core
from prism_core.kernels.target import target

ROOT = Path(prism_core.__file__).parents[1]
PROGRAM = Path(__file__).parent / "family_checks.py"
QUICK = ("Q4_1", "Q8_0", "Q6_K")
"""One of each kind of arithmetic."""
REST = ("Q4_0", "MXFP4", "Q2_K", "Q5_0", "Q5_1", "IQ4_NL", "Q3_K", "Q4_K", "Q5_K", "F32", "F16", "BF16")

FUSED = {
    "AVX2": {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2"},
    "AVX-VNNI": {"NUMBA_CPU_NAME": "alderlake", "NUMBA_CPU_FEATURES": "+avxvnni"},
    "AVX-512 without VNNI": {
        "NUMBA_CPU_NAME": "skylake-avx512",
        "NUMBA_CPU_FEATURES": "+avx512f,+avx512bw,+avx512vl,+avx512dq",
    },
}
PLAIN = {
    "AVX": {"NUMBA_CPU_NAME": "ivybridge", "NUMBA_CPU_FEATURES": ""},
    "SSSE3": {"NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": ""},
    "SSE2": {"NUMBA_CPU_NAME": "generic"},
}


@functools.cache
def results(form: str, names: tuple[str, ...] = QUICK) -> dict[str, tuple[float, str]]:
    """(error, digest) of each family in one form; "host" is this processor's own."""
    settings = {"host": {}, **FUSED, **PLAIN}[form]
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, **settings, "PRISM_HOME": home, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(PROGRAM), *names]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = [line.split() for line in run.stdout.splitlines()]
    return {name: (float(error), digest) for name, error, digest in lines}


def runs_here(form: str) -> bool:
    now = target()
    needs = {"AVX2": now.avx2, "AVX-VNNI": now.avx2 and now.vnni, "AVX-512 without VNNI": now.avx512}
    return now.x86 and needs.get(form, True)


@pytest.mark.parametrize("names", [QUICK, pytest.param(REST, marks=pytest.mark.full)], ids=["quick", "rest"])
@pytest.mark.parametrize("form", [form for form in FUSED if runs_here(form)])
def test_every_form_with_fused_multiply_add_gives_the_same_bits(form: str, names: tuple[str, ...]) -> None:
    assert {name: digest for name, (_, digest) in results(form, names).items()} == {
        name: digest for name, (_, digest) in results("host", names).items()
    }


@pytest.mark.parametrize("names", [QUICK, pytest.param(REST, marks=pytest.mark.full)], ids=["quick", "rest"])
@pytest.mark.parametrize("form", [form for form in PLAIN if runs_here(form)])
def test_old_processors_agree_with_the_definition(form: str, names: tuple[str, ...]) -> None:
    assert set(results(form, names)) == set(names)
    assert max(error for error, _ in results(form, names).values()) < 1e-6
