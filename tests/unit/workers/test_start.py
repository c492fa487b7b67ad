"""A worker process that can never answer ends with code 2 and one sentence on its standard output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ops.bench import synthetic
from tests.unit.engine.stepping import home_with_shared_caches
from tests.unit.models.mutations import rewritten, tiny
from workers.config import WorkerConfig
from workers.main import EXIT_UNUSABLE, PROGRESS_S, Orders, reporting

ROOT = Path(__file__).parents[3]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PRISM_HOME for each test."""
    home = home_with_shared_caches(tmp_path / "home")
    monkeypatch.setenv("PRISM_HOME", str(home))
    return home


def refusal(path: Path, **options: Any) -> str:
    """What the process says of a model; no broker is there, and none is asked for."""
    config = WorkerConfig(model=str(path), redis_url="redis://127.0.0.1:1", **options)
    orders = Orders(config=config, name="w", parent=os.getpid())
    ended = subprocess.run(
        [sys.executable, "-m", "workers.main"],
        input=orders.to_json() + "\n", capture_output=True, text=True, cwd=ROOT, timeout=120,
    )  # fmt: skip
    assert ended.returncode == EXIT_UNUSABLE, ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout.startswith(f"{path}: ")
    assert ended.stdout.isprintable()
    return ended.stdout


def test_a_model_whose_first_token_fails_is_named(tmp_path: Path, home: Path) -> None:
    def change(tensors: list[Any]) -> list[Any]:
        return [
            (*one[:3], np.full(len(one[3]) // 4, 3e9, np.float32).view(np.uint8)) if ".ffn_" in one[0] else one
            for one in tensors
        ]

    path = rewritten(tiny(tmp_path / "model.gguf", "llama", type="F32"), change)
    assert "cannot make a first token: the numbers that reach tensor blk.0.ffn_down.weight" in refusal(path)


def test_a_model_over_the_budget_is_refused_before_it_is_packed(tmp_path: Path, home: Path) -> None:
    path = synthetic.qwen3(tmp_path / "model.gguf", layers=1, context=32768)
    assert "over the memory budget of 16,777,216" in refusal(path, memory_bytes=16 << 20, context_tokens=32768)
    assert not (home / "packed").exists()


@pytest.mark.parametrize("kind", ["missing", "folder", "empty", "cut"])
def test_a_file_that_is_no_model_is_named(tmp_path: Path, home: Path, kind: str) -> None:
    path = tmp_path / "model.gguf"
    if kind == "folder":
        path.mkdir()
    elif kind == "empty":
        path.touch()
    elif kind == "cut":
        synthetic.qwen3(path, layers=1)
        os.truncate(path, path.stat().st_size // 2)
    assert len(refusal(path)) < 300


def test_a_slow_start_says_what_it_is_doing_and_a_fast_one_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr("workers.main.time.monotonic", lambda: now[0])
    report = reporting("w1")
    with caplog.at_level("INFO"):
        report("packing weights", 0.0)
        now[0] += PROGRESS_S - 0.1
        report("packing weights", 0.9)
        assert not caplog.records
        for share in (0.25, 0.5, 0.75):
            now[0] += 0.6 * PROGRESS_S
            report("preparing kernels", share)
    said = [(record.getMessage(), record.__dict__["done"]) for record in caplog.records]
    assert said == [("preparing kernels", "25%"), ("preparing kernels", "75%")]
