"""F32, F16 and BF16 matrices with float32 activations, in tiles of 16 interleaved rows.

Column by column the tile has that element of each of its rows, in the file's own type. A row's product has two sums, of
the even and of the odd columns, each added in column order with fma, and is their sum: the same for any number of
tokens and any tile range. The activations are plain float32 vectors, any number of columns.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from prism_core.gguf.types import TensorType
from prism_core.kernels import memory, simd
from prism_core.kernels.coding import F32
from prism_core.kernels.families import MATMUL, ROW, Bytes, Family
from prism_core.kernels.jit import Entry, entry
from prism_core.kernels.packing import Field, interleave
from prism_core.kernels.staging import Lanes, Place, filled, fused
from prism_core.kernels.target import target
from prism_core.kernels.tiles import APART, stack
from prism_core.kernels.vectors import I64, intrinsic, vector

ROWS = 16
"""Rows of a tile."""
LANES = 16 if target().avx512 else 8
PAIR, TOKENS = (2, 4) if LANES == 16 else (1, 2)
"""Tiles and tokens of a register block."""

STREAMS, AHEAD = (1, 8192) if LANES == 16 else (3, 0)
"""Tiles that few tokens read side by side, and how far ahead they are asked for: see `Layout`. Chosen on AVX2."""

_SIZES = {"F32": 4, "F16": 2, "BF16": 2}


def _column(name: str, place: Place, offset: int, lanes: int) -> Lanes:
    """`lanes` values as float32."""
    if name == "F32":
        return place.load(vector("f32", lanes), offset)
    if name == "F16":
        return place.load(vector("f16", lanes), offset).floats()
    words = place.load(vector("i16", lanes), offset).widened(vector("i32", lanes), signed=False)
    return (words << 16).viewed(vector("f32", lanes))


def _product(name: str, tiles: int, tokens: int, ahead: int = 0) -> Any:
    """(w, bytes from tile to tile, cols, activations, their stride, tokens left, out): products of `tiles` x `tokens`.

    Writes `tokens` times tiles * 16 float32 at `out`. Where fewer tokens are left, the last one stands in for the
    missing ones.
    """
    kind, step = vector("f32", LANES), ROWS * _SIZES[name]
    parts = [(tile, first) for tile in range(tiles) for first in range(0, ROWS, LANES)]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        w, apart, cols, act, stride, left, out = arguments

        def constant(value: int) -> Any:
            return ir.Constant(I64, value)

        last = builder.sub(left, constant(1))
        numbers = [
            builder.select(builder.icmp_signed("<", constant(token), last), constant(token), last)
            for token in range(tokens)
        ]
        acts = [builder.add(act, builder.mul(number, stride)) for number in numbers]
        bases = [builder.add(w, builder.mul(constant(tile), apart)) for tile in range(tiles)]
        zero = filled(builder, kind, 0.0).value
        keys = [(part, token) for part in range(len(parts)) for token in range(tokens)]
        sums = [{key: cgutils.alloca_once_value(builder, zero) for key in keys} for _ in range(2)]

        def add_column(column: Any, odd: int) -> None:
            places = [Place(builder, builder.add(base, builder.mul(column, constant(step)))) for base in bases]
            inputs = [Place(builder, builder.add(each, builder.mul(column, constant(4)))) for each in acts]
            for place in places if ahead else []:
                place.prefetch(ahead)
            weights = [_column(name, places[tile], odd * step + first * _SIZES[name], LANES) for tile, first in parts]
            for token, place in enumerate(inputs):
                x = place.repeat(kind, 4 * odd)
                for part, weight in enumerate(weights):
                    slot = sums[odd][part, token]
                    builder.store(fused(weight, x, Lanes(builder, kind, builder.load(slot))).value, slot)

        with cgutils.for_range(builder, builder.lshr(cols, constant(1))) as loop:
            first = builder.shl(loop.index, constant(1))
            add_column(first, 0)
            add_column(first, 1)
        with builder.if_then(builder.trunc(cols, ir.IntType(1))):
            add_column(builder.sub(cols, constant(1)), 0)
        for part, token in keys:
            even, odd = (Lanes(builder, kind, builder.load(each[part, token])) for each in sums)
            tile, row = parts[part]
            Place(builder, out).store(even + odd, 4 * (token * tiles * ROWS + tile * ROWS + row))
        return context.get_dummy_value()

    @intrinsic
    def product(_c: Any, w: Any, apart: Any, cols: Any, act: Any, stride: Any, left: Any, out: Any) -> Any:
        return types.void(*[types.int64] * 7), generate

    return product


def _matmul(name: str) -> Entry:
    size = _SIZES[name]
    one, several = _product(name, 1, 1, AHEAD), _product(name, STREAMS, 1, AHEAD)
    many = _product(name, PAIR, TOKENS)
    space = stack(4 * ROWS * max(PAIR * TOKENS, STREAMS))

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
        sums, tile_bytes = space(), ROWS * size * cols
        if n_tokens < TOKENS:
            side = (tile_end - tile_begin) // STREAMS
            if side * tile_bytes < APART:
                side = 0
            for tile in range(tile_begin, tile_begin + side):
                for token in range(n_tokens):
                    values = act + token * act_stride
                    several(w + tile * tile_bytes, side * tile_bytes, cols, values, act_stride, 1, sums)
                    for stream in range(STREAMS):
                        first, come = (tile + stream * side) * ROWS, sums + 4 * ROWS * stream
                        to = out + 4 * (token * out_stride + first)
                        simd.store_first(to, simd.load_f32x16(come), rows - first)
            for tile in range(tile_begin + STREAMS * side, tile_end):
                for token in range(n_tokens):
                    one(w + tile * tile_bytes, tile_bytes, cols, act + token * act_stride, act_stride, 1, sums)
                    to = out + 4 * (token * out_stride + tile * ROWS)
                    simd.store_first(to, simd.load_f32x16(sums), rows - tile * ROWS)
            return
        for tile in range(tile_begin, tile_end, PAIR):
            # A last odd tile is multiplied twice rather than reading beyond the range.
            second = tile_bytes * (min(tile + PAIR, tile_end) - 1 - tile)
            end = min(rows, tile_end * ROWS)
            for token in range(0, n_tokens, TOKENS):
                values, left = act + token * act_stride, n_tokens - token
                many(w + tile * tile_bytes, second, cols, values, act_stride, left, sums)
                for index in range(min(TOKENS, left)):
                    for half in range(PAIR):
                        first = (tile + half) * ROWS
                        to, come = out + 4 * ((token + index) * out_stride + first), index * PAIR + half
                        simd.store_first(to, simd.load_f32x16(sums + 4 * ROWS * come), end - first)

    return matmul


def _row(name: str) -> Entry:
    size = _SIZES[name]

    @entry(ROW, name=f"row_{name.lower()}")
    def row(w: Any, rows: Any, cols: Any, r: Any, out: Any) -> None:
        place = w + (r // ROWS * ROWS * cols + r % ROWS) * size
        for column in range(cols):
            at = place + column * ROWS * size
            if name == "F32":
                memory.store_i32(out + 4 * column, memory.load_u32(at))
            elif name == "F16":
                memory.store_f32(out + 4 * column, memory.load_f16(at))
            else:
                memory.store_i32(out + 4 * column, memory.load_u16(at) << 16)

    return row


@functools.cache
def family(tensor_type: TensorType) -> Family:
    """The family of F32, F16 or BF16."""
    name, size = tensor_type.name, _SIZES[tensor_type.name]

    def packed_bytes(_type: TensorType, rows: int, cols: int) -> int:
        return -(-rows // ROWS) * ROWS * cols * size

    def pack(_type: TensorType, raw: Bytes, rows: int, cols: int) -> Bytes:
        if raw.size != rows * cols * size:
            raise ValueError(f"{raw.size} bytes are not {rows} x {cols} values of {name}")
        out = np.zeros(packed_bytes(tensor_type, rows, cols), dtype=np.uint8)
        interleave(raw, rows, 1, [Field(0, 0, cols, size)], out, ROWS * cols * size, ROWS)
        return out

    return Family(name.lower(), ROWS, F32, pack, packed_bytes, _matmul(name), _row(name))
