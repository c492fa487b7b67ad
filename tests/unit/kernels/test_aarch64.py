"""The generated kernels compiled for AArch64: vector code, and no calls into libraries."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import prism_core

ROOT = Path(prism_core.__file__).parents[1]
PROGRAM = Path(__file__).parent / "aarch64_object.py"
FAMILIES = ("Q4_1", "Q8_0", "MXFP4", "Q6_K")


def compiled(features: str, output: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PRISM_HOME": str(output.parent)}
    command = [sys.executable, str(PROGRAM), features, *FAMILIES, "-o", str(output)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def count(assembly: str, instruction: str) -> int:
    return len(re.findall(rf"^\s+{instruction}\b", assembly, re.MULTILINE))


@pytest.mark.parametrize(("features", "products"), [("", r"mla\s+v\d+\.8h"), ("+dotprod", r"sdot\s+v\d+\.4s")])
def test_kernels_become_vector_code(features: str, products: str, tmp_path: Path) -> None:
    output = tmp_path / "kernels.o"
    assembly = compiled(features, output)
    assert output.read_bytes()[:4] == b"\x7fELF"
    # Four families: 32 columns of 8 rows take 16 vectors of 4 bytes a row, 16 bytes each, in the one-token part alone.
    assert count(assembly, products) > 4 * 16
    assert count(assembly, r"fmla\s+v\d+\.4s") > 4
    assert count(assembly, "tbl") >= 8
    assert count(assembly, "bl") == count(assembly, "blr") == 0
    # No lane is taken out to be worked on by itself.
    assert count(assembly, r"(umov|smov)") == 0
