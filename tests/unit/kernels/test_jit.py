"""Compiled kernels are kept, never stale, and shared by any number of processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import prism_core
from prism_core.kernels import jit

ROOT = Path(prism_core.__file__).parents[1]

PROGRAM = """
import json
from prism_core.kernels import jit, memory
import numpy as np

@jit.kernel("int64(int64)")
def answer(x):
    return x + FACTOR

@jit.entry("void(int64, int64)")
def put(to, value):
    memory.store_i64(to, value * FACTOR)

cell = np.zeros(1, np.int64)
first = answer(2)
put(cell.ctypes.data, 3)
print(json.dumps([first, int(cell[0]), len(jit.compiled), str(jit.cache_folder())]))
"""


class Program:
    """A program with two kernels, in a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "program.py"
        self.home = folder / "home"
        self.root = ROOT
        self.extra: dict[str, str] = {}

    def start(self, factor: int) -> subprocess.Popen[str]:
        self.file.write_text(PROGRAM.replace("FACTOR", str(factor)))
        environment = {**os.environ, "PRISM_HOME": str(self.home), "PYTHONPATH": str(self.root), **self.extra}
        return subprocess.Popen([sys.executable, str(self.file)], env=environment, stdout=subprocess.PIPE, text=True)

    def run(self, factor: int = 10) -> tuple[int, int, int, str]:
        return self.result(self.start(factor))

    @staticmethod
    def result(process: subprocess.Popen[str]) -> tuple[int, int, int, str]:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        first, second, compiled, folder = json.loads(output)
        return first, second, compiled, folder

    def cached(self) -> list[Path]:
        return sorted((self.home / "numba").glob("*/*.nbc"))


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


def test_a_second_process_loads_what_the_first_compiled(program: Program) -> None:
    assert program.run()[:3] == (12, 30, 2)
    assert program.run()[:3] == (12, 30, 0)
    assert len(program.cached()) == 2


def test_a_changed_kernel_is_compiled_again(program: Program) -> None:
    assert program.run(10)[:3] == (12, 30, 2)
    assert program.run(11)[:3] == (13, 33, 2)


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "flipped"])
def test_a_damaged_file_is_compiled_again_and_replaced(program: Program, damage: str) -> None:
    program.run()
    for path in program.cached():
        content = bytearray(path.read_bytes())
        if damage == "flipped":
            content[len(content) // 2] ^= 1
        path.write_bytes(
            {"truncated": content[: len(content) // 2], "garbage": b"x" * 999, "empty": b""}.get(damage, content)
        )
    assert program.run()[:3] == (12, 30, 2)
    assert program.run()[:3] == (12, 30, 0)


def test_a_folder_that_cannot_be_made_costs_compilation_only(program: Program) -> None:
    program.home = Path("/dev/null/home")
    assert program.run()[:3] == (12, 30, 2)


def test_many_processes_at_once_compile_each_kernel_once(program: Program) -> None:
    processes = [program.start(10) for _ in range(5)]
    results = [program.result(process) for process in processes]
    assert {result[:2] for result in results} == {(12, 30)}
    assert sum(result[2] for result in results) == 2
    assert not list((program.home / "numba").glob("*/*.tmp"))


def test_any_change_of_a_kernel_source_moves_the_cache(program: Program, tmp_path: Path) -> None:
    before = program.run()[3]
    shutil.copytree(ROOT / "prism_core", tmp_path / "copy" / "prism_core", ignore=shutil.ignore_patterns("__pycache__"))
    program.root = tmp_path / "copy"
    assert program.run()[3] == before
    with (tmp_path / "copy" / "prism_core" / "kernels" / "memory.py").open("a") as source:
        source.write("# changed\n")
    assert program.run()[3] != before
    assert program.run()[:3] == (12, 30, 0)


def test_another_processor_has_another_cache(program: Program) -> None:
    before = program.run()[3]
    program.extra = {"NUMBA_CPU_NAME": "generic"}
    assert program.run()[3] != before
    program.extra = {}
    assert program.run()[:3] == (12, 30, 0)


def test_folders_that_nobody_uses_are_removed_in_time(program: Program) -> None:
    folder = Path(program.run()[3])
    old, recent = folder.with_name("old"), folder.with_name("recent")
    for other, days in ((old, jit.KEEP_DAYS + 1), (recent, jit.KEEP_DAYS - 1), (folder, jit.KEEP_DAYS + 1)):
        other.mkdir(exist_ok=True)
        then = time.time() - days * 86400
        os.utime(other, (then, then))
    assert program.run()[:3] == (12, 30, 0)
    assert not old.exists()
    assert recent.exists()
    assert time.time() - folder.stat().st_mtime < 3600


def test_a_kernel_of_a_factory_needs_a_name() -> None:
    def made(x: int) -> int:
        return x

    with pytest.raises(ValueError, match="needs name="):
        jit.kernel("int64(int64)")(made)
    with pytest.raises(ValueError, match="needs name="):
        jit.entry("void(int64)")(made)


def test_two_kernels_of_a_module_cannot_share_a_name() -> None:
    def one(x: int) -> int:
        return x

    def two(x: int) -> int:
        return x + 1

    assert jit.kernel("int64(int64)", name="shared_name")(one)(4) == 4
    with pytest.raises(ValueError, match=r"test_jit\.shared_name: two kernels"):
        jit.kernel("int64(int64)", name="shared_name")(two)


def test_the_signature_is_the_one_that_was_given() -> None:
    def half(x: float) -> float:
        return x / 2

    halved = jit.kernel("float64(float64)", name="half")(half)
    assert halved(3) == 1.5
    assert halved(5.0) == 2.5
    assert len(halved.overloads) == 1
