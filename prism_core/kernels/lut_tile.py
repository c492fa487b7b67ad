"""What the kernels of the LUT coding share: 64 rows of weight bits against tables.

A byte column is 64 bytes: the same 8 columns of each of the 64 rows of a tile. Its rows stand in the order that makes
the unpacking of bytes to int32 lanes give them back in order: row 16 i + 4 j + k is at place 16 j + 4 i + k.

There are two forms with the same results, bit for bit: `wide`, 64 rows in a 512-bit vector with a table of 64 bytes at
a time, and `narrow`, 32 rows in any other vector with 16 bytes at a time. In both a group is 4 byte columns (32 values)
and a pair is two groups. Sums of table entries are exact integers; the one order of the float32 operations is

    sum = sum + (d * scale) * float(total)                     multiplication and addition rounded apart

with d the weights' scale and `total` the integer of a run of values with one d. There is no fused multiply-add, so that
processors without it give the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from prism_core.kernels import memory, simd
from prism_core.kernels.families import MATMUL
from prism_core.kernels.jit import Entry, device, entry
from prism_core.kernels.lut import TABLE
from prism_core.kernels.target import target

TILE_ROWS = 64
COLUMN = TILE_ROWS
GROUP, GROUP_TABLES = 4 * COLUMN, 4 * TABLE
SCALES_BYTES = 2 * TILE_ROWS
"""float16 d of every row, in order, before the byte columns they belong to."""
WIDE = target().vbmi
"""Whether the wide form is the fast one here; it would be right anywhere."""
PAIRS = target().avx2 and not WIDE
"""Whether the narrow form takes two tiles at a time, by `lut_four`."""
AHEAD = 9216
"""How far before their use weights are asked for, to the second-level cache: tables keep the first to themselves."""
TILES_AT_ONCE = 4
"""Tiles that meet the same tokens one after another, so that tables come from the second-level cache."""


@device
def place_of(row: Any) -> Any:
    """Where a row (0..63) of a tile stands in its byte columns."""
    return (row & 12) * 4 + (row >> 4) * 4 + (row & 3)


@device
def prefetch_scales(block: Any, ahead: Any) -> None:
    memory.prefetch_t1(block + ahead)
    memory.prefetch_t1(block + ahead + 64)


@device
def _prefetch(column: Any) -> None:
    """Once per line of weights, and there: prefetches in bursts cost a tenth of the speed of cold weights."""
    memory.keep_order()
    memory.prefetch_t1(column + AHEAD)


@device
def _byte_weights(weight: Any) -> Any:
    """The int16 whose bytes multiply the low and the high part of a sum."""
    return weight * (1 + (32 << 8))


# The wide form: index vectors of a byte column serve several tokens


@device
def _indices(column: Any) -> Any:
    """Where the entries of 64 rows are in a table: both parts for the low nibble, both for the high one."""
    _prefetch(column)
    rows = simd.load_i8x64(column)
    nibble = simd.splat_i8x64(15)
    low = simd.and_(rows, nibble)
    high = simd.and_(simd.as_i8x64(simd.shr(simd.as_i16x32(rows), 4)), nibble)
    second = simd.or_(low, simd.splat_i8x64(16))
    return low, second, simd.or_(high, simd.splat_i8x64(32)), simd.or_(high, simd.splat_i8x64(48))


@device
def _looked_up(sums: Any, table: Any, indices: Any) -> Any:
    entries = simd.load_i8x64(table)
    low = simd.add(simd.lookup64(entries, indices[0]), simd.lookup64(entries, indices[2]))
    high = simd.add(simd.lookup64(entries, indices[1]), simd.lookup64(entries, indices[3]))
    return simd.add(sums[0], low), simd.add(sums[1], high)


@device
def _joined_wide(sums: Any, weight: Any) -> Any:
    weights = simd.as_i8x64(simd.splat_i16x32(_byte_weights(weight)))
    low = simd.maddubs(simd.unpack_low(sums[0], sums[1]), weights)
    return low, simd.maddubs(simd.unpack_high(sums[0], sums[1]), weights)


@device
def group_wide(columns: Any, tables: Any, weight: Any) -> Any:
    """`weight` x the table sums of 4 byte columns for one token: 64 rows as two i16x32."""
    zero = simd.splat_i8x64(0)
    sums = (zero, zero)
    for i in range(4):
        sums = _looked_up(sums, tables + TABLE * i, _indices(columns + COLUMN * i))
    return _joined_wide(sums, weight)


@device
def group_wide4(columns: Any, tables: Any, stride: Any, weight: Any) -> Any:
    """The same for 4 tokens whose tables are `stride` apart."""
    zero = simd.splat_i8x64(0)
    s0 = s1 = s2 = s3 = (zero, zero)
    for i in range(4):
        indices, table = _indices(columns + COLUMN * i), tables + TABLE * i
        s0 = _looked_up(s0, table, indices)
        s1 = _looked_up(s1, table + stride, indices)
        s2 = _looked_up(s2, table + 2 * stride, indices)
        s3 = _looked_up(s3, table + 3 * stride, indices)
    return _joined_wide(s0, weight), _joined_wide(s1, weight), _joined_wide(s2, weight), _joined_wide(s3, weight)


@device
def added(a: Any, b: Any) -> Any:
    """Two pairs of vectors, member by member."""
    return simd.add(a[0], b[0]), simd.add(a[1], b[1])


@device
def scaled(totals: Any, first: Any, second: Any, levels: Any) -> Any:
    """Four int32 vectors + the int16 sums of two groups times their levels (both in every int32 of `levels`)."""
    return (
        simd.add(totals[0], simd.maddwd(simd.unpack_low(first[0], second[0]), levels)),
        simd.add(totals[1], simd.maddwd(simd.unpack_high(first[0], second[0]), levels)),
        simd.add(totals[2], simd.maddwd(simd.unpack_low(first[1], second[1]), levels)),
        simd.add(totals[3], simd.maddwd(simd.unpack_high(first[1], second[1]), levels)),
    )


@device
def levels_wide(address: Any) -> Any:
    return simd.as_i16x32(simd.broadcast4_i32x16(address))


@device
def _term_wide(sums: Any, scales: Any, factor: Any, total: Any) -> Any:
    d = simd.to_f32(simd.load_f16x16(scales))
    return simd.add(sums, simd.mul(simd.mul(d, factor), simd.to_f32(total)))


@device
def accumulated_wide(sums: Any, scales: Any, scale: Any, totals: Any) -> Any:
    """Four f32x16 + (d * scale) * totals, with d float16[64] and the float32 scale at their addresses."""
    factor = simd.broadcast4_f32x16(scale)
    return (
        _term_wide(sums[0], scales, factor, totals[0]),
        _term_wide(sums[1], scales + 32, factor, totals[1]),
        _term_wide(sums[2], scales + 64, factor, totals[2]),
        _term_wide(sums[3], scales + 96, factor, totals[3]),
    )


@device
def zeros_wide() -> Any:
    zero = simd.splat_f32x16(np.float32(0.0))
    return zero, zero, zero, zero


@device
def totals_wide(offset: Any) -> Any:
    """Four i32x16, all the int32 at `offset`."""
    value = simd.broadcast4_i32x16(offset)
    return value, value, value, value


# The narrow form: a table serves two vectors of 32 rows


@device
def _nibbles(rows: Any) -> Any:
    nibble = simd.splat_i8x32(15)
    return simd.and_(rows, nibble), simd.and_(simd.as_i8x32(simd.shr(simd.as_i16x16(rows), 4)), nibble)


@device
def group_narrow(first: Any, second: Any, tables: Any, lines: Any) -> Any:
    """Byte sums of 4 byte columns: low and high part of 32 rows at `first`, then of 32 at `second`.

    `lines` says which cache lines to prefetch: 0 none, 1 those of `first`, 2 those of both.
    """
    zero = simd.splat_i8x32(0)
    l0 = h0 = l1 = h1 = zero
    for i in range(4):
        if lines > 0:
            _prefetch(first + COLUMN * i)
        if lines > 1:
            memory.prefetch_t1(second + COLUMN * i + AHEAD)
        low0, high0 = _nibbles(simd.load_i8x32(first + COLUMN * i))
        low1, high1 = _nibbles(simd.load_i8x32(second + COLUMN * i))
        entries = simd.load_i8x16(tables + TABLE * i)
        l0, l1 = simd.add(l0, simd.lookup16(entries, low0)), simd.add(l1, simd.lookup16(entries, low1))
        entries = simd.load_i8x16(tables + TABLE * i + 16)
        h0, h1 = simd.add(h0, simd.lookup16(entries, low0)), simd.add(h1, simd.lookup16(entries, low1))
        entries = simd.load_i8x16(tables + TABLE * i + 32)
        l0, l1 = simd.add(l0, simd.lookup16(entries, high0)), simd.add(l1, simd.lookup16(entries, high1))
        entries = simd.load_i8x16(tables + TABLE * i + 48)
        h0, h1 = simd.add(h0, simd.lookup16(entries, high0)), simd.add(h1, simd.lookup16(entries, high1))
    return l0, h0, l1, h1


@device
def joined_narrow(low: Any, high: Any, weight: Any) -> Any:
    """(low + 32 high) x weight of 32 rows, as two i16x16."""
    weights = simd.as_i8x32(simd.splat_i16x16(_byte_weights(weight)))
    first = simd.maddubs(simd.unpack_low(low, high), weights)
    return first, simd.maddubs(simd.unpack_high(low, high), weights)


@device
def levels_narrow(address: Any) -> Any:
    return simd.as_i16x16(simd.broadcast4_i32x8(address))


@device
def _term_narrow(sums: Any, scales: Any, factor: Any, total: Any) -> Any:
    d = simd.to_f32(simd.load_f16x8(scales))
    return simd.add(sums, simd.mul(simd.mul(d, factor), simd.to_f32(total)))


@device
def accumulated_narrow(sums: Any, scales: Any, scale: Any, totals: Any) -> Any:
    """Four f32x8 + (d * scale) * totals: rows 0-7, 16-23, 32-39, 48-55 of those whose float16 d begin at `scales`."""
    factor = simd.broadcast4_f32x8(scale)
    return (
        _term_narrow(sums[0], scales, factor, totals[0]),
        _term_narrow(sums[1], scales + 32, factor, totals[1]),
        _term_narrow(sums[2], scales + 64, factor, totals[2]),
        _term_narrow(sums[3], scales + 96, factor, totals[3]),
    )


@device
def zeros_narrow() -> Any:
    zero = simd.splat_f32x8(np.float32(0.0))
    return zero, zero, zero, zero


@device
def totals_narrow(offset: Any) -> Any:
    """Four i32x8, all the int32 at `offset`."""
    value = simd.broadcast4_i32x8(offset)
    return value, value, value, value


# Matrix products of either form


@device
def store_sums(out: Any, sums: Any, rows: Any) -> None:
    """Write four vectors 16 floats apart, where their rows are below `rows`."""
    simd.store_first(out, sums[0], rows)
    simd.store_first(out + 64, sums[1], rows - 16)
    simd.store_first(out + 128, sums[2], rows - 32)
    simd.store_first(out + 192, sums[3], rows - 48)


@device
def store_halves(out: Any, sums: Any, rows: Any) -> None:
    """Write both halves of a tile of the narrow form."""
    store_sums(out, sums[0], rows)
    store_sums(out + 32, sums[1], rows - 8)


def matmul_of(name: str, tile_bytes: Any, one: Any, four: Any = None, two: Any = None) -> Entry:
    """The entry of a family, from what it does with a tile.

    `tile_bytes(cols)`, `one(tile, cols, record, out, rows)` for a token, `four(tile, cols, record, stride, out,
    pitch, rows)` for 4 tokens, their records `stride` and their floats `pitch` bytes apart, and `two(tile, other, cols,
    record, out, rows, apart)` for a token and two tiles, the second `apart` tiles further, are `device` functions.

    A single token's two tiles are far apart: from two streams memory gives a quarter more than from one.
    """

    def matmul(
        w: Any, rows: Any, cols: Any, begin: Any, end: Any, act: Any, stride: Any, n_tokens: Any, out: Any, pitch: Any
    ) -> None:
        size = tile_bytes(cols)
        step = TILES_AT_ONCE if n_tokens > 1 else max(end - begin, 1)
        for first in range(begin, end, step):
            last = min(first + step, end)
            fours = pairs = 0
            if four is not None:
                fours = n_tokens // 4 * 4
                for token in range(0, fours, 4):
                    for tile in range(first, last):
                        to = out + 4 * (token * pitch + TILE_ROWS * tile)
                        record = act + token * stride
                        four(w + tile * size, cols, record, stride, to, 4 * pitch, rows - TILE_ROWS * tile)
            for token in range(fours, n_tokens):
                record = act + token * stride
                if two is not None:
                    pairs = (last - first) // 2
                    for tile in range(first, first + pairs):
                        to, other = out + 4 * (token * pitch + TILE_ROWS * tile), tile + pairs
                        two(w + tile * size, w + other * size, cols, record, to, rows - TILE_ROWS * tile, pairs)
                for tile in range(first + 2 * pairs, last):
                    to = out + 4 * (token * pitch + TILE_ROWS * tile)
                    one(w + tile * size, cols, record, to, rows - TILE_ROWS * tile)

    return entry(MATMUL, name=name)(matmul)
