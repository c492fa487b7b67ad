"""One-bit weights: Q1_0 (a scale per 128 columns) and its first form, Q1_0_V1 (per 32), by table look-up.

Packed, a tile of 64 rows is a run of blocks, one per run of columns with a scale:

    d float16[64], one per row | byte columns of 64 bytes: bit k of column c's byte is the weight of column 8 c + k

which is 18 (or 6) bytes per row and block, as in the file: nothing is added but rows of zero scale in the last tile.
The activations are of the LUT coding. For a (row, token) the results are bit-equal for any number of tokens, tile range
and form.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from prism_core.gguf.types import TensorType
from prism_core.kernels import memory, simd
from prism_core.kernels.families import ROW, Bytes, Family
from prism_core.kernels.jit import Entry, device, entry, kernel
from prism_core.kernels.lut import BIT_OFFSETS, BITS_OFFSET, HEADER, LUT, RECORD, SCALE, SCALES
from prism_core.kernels.lut_four import AHEAD as NEAR
from prism_core.kernels.lut_four import group_of
from prism_core.kernels.lut_tile import (
    AHEAD,
    COLUMN,
    GROUP,
    GROUP_TABLES,
    PAIRS,
    SCALES_BYTES,
    TILE_ROWS,
    WIDE,
    accumulated_narrow,
    accumulated_wide,
    group_narrow,
    group_wide,
    group_wide4,
    joined_narrow,
    levels_narrow,
    levels_wide,
    matmul_of,
    place_of,
    prefetch_scales,
    scaled,
    store_halves,
    store_sums,
    totals_narrow,
    totals_wide,
    zeros_narrow,
    zeros_wide,
)

_BIT = 2
"""A sum of +-q is twice the sum of the table entries, and an offset."""
_BLOCK, _BLOCK_V1 = 128, 32


@device
def _block_bytes(columns: Any) -> Any:
    return SCALES_BYTES + COLUMN * columns // 8


@device
def _tile_bytes(cols: Any) -> Any:
    return cols // _BLOCK * _block_bytes(_BLOCK)


@device
def _tile_bytes_v1(cols: Any) -> Any:
    return cols // _BLOCK_V1 * _block_bytes(_BLOCK_V1)


# The wide form


@device
def _one_wide(tile: Any, cols: Any, record: Any, out: Any, rows: Any) -> None:
    sums = zeros_wide()
    for _block in range(cols // _BLOCK):
        prefetch_scales(tile, AHEAD)
        columns, tables, levels = tile + SCALES_BYTES, record + HEADER, record + SCALES
        totals = totals_wide(record + BITS_OFFSET)
        for _pair in range(2):
            first = group_wide(columns, tables, _BIT)
            second = group_wide(columns + GROUP, tables + GROUP_TABLES, _BIT)
            totals = scaled(totals, first, second, levels_wide(levels))
            columns += 2 * GROUP
            tables += 2 * GROUP_TABLES
            levels += 4
        sums = accumulated_wide(sums, tile, record + SCALE, totals)
        tile += _block_bytes(_BLOCK)
        record += RECORD
    store_sums(out, sums, rows)


@device
def _four_wide(tile: Any, cols: Any, record: Any, stride: Any, out: Any, pitch: Any, rows: Any) -> None:
    s0 = s1 = s2 = s3 = zeros_wide()
    for _block in range(cols // _BLOCK):
        prefetch_scales(tile, AHEAD)
        columns, tables, levels, offset = tile + SCALES_BYTES, record + HEADER, record + SCALES, record + BITS_OFFSET
        t0, t1 = totals_wide(offset), totals_wide(offset + stride)
        t2, t3 = totals_wide(offset + 2 * stride), totals_wide(offset + 3 * stride)
        for _pair in range(2):
            a0, a1, a2, a3 = group_wide4(columns, tables, stride, _BIT)
            b0, b1, b2, b3 = group_wide4(columns + GROUP, tables + GROUP_TABLES, stride, _BIT)
            t0 = scaled(t0, a0, b0, levels_wide(levels))
            t1 = scaled(t1, a1, b1, levels_wide(levels + stride))
            t2 = scaled(t2, a2, b2, levels_wide(levels + 2 * stride))
            t3 = scaled(t3, a3, b3, levels_wide(levels + 3 * stride))
            columns += 2 * GROUP
            tables += 2 * GROUP_TABLES
            levels += 4
        scale = record + SCALE
        s0 = accumulated_wide(s0, tile, scale, t0)
        s1 = accumulated_wide(s1, tile, scale + stride, t1)
        s2 = accumulated_wide(s2, tile, scale + 2 * stride, t2)
        s3 = accumulated_wide(s3, tile, scale + 3 * stride, t3)
        tile += _block_bytes(_BLOCK)
        record += RECORD
    store_sums(out, s0, rows)
    store_sums(out + pitch, s1, rows)
    store_sums(out + 2 * pitch, s2, rows)
    store_sums(out + 3 * pitch, s3, rows)


# The narrow form: tables are shared by the tile's halves, rows 0-7, 16-23, ... and rows 8-15, 24-31, ...


@device
def _group_narrow(columns: Any, tables: Any) -> Any:
    l0, h0, l1, h1 = group_narrow(columns, columns + COLUMN // 2, tables, 1)
    return joined_narrow(l0, h0, _BIT), joined_narrow(l1, h1, _BIT)


@device
def _one_narrow(tile: Any, cols: Any, record: Any, out: Any, rows: Any) -> None:
    s0 = s1 = zeros_narrow()
    for _block in range(cols // _BLOCK):
        prefetch_scales(tile, AHEAD)
        columns, tables, address = tile + SCALES_BYTES, record + HEADER, record + SCALES
        t0 = t1 = totals_narrow(record + BITS_OFFSET)
        for _pair in range(2):
            a0, a1 = _group_narrow(columns, tables)
            b0, b1 = _group_narrow(columns + GROUP, tables + GROUP_TABLES)
            levels = levels_narrow(address)
            t0, t1 = scaled(t0, a0, b0, levels), scaled(t1, a1, b1, levels)
            columns += 2 * GROUP
            tables += 2 * GROUP_TABLES
            address += 4
        s0 = accumulated_narrow(s0, tile, record + SCALE, t0)
        s1 = accumulated_narrow(s1, tile + 16, record + SCALE, t1)
        tile += _block_bytes(_BLOCK)
        record += RECORD
    store_halves(out, (s0, s1), rows)


_groups = group_of([_BIT] * 4)


@device
def _group_two(columns: Any, others: Any, tables: Any) -> Any:
    half = COLUMN // 2
    a, b, c, d, e, f, g, h = _groups(columns, columns + half, others, others + half, tables)
    return (a, b), (c, d), (e, f), (g, h)


@device
def _scaled_four(offset: Any, a: Any, b: Any, c: Any, d: Any, record: Any) -> Any:
    """The totals of a block from the sums of its four groups."""
    first = scaled(totals_narrow(offset), a, b, levels_narrow(record + SCALES))
    return scaled(first, c, d, levels_narrow(record + SCALES + 4))


@device
def _two_narrow(tile: Any, other: Any, cols: Any, record: Any, out: Any, rows: Any, apart: Any) -> None:
    s0 = s1 = s2 = s3 = zeros_narrow()
    for _block in range(cols // _BLOCK):
        prefetch_scales(tile, NEAR)
        prefetch_scales(other, NEAR)
        columns, others, tables = tile + SCALES_BYTES, other + SCALES_BYTES, record + HEADER
        a0, a1, a2, a3 = _group_two(columns, others, tables)
        b0, b1, b2, b3 = _group_two(columns + GROUP, others + GROUP, tables + GROUP_TABLES)
        c0, c1, c2, c3 = _group_two(columns + 2 * GROUP, others + 2 * GROUP, tables + 2 * GROUP_TABLES)
        d0, d1, d2, d3 = _group_two(columns + 3 * GROUP, others + 3 * GROUP, tables + 3 * GROUP_TABLES)
        offset, scale = record + BITS_OFFSET, record + SCALE
        s0 = accumulated_narrow(s0, tile, scale, _scaled_four(offset, a0, b0, c0, d0, record))
        s1 = accumulated_narrow(s1, tile + 16, scale, _scaled_four(offset, a1, b1, c1, d1, record))
        s2 = accumulated_narrow(s2, other, scale, _scaled_four(offset, a2, b2, c2, d2, record))
        s3 = accumulated_narrow(s3, other + 16, scale, _scaled_four(offset, a3, b3, c3, d3, record))
        tile += _block_bytes(_BLOCK)
        other += _block_bytes(_BLOCK)
        record += RECORD
    store_halves(out, (s0, s1), rows)
    store_halves(out + 4 * TILE_ROWS * apart, (s2, s3), rows - TILE_ROWS * apart)


@device
def _one_v1(tile: Any, cols: Any, record: Any, out: Any, rows: Any) -> None:
    s0 = s1 = zeros_narrow()
    none = (simd.splat_i16x16(0), simd.splat_i16x16(0))
    for block in range(cols // _BLOCK_V1):
        group = block % 4
        prefetch_scales(tile, AHEAD)
        a0, a1 = _group_narrow(tile + SCALES_BYTES, record + HEADER + GROUP_TABLES * group)
        level = simd.as_i16x16(simd.splat_i32x8(memory.load_u16(record + SCALES + 2 * group)))
        offset = totals_narrow(record + BIT_OFFSETS + 4 * group)
        s0 = accumulated_narrow(s0, tile, record + SCALE, scaled(offset, a0, none, level))
        s1 = accumulated_narrow(s1, tile + 16, record + SCALE, scaled(offset, a1, none, level))
        tile += _block_bytes(_BLOCK_V1)
        record += RECORD * (group // 3)
    store_halves(out, (s0, s1), rows)


# Packing and rows


@kernel("void(int64, int64, int64, int64, int64)")
def _pack(raw: Any, rows: Any, blocks: Any, columns: Any, out: Any) -> None:
    """Blocks of a float16 and `columns` / 8 bytes, row by row, into tiles."""
    bytes_ = columns // 8
    for row in range(rows):
        tile = out + row // TILE_ROWS * blocks * _block_bytes(columns)
        lane = row % TILE_ROWS
        place = place_of(lane)
        for _ in range(blocks):
            memory.store_i16(tile + 2 * lane, memory.load_u16(raw))
            for i in range(bytes_):
                memory.store_i8(tile + SCALES_BYTES + COLUMN * i + place, memory.load_u8(raw + 2 + i))
            raw += 2 + bytes_
            tile += _block_bytes(columns)


_bits = simd.constant(simd.i32x8, [1 << k for k in range(8)])


@device
def _row(w: Any, cols: Any, columns: Any, row: Any, out: Any) -> None:
    block = w + row // TILE_ROWS * (cols // columns) * _block_bytes(columns)
    lane = row % TILE_ROWS
    place = SCALES_BYTES + place_of(lane)
    for _ in range(cols // columns):
        d = memory.load_f16(block + 2 * lane)
        for i in range(columns // 8):
            byte = simd.splat_i32x8(memory.load_u8(block + place + COLUMN * i))
            set_ = simd.equal(simd.and_(byte, _bits()), _bits())
            simd.store(out, simd.select(set_, simd.splat_f32x8(d), simd.splat_f32x8(-d)))
            out += 32
        block += _block_bytes(columns)


@entry(ROW)
def row_q1(w: Any, rows: Any, cols: Any, r: Any, out: Any) -> None:
    _row(w, cols, _BLOCK, r, out)


@entry(ROW)
def row_q1_v1(w: Any, rows: Any, cols: Any, r: Any, out: Any) -> None:
    _row(w, cols, _BLOCK_V1, r, out)


def packed_bytes(tensor_type: TensorType, rows: int, cols: int) -> int:
    """Bytes of a packed matrix: those of the file, with `rows` rounded up to whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS * (cols // tensor_type.block_size) * tensor_type.block_bytes


def pack(tensor_type: TensorType, raw: Bytes, rows: int, cols: int) -> Bytes:
    """A tensor's bytes as tiles. ValueError if they are not `rows` x `cols` of them."""
    blocks = cols // tensor_type.block_size
    if cols % tensor_type.block_size or raw.size != rows * blocks * tensor_type.block_bytes:
        raise ValueError(f"{rows} x {cols} {tensor_type.name} weights are not {raw.size} bytes")
    source = np.ascontiguousarray(raw)
    packed = (np.zeros if rows % TILE_ROWS else np.empty)(packed_bytes(tensor_type, rows, cols), np.uint8)
    _pack(source.ctypes.data, rows, blocks, tensor_type.block_size, packed.ctypes.data)
    return packed


matmul_wide = matmul_of("q1_wide", _tile_bytes, _one_wide, _four_wide)
matmul_narrow = matmul_of("q1_narrow", _tile_bytes, _one_narrow, two=_two_narrow if PAIRS else None)
matmul_v1 = matmul_of("q1_v1", _tile_bytes_v1, _one_v1)


@functools.cache
def family(tensor_type: TensorType) -> Family:
    """The family of Q1_0 or Q1_0_V1."""
    if tensor_type is TensorType.Q1_0_V1:
        return Family("q1_v1", TILE_ROWS, LUT, pack, packed_bytes, matmul_v1, row_q1_v1)
    matmul: Entry = matmul_wide if WIDE else matmul_narrow
    return Family("q1", TILE_ROWS, LUT, pack, packed_bytes, matmul, row_q1)
