"""One model on several instruction sets: the same bits wherever products are fused, the same answer elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.engine.stepping import after, each, random_ids, tiny

AVX2 = {
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+avx,+sse4.2,+sse4.1,+ssse3,+bmi,+bmi2,+popcnt",
}
SSE2 = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": ""}
NAMES = ("llama-q8_0", "qwen35-q8_0", "qwen3-q4_k_m", "qwen3-q1_0", "qwen3-q2_0")
SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from tests.unit.engine.test_processors import logits_of
np.save(sys.argv[3], logits_of(Path(sys.argv[1]), sys.argv[2]))
"""


def logits_of(data: Path, name: str) -> NDArray[np.float32]:
    """Some decoded and some prefilled positions."""
    with tiny(data, name, context_tokens=512) as model:
        decoder = model.decoder()
        return np.concatenate([after(decoder, random_ids(11, 301), [100])[None], each(decoder, [1, 2, 3])])


def elsewhere(data: Path, name: str, processor: dict[str, str], out: Path) -> NDArray[np.float32]:
    """The same in a process that compiles for another processor."""
    subprocess.run(
        [sys.executable, "-c", SCRIPT, str(data), name, str(out)],
        env={**os.environ, **processor},
        cwd=Path(__file__).parents[3],
        check=True,
        timeout=280,
    )
    result: NDArray[np.float32] = np.load(out)
    return result


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_avx2_gives_the_bits_of_this_processor(data: Path, tmp_path: Path, name: str) -> None:
    assert np.array_equal(elsewhere(data, name, AVX2, tmp_path / "out.npy"), logits_of(data, name))


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_plain_vector_code_gives_the_same_answer(data: Path, tmp_path: Path, name: str) -> None:
    here = logits_of(data, name)
    error = elsewhere(data, name, SSE2, tmp_path / "out.npy") - here
    assert np.sqrt(np.mean(error**2)) < 0.06 * here.std()  # roundings of int8 activations that fall the other way
