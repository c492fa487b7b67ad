"""What loading a model of 1.7 billion weights takes: memory for its file and its cache, and little work when warm."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ops.bench import synthetic

ROOT = Path(__file__).parents[3]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_one_bit_model_of_bonsais_shape_needs_its_file_and_its_cache(tmp_path: Path) -> None:
    path = synthetic.preset(tmp_path / "model.gguf", "qwen3-1.7b", type="Q1_0")
    size = path.stat().st_size
    for warm in (False, True):
        script = [sys.executable, "-m", "tests.unit.engine.loading", str(path)]
        ended = subprocess.run(script, capture_output=True, text=True, cwd=ROOT, timeout=600, check=True)
        seconds, loaded, peak, stated, shared = json.loads(ended.stdout)
        print(f"warm {warm}: {seconds:.2f} s of CPU, peaks {loaded >> 20} and {peak >> 20} MiB, file {size >> 20} MiB")
        assert shared
        assert max(loaded, peak) < 1.3 * size + stated["kv_cache"]
        assert stated["weights"] < 1.01 * size
        assert loaded < 2.2 * size, "more than one copy of the weights was in memory"
    assert seconds < 2.0, "of CPU time: a warm start maps what the first one packed"
