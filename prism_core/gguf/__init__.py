"""GGUF files: a bounded reader for every Prism-compatible container, and exact decoding of tensor data.

`open_gguf(path)` gives a `GgufFile` or raises `ModelError` with one sentence; `dequantize` turns tensor bytes into
float32. Nothing in this package imports numba.
"""

from __future__ import annotations

from .dequantize import dequantize
from .describe import describe
from .file import GgufFile, TensorInfo, gguf_from_buffers, open_gguf
from .hadamard import HadamardSpec
from .metadata import Metadata
from .scales import check_all_scales, check_scales
from .types import SUPPORTED, TensorType

__all__ = [
    "SUPPORTED",
    "GgufFile",
    "HadamardSpec",
    "Metadata",
    "TensorInfo",
    "TensorType",
    "check_all_scales",
    "check_scales",
    "dequantize",
    "describe",
    "gguf_from_buffers",
    "open_gguf",
]
