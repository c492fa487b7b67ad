"""A draw reads and writes nothing beside its buffers, and is the same token in every form of the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prism_core.kernels.target import target

FORMS = {
    "host": {},
    "SSSE3": {"NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": ""},
    "SSE2": {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""},
}


@pytest.mark.skipif(sys.platform == "win32", reason="there is no mprotect")
@pytest.mark.parametrize("form", ["host", "SSE2", pytest.param("SSSE3", marks=pytest.mark.full)])
def test_a_draw_stays_inside_its_buffers_and_is_that_of_the_full_order(tmp_path: Path, form: str) -> None:
    if form != "host" and not target().x86:
        pytest.skip("a processor of another kind")
    environment = {**os.environ, **FORMS[form]}
    if form != "host":
        environment["PRISM_HOME"] = str(tmp_path)
    script = [sys.executable, "-m", "tests.unit.runtime.guarded_draws"]
    root = Path(__file__).parents[3]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=280, cwd=root, env=environment, check=False)
    assert (ended.returncode, ended.stdout) == (0, "ok\n"), ended.stderr[-2000:]
