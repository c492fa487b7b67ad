"""Logits against the reference values, by the rule of tests/data/README.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from prism_core import Limits, Model, Prefill, Runtime, open_model
from prism_core.limits import Generation
from tests.unit.engine.stepping import ARCHITECTURES, after, each, tiny

QUANTISED = [
    *(f"{name}-q8_0" for name in ARCHITECTURES),
    *(f"qwen3-{kind}" for kind in ("q1_0", "q2_0", "q4_0", "q4_1", "q4_k_m", "q5_0", "q6_k")),
]
EXACT_BOUND = 1e-5
GELU_TABLE_BOUND = 1e-3
"""The reference engine reads GELU from a float16 table, which moves tiny-gemma3's own `f32` run by 5e-4."""


def reference(folder: Path) -> tuple[dict[str, Any], Callable[[str], NDArray[np.float32]]]:
    """ref.json, and a loader of the folder's arrays."""
    return json.loads((folder / "ref.json").read_text()), lambda name: np.load(folder / f"{name}.npy")


def rms(difference: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean(np.square(difference.astype(np.float64)))))


def yardstick(ref: dict[str, Any], prompt: str) -> float:
    """How far the reference engine itself is from `f32`: the larger of its two runs."""
    return max(float(ref["difference"][f"{prompt}: {run} vs f32"]["rms"]) for run in ("default", "exactkv"))


def check_best_tokens(got: NDArray[np.float32], wanted: NDArray[np.float32], bound: float) -> None:
    """The same best token wherever the reference's gap exceeds the bound."""
    top = np.sort(wanted, axis=1)
    clear = top[:, -1] - top[:, -2] > bound
    assert np.array_equal(got.argmax(axis=1)[clear], wanted.argmax(axis=1)[clear])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_float32_weights_and_cache_reproduce_every_position(data: Path, architecture: str) -> None:
    ref, load = reference(data / f"tiny-{architecture}-q8_0")
    wanted = load("logits_all64_f32")
    with tiny(data, f"{architecture}-q8_0", exact=True) as model:
        got = each(model.decoder(), ref["all64_ids"])
    bound = GELU_TABLE_BOUND if architecture == "gemma3" else EXACT_BOUND
    error = np.abs(got - wanted).max(axis=1) / np.abs(wanted).max(axis=1)
    assert error.max() < bound


@pytest.mark.parametrize("name", QUANTISED)
def test_int8_activations_stay_within_the_reference_engines_own_error(data: Path, name: str) -> None:
    ref, load = reference(data / f"tiny-{name}")
    wanted = load("logits_all64_f32")
    with tiny(data, name) as model:
        got = each(model.decoder(), ref["all64_ids"])
    bound = yardstick(ref, "all64")
    assert rms(got - wanted) <= 1.1 * bound
    check_best_tokens(got, wanted, 4 * bound)


def test_float16_weights_stay_within_a_hundredth(data: Path) -> None:
    ref, load = reference(data / "tiny-qwen3-f16")
    wanted = load("logits_all64_exactkv")
    with tiny(data, "qwen3-f16") as model:
        got = each(model.decoder(), ref["all64_ids"])
    assert rms(got - wanted) <= 0.01


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Model:
    return open_model(smollm2_path)


@pytest.fixture(scope="module")
def gemma3(gemma3_path: Path) -> Model:
    return open_model(gemma3_path)


def check_prompt(model: Model, folder: Path, prompt: str) -> None:
    """Logits after the prompt, and 32 greedy ids up to the first doubtful step."""
    ref, load = reference(folder)
    assert model.identity.startswith(ref["sha256"])
    ids, wanted = ref["prompts"][prompt]["ids"], load(f"logits_{prompt}_f32")
    decoder = model.decoder()
    got = after(decoder, ids)
    bound = yardstick(ref, prompt)
    assert rms(got - wanted) <= 1.3 * bound
    check_best_tokens(got[None], wanted[None], 4 * bound)
    answer: list[int] = []
    Runtime(decoder, Limits(4096, 0, 1 << 30)).generate(ids, Generation(32), prefill=Prefill(512), emit=answer.append)
    run = ref["runs"]["f32"]["prompts"][prompt]
    doubtful = next((step for step, gap in enumerate(run["gap"]) if gap < 4 * bound), 32)
    assert answer[:doubtful] == run["greedy32"][:doubtful]


@pytest.mark.model
@pytest.mark.parametrize("prompt", ["ascii", "long"])
def test_smollm2_answers_as_the_reference_does(smollm2: Model, data: Path, prompt: str) -> None:
    check_prompt(smollm2, data / "smollm2", prompt)


@pytest.mark.model
def test_gemma3_answers_as_the_reference_does(gemma3: Model, data: Path) -> None:
    check_prompt(gemma3, data / "gemma3", "ascii")


@pytest.mark.model
@pytest.mark.full
def test_gemma3_answers_past_its_sliding_window(gemma3: Model, data: Path) -> None:
    check_prompt(gemma3, data / "gemma3", "long")
