"""The engine with float32 weights and cache against an independent float64 forward, where no reference file exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ops.bench import synthetic
from prism_core import open_model
from tests.unit.engine.stepping import each, random_ids
from tests.unit.models.float64 import Forward, gelu_by_half_table
from tests.unit.models.test_fixtures import reference

BOUND = 1e-5
HYBRID_BOUND = 5e-5
"""Of qwen35: its state carries float32 roundings from token to token."""
INT8_BOUND = 0.08
"""Share of the logits' spread that int8 activations may move them by (the reference engine: 0.02-0.05)."""


def relative(got: NDArray[Any], wanted: NDArray[Any]) -> float:
    """The largest error of a position, relative to its largest logit."""
    return float((np.abs(got - wanted).max(axis=1) / np.abs(wanted).max(axis=1)).max())


def check(path: Path, ids: list[int]) -> None:
    """Exact mode agrees to 1e-5, the normal one within the error of int8 activations."""
    wanted = Forward(path).each(ids)
    with open_model(path, exact=True) as model:
        bound = HYBRID_BOUND if model.architecture == "qwen35" else BOUND
        assert relative(each(model.decoder(), ids), wanted) < bound
    with open_model(path) as model:
        error = each(model.decoder(), ids) - wanted
    assert np.sqrt(np.mean(error**2)) < INT8_BOUND * wanted.std()


SHAPES: dict[str, dict[str, Any]] = {
    "llama with llama3 factors": {"architecture": "llama", "rope_factors": True},
    "llama with linear scaling": {
        "architecture": "llama",
        "extra": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    },
    "llama with the old key of linear scaling": {"architecture": "llama", "extra": {"llama.rope.scale_linear": 2.0}},
    "llama with one kv head per head": {"architecture": "llama", "heads": 4, "kv_heads": 4, "head_dim": 64},
    "llama with heads of 80": {"architecture": "llama", "heads": 4, "kv_heads": 1, "head_dim": 80},
    "qwen2, untied": {"architecture": "qwen2", "tied": False},
    "qwen3 with YaRN": {
        "architecture": "qwen3",
        "extra": {
            "qwen3.rope.scaling.type": "yarn",
            "qwen3.rope.scaling.factor": 4.0,
            "qwen3.rope.scaling.original_context_length": 64,
        },
    },
    "qwen3 with YaRN and an attention factor": {
        "architecture": "qwen3",
        "extra": {
            "qwen3.rope.scaling.type": "yarn",
            "qwen3.rope.scaling.factor": 8.0,
            "qwen3.rope.scaling.original_context_length": 128,
            "qwen3.rope.scaling.attn_factor": 0.9,
        },
    },
    "qwen3 with heads wider than the model": {"architecture": "qwen3", "heads": 8, "kv_heads": 2, "head_dim": 128},
    "gemma3 with softcapping and a pattern of 2": {
        "architecture": "gemma3",
        "layers": 3,
        "extra": {"gemma3.final_logit_softcapping": 3.0, "gemma3.attention.sliding_window_pattern": 2},
    },
    "gemma3 with scaled global layers": {
        "architecture": "gemma3",
        "layers": 7,
        "extra": {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0},
    },
    "qwen35": {"architecture": "qwen35", "layers": 4, "key_heads": 2, "value_heads": 6, "state": 64},
    "qwen35 that lists its recurrent layers": {
        "architecture": "qwen35",
        "layers": 4,
        "tied": True,
        "extra": {"qwen35.attention.recurrent_layers": np.array([True, True, True, False])},
    },
    "qwen35 whose last layers only predict": {
        "architecture": "qwen35",
        "layers": 5,
        "extra": {"qwen35.nextn_predict_layers": 1},
    },
}
FAR = {"qwen3 with YaRN", "llama with llama3 factors"}


@pytest.mark.parametrize("name", SHAPES)
def test_synthetic_models_agree_with_their_equations(tmp_path: Path, name: str) -> None:
    options = {"type": "Q8_0", "vocab": 512, **SHAPES[name]}
    path = synthetic.build(tmp_path / "model.gguf", **options)
    check(path, random_ids(3, 300 if name in FAR else 70, 500))


