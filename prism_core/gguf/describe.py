"""What `prism models inspect` says of a file's container: plain data, ready for JSON.

Invariant: describing an open file never raises; a key that is missing or of the wrong kind is reported as null. Whether
the architecture can run, and the memory it takes at a context, is the model layer's to add; `obstacles` lists what
already the container rules out.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from .file import GgufFile, TensorInfo
from .types import TensorType

CLASSES = ("embedding", "attention", "recurrent", "ffn", "head", "norms", "other")


def class_of(name: str) -> str:
    """Which of `CLASSES` a tensor belongs to, by its name."""
    if name == "token_embd.weight":
        return "embedding"
    if name == "output.weight":
        return "head"
    part = name.removeprefix("blk.").split(".", 1)[-1] if name.startswith("blk.") else name
    if "norm" in part:
        return "norms"
    for prefix, found in (("attn_", "attention"), ("ssm_", "recurrent"), ("ffn_", "ffn")):
        if part.startswith(prefix):
            return found
    return "other"


def describe(file: GgufFile) -> dict[str, Any]:
    """The facts of an open file as a dict of plain values; sizes in bytes."""
    tensors = list(file.tensors.values())
    weights = sum(tensor.elements for tensor in tensors)
    data_bytes = sum(tensor.nbytes for tensor in tensors)
    return {
        "path": str(file.path),
        "architecture": file.architecture,
        "name": _plain(file, "general.name", str),
        "license": _plain(file, "general.license", str),
        "version": file.shards[0].version,
        "file_bytes": file.file_bytes,
        "parts": len(file.shards),
        "tensors": len(tensors),
        "weights": weights,
        "bits_per_weight": round(8 * data_bytes / weights, 3) if weights else None,
        "types": _types(tensors),
        "layers": _plain(file, f"{file.architecture}.block_count", int),
        "embedding_length": _plain(file, f"{file.architecture}.embedding_length", int),
        "context_length": _plain(file, f"{file.architecture}.context_length", int),
        "tied_head": "token_embd.weight" in file.tensors and "output.weight" not in file.tensors,
        "rotation": _rotation(file),
        "tokenizer": _tokenizer(file),
        "notes": _notes(tensors),
        "obstacles": _obstacles(tensors),
    }


def _plain(file: GgufFile, key: str, kind: type) -> Any:
    value = file.metadata.get(key)
    return value if type(value) is kind else None


def _types(tensors: list[TensorInfo]) -> dict[str, dict[str, int]]:
    """Per class of tensor, how many tensors there are of each type."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in CLASSES}
    for tensor in tensors:
        counts[class_of(tensor.name)][tensor.type.name] += 1
    return {name: dict(count.most_common()) for name, count in counts.items() if count}


def _rotation(file: GgufFile) -> dict[str, Any] | None:
    spec = file.hadamard
    if spec is None:
        return None
    return {
        "version": spec.version,
        "block_size": spec.block_size,
        "signs": "explicit" if spec.signs else "identity",
        "rotated": len(spec.weight_names),
        "inverse": len(spec.inverse_weight_names),
        "grouped_value_heads": spec.gdn_v_grouped,
        "tied_output": spec.tied_output,
    }


def _tokenizer(file: GgufFile) -> dict[str, Any] | None:
    model = _plain(file, "tokenizer.ggml.model", str)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if model is None and tokens is None:
        return None
    return {
        "model": model,
        "pre": _plain(file, "tokenizer.ggml.pre", str),
        "tokens": len(tokens) if isinstance(tokens, tuple | np.ndarray) else None,
        "chat_template": isinstance(file.metadata.get("tokenizer.chat_template"), str),
    }


def _notes(tensors: list[TensorInfo]) -> list[str]:
    notes = []
    if any(tensor.type_id == 42 and tensor.type is TensorType.PQ2_0 for tensor in tensors):
        notes.append("legacy file: type id 42 stands for 128-weight groups here, as its spans show (PQ2_0)")
    if any(tensor.type is TensorType.Q1_0_V1 for tensor in tensors):
        notes.append("legacy file: type id 40 stands for 32-weight Q1_0 here, as its spans show")
    return notes


def _obstacles(tensors: list[TensorInfo]) -> list[str]:
    unsupported = Counter(tensor.type.name for tensor in tensors if not tensor.type.supported)
    return [f"tensor type {name} is not supported ({count} tensors)" for name, count in sorted(unsupported.items())]
