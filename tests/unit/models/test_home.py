"""A $PRISM_HOME that cannot be used, for whatever reason, costs time and memory, and never an error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from prism_core.home import prism_home

ROOT = Path(__file__).parents[3]
KERNEL = "from prism_core.kernels.faults import watch; watch.warm(); print('ok')"
MODEL = """
import sys
from prism_core import open_model
from tests.unit.engine.stepping import after
with open_model(sys.argv[1]) as model:
    decoder = model.decoder()
    assert not model._weights.shared
    print(after(decoder, [1, 2, 3]).tobytes().hex())
"""


def unusable(kind: str, folder: Path) -> Path:
    home = folder / "home"
    if kind == "file":
        home.touch()
    elif kind == "circle":
        home.symlink_to(home)
    elif kind == "closed":
        home.mkdir(mode=0)
    elif kind == "below a file":
        home.touch()
        return home / "deeper"
    else:
        return folder / ("x" * 300)
    return home


def run(script: str, home: Path, *arguments: str) -> str:
    # root may do what others may not, unless it has let go of that
    drop = (
        "import ctypes, os; os.getuid() or [ctypes.CDLL(None).prctl(24, bit, 0, 0, 0) for bit in (1, 2, 3)]\n"
        "os.execv(os.sys.executable, [os.sys.executable, '-c', *os.sys.argv[1:]])"
    )
    command = [sys.executable, "-c", drop, script, *arguments]
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/", "PRISM_HOME": str(home)}
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities of Linux")
@pytest.mark.parametrize("kind", ["file", "circle", "closed", "below a file", "name too long"])
def test_a_kernel_compiles_without_a_home(tmp_path: Path, kind: str) -> None:
    assert run(KERNEL, unusable(kind, tmp_path)) == "ok"


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="capabilities of Linux")
@pytest.mark.parametrize("kind", ["closed", "name too long"])
def test_a_model_runs_the_same_without_a_home(tmp_path: Path, data: Path, kind: str) -> None:
    path = str(data / "tiny-llama-q8_0" / "tiny-llama-q8_0.gguf")
    wanted = run(MODEL.replace("assert not", "assert"), prism_home(), path)
    assert run(MODEL, unusable(kind, tmp_path), path) == wanted