ROTATED: dict[str, dict[str, Any]] = {
    "tied, version 2": {"architecture": "qwen3", "hadamard": synthetic.Rotation(block=64)},
    "untied, version 1": {"architecture": "qwen3", "tied": False, "hadamard": synthetic.Rotation(block=128)},
    "without signs": {
        "architecture": "llama",
        "tied": False,
        "hadamard": synthetic.Rotation(block=256, explicit_signs=False),
    },
    "embedding left alone": {
        "architecture": "qwen3",
        "tied": False,
        "hadamard": synthetic.Rotation(block=32, embedding=False),
    },
    "hybrid with grouped value heads": {
        "architecture": "qwen35",
        "layers": 4,
        "key_heads": 2,
        "value_heads": 6,
        "state": 64,
        "hadamard": synthetic.Rotation(block=64, grouped=True, heads=(2, 3, 64)),
    },
}


@pytest.mark.parametrize("name", ROTATED)
def test_rotated_models_agree_with_their_equations(tmp_path: Path, name: str) -> None:
    path = synthetic.build(tmp_path / "model.gguf", **{"type": "Q8_0", "vocab": 512, **ROTATED[name]})
    check(path, random_ids(4, 40, 500))


@pytest.mark.parametrize("name", ROTATED)
def test_a_rotated_model_equals_its_unrotated_original(tmp_path: Path, name: str) -> None:
    ids, options = random_ids(5, 40, 500), {"type": "F32", "vocab": 512, **ROTATED[name]}
    rotated = synthetic.build(tmp_path / "rotated.gguf", **options)
    plain = synthetic.build(tmp_path / "plain.gguf", **{**options, "hadamard": None})
    with open_model(rotated) as first, open_model(plain) as second:
        assert first.identity != second.identity
        assert relative(each(first.decoder(), ids), each(second.decoder(), ids)) < 1e-3


def test_ternary_weights_of_one_value_give_the_same_bits_in_every_container(tmp_path: Path) -> None:
    ids, runs = random_ids(6, 50, 500), {}
    for kind in ("PQ2_0", "PTQ1_0", "Q2_0_G128"):
        path = synthetic.qwen3(tmp_path / f"{kind}.gguf", type=kind, vocab=512)
        with open_model(path) as model:
            runs[kind] = each(model.decoder(), ids)
    assert np.array_equal(runs["PQ2_0"], runs["PTQ1_0"])
    assert np.array_equal(runs["PQ2_0"], runs["Q2_0_G128"])


@pytest.mark.parametrize("kind", ["PQ2_0", "PTQ1_0", "Q2_0", "Q2_0_G128", "Q1_0", "Q1_0_V1", "TQ1_0", "TQ2_0"])
def test_low_bit_models_agree_with_their_equations(tmp_path: Path, kind: str) -> None:
    check(synthetic.qwen3(tmp_path / "model.gguf", type=kind, vocab=512), random_ids(7, 40, 500))


@pytest.mark.parametrize("kind", ["Q5_1", "Q2_K", "Q3_K", "Q5_K", "IQ4_NL", "MXFP4", "BF16", "F16", "F32"])
def test_other_types_agree_with_their_equations(tmp_path: Path, kind: str) -> None:
    check(synthetic.llama(tmp_path / "model.gguf", type=kind, vocab=512), random_ids(8, 30, 500))


def test_the_reference_of_gemma3_differs_by_its_table_of_gelu_only(data: Path) -> None:
    ref, load = reference(data / "tiny-gemma3-q8_0")
    path = data / "tiny-gemma3-q8_0" / "tiny-gemma3-q8_0.gguf"
    ids = ref["all64_ids"]
    # Later positions meet arguments that lie so close to a step of the table that float32 and float64 take two entries.
    assert relative(Forward(path, gelu_by_half_table).each(ids[:1]), load("logits_all64_f32")[:1]) < 1e-6
    assert relative(Forward(path).each(ids[:1]), load("logits_all64_f32")[:1]) > 1e-4
    with open_model(path, exact=True) as model:
        assert relative(each(model.decoder(), ids), Forward(path).each(ids)) < BOUND
