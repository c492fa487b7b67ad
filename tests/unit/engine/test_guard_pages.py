"""No kernel reads or writes past the end of a buffer: each ends at a forbidden page, in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ops.bench import synthetic
from tests.unit.engine.stepping import ARCHITECTURES
from tests.unit.models.mutations import shape_at_random

FIXTURES = [
    *(f"{name}-q8_0" for name in ARCHITECTURES),
    *(f"qwen3-{kind}" for kind in ("q1_0", "q2_0", "q4_0", "q4_1", "q4_k_m", "q5_0", "q6_k", "f16")),
]
ODD: dict[str, dict[str, Any]] = {
    "odd sizes in float32": {
        "architecture": "llama", "type": "F32", "embd": 72, "ffn": 101, "heads": 3, "kv_heads": 3, "head_dim": 22,
        "vocab": 517, "rope_factors": True,
    },
    "odd sizes in float16": {
        "architecture": "qwen2", "type": "F16", "embd": 78, "ffn": 55, "heads": 6, "kv_heads": 2, "head_dim": 26,
        "vocab": 517,
    },
    "one block wide": {
        "architecture": "qwen3", "type": "Q8_0", "embd": 32, "ffn": 32, "heads": 1, "kv_heads": 1, "head_dim": 32,
        "vocab": 517,
    },
    "rows that fill no tile": {
        "architecture": "qwen3", "type": "Q4_0", "embd": 96, "ffn": 160, "heads": 16, "kv_heads": 1, "head_dim": 34,
        "vocab": 519, "tied": False,
    },
    "rotated hybrid": {
        "architecture": "qwen35", "type": "PQ2_0", "layers": 4, "key_heads": 1, "value_heads": 2, "state": 64,
        "embd": 128, "ffn": 384, "heads": 3, "kv_heads": 1, "head_dim": 128, "vocab": 517,
        "hadamard": synthetic.Rotation(block=128, rotate=False),
    },
    "bfloat16": {"architecture": "gemma3", "type": "BF16", "embd": 40, "ffn": 33, "heads": 2, "kv_heads": 1,
        "head_dim": 18, "vocab": 519},
}  # fmt: skip


def run_guarded(mode: str, *paths: Path) -> None:
    """Run guarded.py over files; it compares each with an unguarded decoder and says ok."""
    script = [sys.executable, "-m", "tests.unit.engine.guarded", mode, *map(str, paths)]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=280, cwd=Path(__file__).parents[3])
    assert (ended.returncode, ended.stdout) == (0, "ok\n"), ended.stderr[-2000:]


def test_tiny_models_stay_inside_their_buffers(data: Path) -> None:
    run_guarded("packed", *(data / f"tiny-{name}" / f"tiny-{name}.gguf" for name in FIXTURES))


def test_odd_shapes_stay_inside_their_buffers(tmp_path: Path) -> None:
    files = [synthetic.build(tmp_path / f"{name}.gguf", **options) for name, options in ODD.items()]
    run_guarded("packed", *files)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_shapes_stay_inside_their_buffers(tmp_path: Path, first: int) -> None:
    files = []
    for seed in range(first, first + 20):
        architecture, options = shape_at_random(np.random.default_rng([seed, 7]))
        files.append(synthetic.build(tmp_path / f"{seed}.gguf", architecture, seed=seed, **options))
    run_guarded("packed", *files)
    run_guarded("exact", *files)


def test_float32_weights_and_cache_stay_inside_their_buffers(data: Path) -> None:
    run_guarded("exact", *(data / f"tiny-{name}-q8_0" / f"tiny-{name}-q8_0.gguf" for name in ("llama", "qwen35")))


def test_one_byte_past_an_end_ends_the_process() -> None:
    script = (
        "import ctypes; from tests.unit.engine.guarded import guarded; buffer = guarded(100); "
        "ctypes.string_at(buffer.ctypes.data, 100); print('inside', flush=True); "
        "ctypes.string_at(buffer.ctypes.data, 101)"
    )
    root = Path(__file__).parents[3]
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, cwd=root)
    assert (ended.returncode, ended.stdout) == (-signal.SIGSEGV, "inside\n")
