"""Numbers that float32 cannot carry end a step with an error that names a tensor, and never as fluent nonsense.

Which weights make numbers overflow is drawn at random in mutations.py; here it is known where they do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prism_core import DecoderError, Generation, Limits, Model, Prefill, Runtime, open_model
from tests.unit.engine.stepping import each, no_check
from tests.unit.models.mutations import rewritten, tiny

IDS = [5, 9, 300, 7, 7, 21, 350, 8, 64, 65, 2, 31]
FFN = {name: f"blk.1.{name}.weight" for name in ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down")}
KINDS: dict[str, tuple[str, dict[str, float], str]] = {
    # architecture, factors of tensors, the tensor that is named
    "queries": ("llama", {"blk.1.attn_norm.weight": 2e9, "blk.1.attn_q.weight": 2e9}, "blk.1.attn_output.weight"),
    "keys": ("qwen2", {"blk.1.attn_norm.weight": 2e9, "blk.1.attn_k.weight": 2e9}, "blk.1.attn_output.weight"),
    "values": ("gemma3", {"blk.1.attn_norm.weight": 2e9, "blk.1.attn_v.weight": 2e9}, "blk.1.attn_output.weight"),
    "a gated product": ("qwen3", {FFN["ffn_norm"]: 2e9, FFN["ffn_gate"]: 1e9, FFN["ffn_up"]: 1e9}, FFN["ffn_down"]),
    "the residual stream": (
        "qwen3", {FFN["ffn_norm"]: 1.0, FFN["ffn_gate"]: 1e4, FFN["ffn_up"]: 1e4, FFN["ffn_down"]: 2e9},
        "blk.2.attn_norm.weight",
    ),
    "a convolution": (
        "qwen35", {"blk.1.attn_norm.weight": 2e9, "blk.1.attn_qkv.weight": 2e9}, "blk.1.ssm_dt.bias",
    ),
}  # fmt: skip


@pytest.fixture(params=KINDS)
def kind(request: Any, tmp_path: Path) -> tuple[Path, str]:
    """A file, and the tensor that its overflow is to be named by."""
    architecture, factors, named = KINDS[request.param]
    path = tiny(tmp_path / "model.gguf", architecture, type="F16", ffn=64, layers=4 if architecture == "qwen35" else 3)
    return magnified(path, factors), named


def magnified(path: Path, factors: dict[str, float]) -> Path:
    """The file with some tensors as float32 of all but equal size."""

    def change(tensors: list[Any]) -> list[Any]:
        changed = []
        for name, shape, number, data in tensors:
            if name in factors:
                values = np.full(int(np.prod(shape)), factors[name], np.float32)
                values[::3] *= 0.7
                changed.append((name, shape, 0, values.view(np.uint8)))
            else:
                changed.append((name, shape, number, data))
        return changed

    return rewritten(path, change)


def open_both(path: Path) -> list[Model]:
    return [open_model(path, exact=exact, threads=threads) for exact, threads in ((False, 1), (True, 2))]


def test_a_step_that_overflows_names_the_tensor_and_the_position(kind: tuple[Path, str]) -> None:
    path, named = kind
    for model in open_both(path):
        with model:
            decoder = model.decoder()
            with pytest.raises(DecoderError) as caught:
                each(decoder, IDS)
            assert f"tensor {named} at position {decoder.length} overflow float32" in str(caught.value)
            assert decoder.length < len(IDS)


def test_a_block_that_overflows_names_its_positions(kind: tuple[Path, str]) -> None:
    path, named = kind
    for model in open_both(path):
        with model, pytest.raises(DecoderError) as caught:
            model.decoder().ingest_block(IDS, no_check)
        assert f"tensor {named} at positions 0 to {len(IDS) - 1} overflow float32" in str(caught.value)


def overflowing_at(token: int, folder: Path, architecture: str) -> Path:
    """A file whose numbers overflow at that token only: it alone has a first coordinate, and only ffn 0 reads that."""
    path = tiny(folder / "model.gguf", architecture, type="F32", layers=4 if architecture == "qwen35" else 2)

    def change(tensors: list[Any]) -> list[Any]:
        changed = []
        for name, shape, number, data in tensors:
            values = data.view(np.float32).copy().reshape(shape[::-1])
            if name == "token_embd.weight":
                values[:, 0] = 0
                values[token, 0] = 1
            elif name.endswith(("attn_output.weight", "ssm_out.weight")):
                values[:] = 0
            elif name.endswith(("ffn_gate.weight", "ffn_up.weight")):
                values[:] = 0
                if ".0." in name:
                    values[:, 0] = 3e9
            changed.append((name, shape, number, values.reshape(-1).view(np.uint8)))
        return changed

    return rewritten(path, change)


@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
@pytest.mark.parametrize("block", [1, 128])
def test_a_conversation_is_as_it_was_before_the_turn_that_overflowed(
    tmp_path: Path, architecture: str, block: int
) -> None:
    with open_model(overflowing_at(13, tmp_path, architecture)) as model:
        limits = Limits(model.context_tokens, 2, 1 << 30)
        runtime, whole = Runtime(model.decoder(), limits), Runtime(model.decoder(), limits)
        first: list[int] = []
        runtime.generate(IDS, Generation(4), emit=first.append)
        for at in range(4):
            bad = [*IDS, *first, 3, 4, 5]
            bad[len(IDS) + at] = 13
            with pytest.raises(DecoderError, match=r"blk\.0\.ffn_down\.weight at position.* overflow float32"):
                runtime.generate(bad, Generation(4), prefill=Prefill(block))
        longer, answers = [*IDS, *first, 3, 4, 5], ([], [])
        for each_, answer in zip((runtime, whole), answers, strict=True):
            each_.generate(longer, Generation(4), prefill=Prefill(block), emit=answer.append)
        assert answers[0] == answers[1]
