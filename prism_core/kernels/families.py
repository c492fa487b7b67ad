"""Which kernels serve which tensor type.

A family is one packed layout with its kernels. Nothing is compiled until an address is asked for: a file pays for the
families that it holds. Packing, and nothing else, knows the layout of a GGUF block.

    matmul(w, rows, cols, tile_begin, tile_end, act, act_stride, n_tokens, out, out_stride_floats)
        out[t * out_stride + r] = W[r] . x[t] for the rows of the tiles [tile_begin, tile_end), below `rows`.
        For one (row, token) the float32 operations and their order do not depend on n_tokens or on the tile range.
    row(w, rows, cols, r, out)
        out[0:cols] = row r as float32, bit for bit what `gguf.dequantize` gives.

`act` is encoded by the family's `coding`. Addresses and strides are int64, strides of bytes unless named otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import numpy as np
from numpy.typing import NDArray

from prism_core.gguf.types import TensorType
from prism_core.kernels.coding import Coding
from prism_core.kernels.jit import Entry

MATMUL = "void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)"
ROW = "void(int64, int64, int64, int64, int64)"

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Family:
    """The packed layout and the kernels of one or more tensor types."""

    name: str
    tile_rows: int
    coding: Coding
    pack: Callable[[TensorType, Bytes, int, int], Bytes]
    """(type, the tensor's bytes, rows, cols) -> packed bytes; rows are padded to whole tiles of zero weights."""
    packed_bytes: Callable[[TensorType, int, int], int]
    matmul: Entry
    row: Entry

    def tiles(self, rows: int) -> int:
        return -(-rows // self.tile_rows)

    def matmul_address(self) -> int:
        """Compiles on first use."""
        return self.matmul.address

    def row_address(self) -> int:
        """Compiles on first use."""
        return self.row.address


_HOMES = {
    "floats": "F32 F16 BF16",
    "blocks32": "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 IQ4_NL MXFP4",
    "kquants": "Q2_K Q3_K Q4_K Q5_K Q6_K",
    "q1": "Q1_0 Q1_0_V1",
    "ternary": "Q2_0 PQ2_0 PTQ1_0 TQ1_0 TQ2_0",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


@functools.cache
def family_for(tensor_type: TensorType) -> Family:
    """The family of a tensor type; each home module has `family(tensor_type)`. ValueError where there is none."""
    home = _HOME_OF.get(tensor_type.name)
    if home is None:
        raise ValueError(f"no kernels for tensor type {tensor_type.name}")
    found: Family = import_module(f"prism_core.kernels.{home}").family(tensor_type)
    return found
