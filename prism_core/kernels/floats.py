"""F32, F16 and BF16 matrices with float32 activations, in tiles of 8 interleaved rows.

Column by column the tile has that element of each of its 8 rows, in the file's own type. A row's product has four sums,
of the columns that are 0, 1, 2 and 3 modulo 4, each added in column order with fma, and is (s0 + s1) + (s2 + s3): the
same for any number of tokens and any tile range. The activations are plain float32 vectors, any number of columns.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from prism_core.gguf.types import TensorType
from prism_core.kernels import memory, simd
from prism_core.kernels.coding import F32
from prism_core.kernels.families import MATMUL, ROW, Bytes, Family
from prism_core.kernels.jit import device, entry
from prism_core.kernels.packing import TILE_ROWS, Field, interleave

TOKENS = 2
"""Tokens of a register block: 2 x 4 sums of 8 rows."""


@device
def _load_f32(place: Any) -> Any:
    return simd.load_f32x8(place)


@device
def _load_f16(place: Any) -> Any:
    return simd.to_f32(simd.load_f16x8(place))


@device
def _load_bf16(place: Any) -> Any:
    return simd.as_f32x8(simd.shl(simd.zext_i32x8(simd.load_i16x8(place)), 16))


_LOADS = {"F32": (_load_f32, 4), "F16": (_load_f16, 2), "BF16": (_load_bf16, 2)}


def _products(load: Any, size: int) -> Any:
    step = TILE_ROWS * size

    @device
    def two_tokens(w: Any, cols: Any, a: Any, b: Any) -> Any:
        """(a . rows, b . rows) as f32x8 each."""
        zero = simd.splat_f32x8(np.float32(0.0))
        a0, a1, a2, a3 = zero, zero, zero, zero
        b0, b1, b2, b3 = zero, zero, zero, zero
        whole = cols // 4 * 4
        for column in range(0, whole, 4):
            place, at = w + column * step, column * 4
            w0, w1 = load(place), load(place + step)
            w2, w3 = load(place + 2 * step), load(place + 3 * step)
            a0 = simd.fma(w0, simd.broadcast4_f32x8(a + at), a0)
            b0 = simd.fma(w0, simd.broadcast4_f32x8(b + at), b0)
            a1 = simd.fma(w1, simd.broadcast4_f32x8(a + at + 4), a1)
            b1 = simd.fma(w1, simd.broadcast4_f32x8(b + at + 4), b1)
            a2 = simd.fma(w2, simd.broadcast4_f32x8(a + at + 8), a2)
            b2 = simd.fma(w2, simd.broadcast4_f32x8(b + at + 8), b2)
            a3 = simd.fma(w3, simd.broadcast4_f32x8(a + at + 12), a3)
            b3 = simd.fma(w3, simd.broadcast4_f32x8(b + at + 12), b3)
        # One to three columns are left: they stay in the sums of their own place.
        left = cols - whole
        if left > 0:
            a0 = simd.fma(load(w + whole * step), simd.broadcast4_f32x8(a + whole * 4), a0)
            b0 = simd.fma(load(w + whole * step), simd.broadcast4_f32x8(b + whole * 4), b0)
        if left > 1:
            a1 = simd.fma(load(w + (whole + 1) * step), simd.broadcast4_f32x8(a + whole * 4 + 4), a1)
            b1 = simd.fma(load(w + (whole + 1) * step), simd.broadcast4_f32x8(b + whole * 4 + 4), b1)
        if left > 2:
            a2 = simd.fma(load(w + (whole + 2) * step), simd.broadcast4_f32x8(a + whole * 4 + 8), a2)
            b2 = simd.fma(load(w + (whole + 2) * step), simd.broadcast4_f32x8(b + whole * 4 + 8), b2)
        total_a = simd.add(simd.add(a0, a1), simd.add(a2, a3))
        total_b = simd.add(simd.add(b0, b1), simd.add(b2, b3))
        return total_a, total_b

    return two_tokens


def _matmul(name: str) -> Any:
    load, size = _LOADS[name]
    two_tokens = _products(load, size)

    @entry(MATMUL, name=f"matmul_{name.lower()}")
    def matmul(
        w: Any,
        rows: Any,
        cols: Any,
        tile_begin: Any,
        tile_end: Any,
        act: Any,
        act_stride: Any,
        n_tokens: Any,
        out: Any,
        out_stride: Any,
    ) -> None:
        for tile in range(tile_begin, tile_end):
            place, first = w + tile * cols * TILE_ROWS * size, tile * TILE_ROWS
            for token in range(0, n_tokens, TOKENS):
                # A last odd token is computed twice; the second result is not stored.
                other = min(token + 1, n_tokens - 1)
                a, b = two_tokens(place, cols, act + token * act_stride, act + other * act_stride)
                simd.store_first(out + 4 * (token * out_stride + first), a, rows - first)
                if other != token:
                    simd.store_first(out + 4 * (other * out_stride + first), b, rows - first)

    return matmul


def _row(name: str) -> Any:
    load, size = _LOADS[name]

    @entry(ROW, name=f"row_{name.lower()}")
    def row(w: Any, rows: Any, cols: Any, r: Any, out: Any) -> None:
        lane = r % TILE_ROWS
        for column in range(cols):
            values = load(w + (r // TILE_ROWS * cols + column) * TILE_ROWS * size)
            memory.store_f32(out + 4 * column, simd.extract(values, lane))

    return row


@functools.cache
def family(tensor_type: TensorType) -> Family:
    """The family of F32, F16 or BF16."""
    name, (_, size) = tensor_type.name, _LOADS[tensor_type.name]

    def packed_bytes(_type: TensorType, rows: int, cols: int) -> int:
        return -(-rows // TILE_ROWS) * TILE_ROWS * cols * size

    def pack(_type: TensorType, raw: Bytes, rows: int, cols: int) -> Bytes:
        if raw.size != rows * cols * size:
            raise ValueError(f"{raw.size} bytes are not {rows} x {cols} values of {name}")
        out = np.zeros(packed_bytes(tensor_type, rows, cols), dtype=np.uint8)
        interleave(raw, rows, 1, [Field(0, 0, cols, size)], out, TILE_ROWS * cols * size)
        return out

    return Family(name.lower(), TILE_ROWS, F32, pack, packed_bytes, _matmul(name), _row(name))
