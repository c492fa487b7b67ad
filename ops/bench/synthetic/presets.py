"""The shapes that benchmarks name, and the type mixes that real files of those shapes have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .models import Kinds, build


def _shape(
    architecture: str,
    layers: int,
    embd: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    **more: Any,
) -> dict[str, Any]:
    names = "architecture layers embd ffn heads kv_heads head_dim vocab"
    values = (architecture, layers, embd, ffn, heads, kv_heads, head_dim, vocab)
    return dict(zip(names.split(), values, strict=True)) | {"context": 32768} | more


YARN_8B = {
    "qwen3.rope.scaling.type": "yarn",
    "qwen3.rope.scaling.factor": 4.0,
    "qwen3.rope.scaling.original_context_length": 16384,
}

PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-1.7b": _shape("qwen3", 28, 2048, 6144, 16, 8, 128, 151669),
    "qwen3-0.6b": _shape("qwen3", 28, 1024, 3072, 16, 8, 128, 151936),
    "qwen3-4b": _shape("qwen3", 36, 2560, 9728, 32, 8, 128, 151669),
    "qwen3-8b": _shape("qwen3", 36, 4096, 12288, 32, 8, 128, 151669, tied=False, context=65536, extra=YARN_8B),
    "qwen2-0.5b": _shape("qwen2", 24, 896, 4864, 14, 2, 64, 151936, tied=False),
    "qwen35-0.8b": _shape(
        "qwen35", 24, 1024, 3584, 8, 2, 256, 248320, tied=True, key_heads=16, value_heads=16, state=128
    ),
}
"""`build` options by name. The qwen35 one has the published layer count and width of 0.8B; its other numbers are
plausible, not read from a file."""


def preset(path: str | Path, name: str, *, type: Kinds = "Q1_0", **options: Any) -> Path:
    """Write the model of that shape with random weights of `type`; further options as in `build`."""
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    if type == "Q4_K_M":
        type = q4_k_m_of_a_narrow_model
    return build(path, **{**PRESETS[name], "type": type, **options})


def q4_k_m_of_a_narrow_model(name: str, layers: int = 24) -> str:
    """The type of each tensor in a Q4_K_M file of qwen2 0.5B.

    Rows of 896 do not hold K-quant blocks, so most are Q5_0; ffn_down is Q6_K in half of the layers and Q4_K in the
    others; the embedding and the head are Q8_0.
    """
    if name in ("token_embd.weight", "output.weight"):
        return "Q8_0"
    found = re.fullmatch(r"blk\.(\d+)\.ffn_down\.weight", name)
    if found is None:
        return "Q5_0"
    layer = int(found[1])
    early, late = layer < layers // 8, layer >= 7 * layers // 8
    return "Q6_K" if early or late or (layer - layers // 8) % 3 == 2 else "Q4_K"
