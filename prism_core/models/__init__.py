"""Models: one file per architecture that reads like its equations, and the builder that makes programs of them.

`build_graph(file, ...)` checks the hyperparameters and the tensors of a file against its architecture and returns the
symbolic graph, or raises `ModelError` with one sentence. Only the modules of kernels import numba: `assembly` does,
the rest of this package does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from prism_core.errors import ModelError
from prism_core.gguf import GgufFile, TensorType, dequantize
from prism_core.models.graph import Graph
from prism_core.models.hyper import read_hyper
from prism_core.models.rotation import Rotation
from prism_core.models.symbols import TensorUse

if TYPE_CHECKING:
    from prism_core.kernels.coding import Coding

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen35", "gemma3")
NOT_LANGUAGE_MODELS = {
    "dspark": "a drafter for speculative decoding",
    "clip": "a vision projector (mmproj)",
    "mmproj": "a vision projector",
    "bert": "a text encoder",
    "whisper": "a speech recogniser",
}
EMBEDDING = "token_embd.weight"
PLAIN_TYPES = (TensorType.F32, TensorType.F16, TensorType.BF16)
"""What norms, biases and other small tensors may be stored as."""


def check_architecture(name: str) -> None:
    """Raise `ModelError` unless this engine runs the architecture."""
    if name in ARCHITECTURES:
        return
    if name in NOT_LANGUAGE_MODELS:
        raise ModelError(f"architecture {name} is {NOT_LANGUAGE_MODELS[name]}, not a language model")
    known = ", ".join(ARCHITECTURES)
    raise ModelError(f"architecture {name[:64]!r} is not supported; this engine runs {known}")


def build_graph(file: GgufFile, coding_of: Callable[[str], Coding], named_tokens: int | None = None) -> Graph:
    """The graph of a file. `coding_of`: tensor name -> the coding that its family reads; `named_tokens`: size of the
    vocabulary, where it is smaller than the embedding table."""
    check_architecture(file.architecture)
    table = file.tensors.get(EMBEDDING)
    if table is None or len(table.shape) != 2:
        raise ModelError(f"the file lacks the matrix {EMBEDDING}")
    vocab = table.shape[1]
    hyper = read_hyper(file.metadata, file.architecture, vocab)
    architecture = import_module(f"prism_core.models.{file.architecture}")
    heads = architecture.value_heads(hyper) if hasattr(architecture, "value_heads") else (0, 0)
    if named_tokens is not None and named_tokens > vocab:
        raise ModelError(f"the tokenizer has {named_tokens} tokens, but {EMBEDDING} has {vocab} rows")
    graph = Graph(
        hyper=hyper,
        shapes={name: tensor.shape for name, tensor in file.tensors.items()},
        coding_of=coding_of,
        rotation=Rotation(file.hadamard, *heads),
        named_tokens=vocab if named_tokens is None else named_tokens,
    )
    architecture.build(graph)
    graph.refuse_unread()
    for name, use in graph.tensors.items():
        kind = file.tensors[name].type
        if not use.matrix and kind not in PLAIN_TYPES:
            raise ModelError(f"tensor {name} must be F32, F16 or BF16, not {kind.name}")
        if math.isfinite(use.low) or math.isfinite(use.high):
            _check_values(file, name, use)
    return graph


def _check_values(file: GgufFile, name: str, use: TensorUse) -> None:
    """Of the few tensors whose values have a meaning of their own: signs, divisors."""
    values = dequantize(file.tensors[name].type, file.read(name), use.cols)
    wrong = ~((values >= use.low) & (values <= use.high))  # NaN is in no range
    if wrong.any():
        at = int(wrong.argmax())
        limits = f"at most {use.high:g}" if math.isinf(use.low) else f"in {use.low:g}..{use.high:g}"
        raise ModelError(f"tensor {name}: value {at} must be {limits}, not {values[at]:g}")
