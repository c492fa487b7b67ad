"""Synthetic GGUF files: any architecture, any shape, any tensor type, seeded; for tests and benchmarks.

    from ops.bench import synthetic

    synthetic.qwen3(path, layers=2, embd=256, ffn=512, heads=4, kv_heads=2, head_dim=64, vocab=1024, type="Q1_0")
    synthetic.llama(...), .qwen2(...), .gemma3(...), .qwen35(...)   the same options, see `build`; all return the path
    synthetic.preset(path, "qwen3-1.7b", type="Q1_0")               benchmark shapes, random bits, written in seconds

    synthetic.quantize("PTQ1_0", float32[rows, cols]) -> uint8[rows, row_bytes]      every supported type
    synthetic.random_blocks(rng, rows, cols, TensorType.Q4_K) -> uint8[rows, row_bytes]
    synthetic.write_gguf(path, metadata, [(name, shape_ne, type_id, data), ...])     bytes as told, right or wrong
    synthetic.gguf_bytes(metadata, tensors) -> bytes,  synthetic.write_split(folder, stem, metadata, tensors, parts=3)

Types are `TensorType`s or their names, and "Q2_0_G128" for the legacy 128-weight Q2_0 that is written as id 42. `type`
may also be a function from tensor name to type. `hadamard=synthetic.Rotation(block=64)` makes the rotated twin of the
same seed's model (types F32, F16, BF16 or Q8_0 keep it close to the original), `Rotation(rotate=False)` only declares
it. `extra={"qwen3.rope.scaling.type": "yarn", ...}` adds keys, None as a value removes one. `parts=3` splits the file.
"""

from __future__ import annotations

from .container import (
    Tensor,
    Typed,
    gguf_bytes,
    header_bytes,
    metadata_bytes,
    record_bytes,
    string_bytes,
    value_bytes,
    write_gguf,
    write_split,
)
from .models import build, gemma3, llama, qwen2, qwen3, qwen35
from .presets import PRESETS, preset, q4_k_m_of_a_narrow_model
from .quantizers import LEGACY_Q2_0, quantize, resolve
from .random_weights import float_rows, random_blocks
from .rotation import Rotation, group_value_heads, hadamard
from .vocabulary import bpe, spm

__all__ = [
    "LEGACY_Q2_0", "PRESETS", "Rotation", "Tensor", "Typed", "bpe", "build", "float_rows", "gemma3", "gguf_bytes",
    "group_value_heads", "hadamard", "header_bytes", "llama", "metadata_bytes", "preset", "q4_k_m_of_a_narrow_model",
    "quantize", "qwen2", "qwen3", "qwen35", "random_blocks", "record_bytes", "resolve", "spm", "string_bytes",
    "value_bytes", "write_gguf", "write_split",
]  # fmt: skip
