"""Two-bit codes (-1, 0, +1 and, where a file has it, +2) by table look-up: Q2_0, PQ2_0, PTQ1_0, TQ1_0 and TQ2_0.

A code is two planes of bits, weight = (b0 + 2 b1 - 1) d. Packed, a tile of 64 rows is a run of blocks, one per run of
columns with a scale (64, 128 or 256):

    d float16[64], one per row | per 32 columns: 4 byte columns of b0, then 4 of b1

with 64 bytes in a byte column: bit k of column c's byte belongs to column 8 c + k. That is as large as the file, but
for rows of zero scale in the last tile and the base-3 types (28 -> 34 and 54 -> 66 bytes).

The activations are of the LUT coding. Every 64 columns are one term of the float32 sum, whatever the type: so equal
weights give bit-equal results in all five, for any number of tokens, tile range and form.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from prism_core.gguf.types import TensorType
from prism_core.kernels import memory, simd
from prism_core.kernels.families import ROW, Bytes, Family
from prism_core.kernels.jit import device, entry
from prism_core.kernels.lut import CODE_OFFSETS, HEADER, LUT, RECORD, SCALE, SCALES
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
    added,
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
from prism_core.kernels.ternary_pack import pack_codes

_PAIR = 64
"""Columns of a term."""
_PAIR_BYTES = 4 * GROUP


@device
def _block_bytes(columns: Any) -> Any:
    return SCALES_BYTES + COLUMN * columns // 4


# The wide form


@device
def _group_wide(columns: Any, tables: Any) -> Any:
    return added(group_wide(columns, tables, 1), group_wide(columns + GROUP, tables, 2))


@device
def _group_wide4(columns: Any, tables: Any, stride: Any) -> Any:
    a0, a1, a2, a3 = group_wide4(columns, tables, stride, 1)
    b0, b1, b2, b3 = group_wide4(columns + GROUP, tables, stride, 2)
    return added(a0, b0), added(a1, b1), added(a2, b2), added(a3, b3)


@device
def _term_wide(sums: Any, scales: Any, record: Any, half: Any, first: Any, second: Any) -> Any:
    totals = scaled(
        totals_wide(record + CODE_OFFSETS + 4 * half), first, second, levels_wide(record + SCALES + 4 * half)
    )
    return accumulated_wide(sums, scales, record + SCALE, totals)


def _wide(columns_of_block: int) -> tuple[Any, Any]:
    """(one, four) of `matmul_of` for weights with a scale per so many columns."""
    pairs = columns_of_block // _PAIR

    @device
    def one(tile: Any, cols: Any, record: Any, out: Any, rows: Any) -> None:
        sums, half = zeros_wide(), 0
        for _block in range(cols // columns_of_block):
            prefetch_scales(tile, AHEAD)
            columns = tile + SCALES_BYTES
            for _pair in range(pairs):
                tables = record + HEADER + 2 * GROUP_TABLES * half
                first = _group_wide(columns, tables)
                second = _group_wide(columns + 2 * GROUP, tables + GROUP_TABLES)
                sums = _term_wide(sums, tile, record, half, first, second)
                columns += _PAIR_BYTES
                record += RECORD * half
                half ^= 1
            tile += _block_bytes(columns_of_block)
        store_sums(out, sums, rows)

    @device
    def four(tile: Any, cols: Any, record: Any, stride: Any, out: Any, pitch: Any, rows: Any) -> None:
        s0 = s1 = s2 = s3 = zeros_wide()
        half = 0
        for _block in range(cols // columns_of_block):
            prefetch_scales(tile, AHEAD)
            columns = tile + SCALES_BYTES
            for _pair in range(pairs):
                tables = record + HEADER + 2 * GROUP_TABLES * half
                a0, a1, a2, a3 = _group_wide4(columns, tables, stride)
                b0, b1, b2, b3 = _group_wide4(columns + 2 * GROUP, tables + GROUP_TABLES, stride)
                s0 = _term_wide(s0, tile, record, half, a0, b0)
                s1 = _term_wide(s1, tile, record + stride, half, a1, b1)
                s2 = _term_wide(s2, tile, record + 2 * stride, half, a2, b2)
                s3 = _term_wide(s3, tile, record + 3 * stride, half, a3, b3)
                columns += _PAIR_BYTES
                record += RECORD * half
                half ^= 1
            tile += _block_bytes(columns_of_block)
        store_sums(out, s0, rows)
        store_sums(out + pitch, s1, rows)
        store_sums(out + 2 * pitch, s2, rows)
        store_sums(out + 3 * pitch, s3, rows)

    return one, four


# The narrow form: tables are shared by the planes; the tile's halves are rows 0-7, 16-23, ... and rows 8-15, 24-31, ...


@device
def _group_narrow(columns: Any, tables: Any, lines: Any) -> Any:
    l0, h0, l1, h1 = group_narrow(columns, columns + GROUP, tables, lines)
    return added(joined_narrow(l0, h0, 1), joined_narrow(l1, h1, 2))


@device
def _half_narrow(sums: Any, scales: Any, columns: Any, record: Any, half: Any, lines: Any) -> Any:
    tables = record + HEADER + 2 * GROUP_TABLES * half
    first = _group_narrow(columns, tables, lines)
    second = _group_narrow(columns + 2 * GROUP, tables + GROUP_TABLES, lines)
    totals = scaled(
        totals_narrow(record + CODE_OFFSETS + 4 * half), first, second, levels_narrow(record + SCALES + 4 * half)
    )
    return accumulated_narrow(sums, scales, record + SCALE, totals)


@device
def _term_narrow(sums: Any, scales: Any, columns: Any, record: Any, half: Any) -> Any:
    s0 = _half_narrow(sums[0], scales, columns, record, half, 2)
    return s0, _half_narrow(sums[1], scales + 16, columns + COLUMN // 2, record, half, 0)


_planes = group_of([1, 1, 2, 2])


@device
def _group_planes(columns: Any, tables: Any) -> Any:
    """Both halves of a tile."""
    other = columns + COLUMN // 2
    a, b, c, d, e, f, g, h = _planes(columns, other, columns + GROUP, other + GROUP, tables)
    return added((a, b), (e, f)), added((c, d), (g, h))


@device
def _term_four(sums: Any, scales: Any, columns: Any, record: Any, half: Any) -> Any:
    tables, levels = record + HEADER + 2 * GROUP_TABLES * half, levels_narrow(record + SCALES + 4 * half)
    a0, a1 = _group_planes(columns, tables)
    b0, b1 = _group_planes(columns + 2 * GROUP, tables + GROUP_TABLES)
    offset = totals_narrow(record + CODE_OFFSETS + 4 * half)
    s0 = accumulated_narrow(sums[0], scales, record + SCALE, scaled(offset, a0, b0, levels))
    return s0, accumulated_narrow(sums[1], scales + 16, record + SCALE, scaled(offset, a1, b1, levels))


def _narrow(columns_of_block: int, term: Any, ahead: int) -> tuple[Any, Any]:
    """(one, two) of `matmul_of` for weights with a scale per so many columns."""
    pairs = columns_of_block // _PAIR

    @device
    def one(tile: Any, cols: Any, record: Any, out: Any, rows: Any) -> None:
        sums = zeros_narrow(), zeros_narrow()
        half = 0
        for _block in range(cols // columns_of_block):
            prefetch_scales(tile, ahead)
            columns = tile + SCALES_BYTES
            for _pair in range(pairs):
                sums = term(sums, tile, columns, record, half)
                columns += _PAIR_BYTES
                record += RECORD * half
                half ^= 1
            tile += _block_bytes(columns_of_block)
        store_halves(out, sums, rows)

    @device
    def two(tile: Any, other: Any, cols: Any, record: Any, out: Any, rows: Any, apart: Any) -> None:
        sums = others = zeros_narrow(), zeros_narrow()
        half = 0
        for _block in range(cols // columns_of_block):
            prefetch_scales(tile, ahead)
            prefetch_scales(other, ahead)
            columns, far = tile + SCALES_BYTES, other + SCALES_BYTES
            for _pair in range(pairs):
                sums = term(sums, tile, columns, record, half)
                others = term(others, other, far, record, half)
                columns += _PAIR_BYTES
                far += _PAIR_BYTES
                record += RECORD * half
                half ^= 1
            tile += _block_bytes(columns_of_block)
            other += _block_bytes(columns_of_block)
        store_halves(out, sums, rows)
        store_halves(out + 4 * TILE_ROWS * apart, others, rows - TILE_ROWS * apart)

    return one, two


# Rows and families

_bits = simd.constant(simd.i32x8, [1 << k for k in range(8)])


@device
def _is_set(byte: Any) -> Any:
    return simd.equal(simd.and_(simd.splat_i32x8(byte), _bits()), _bits())


def _row(columns_of_block: int) -> Any:
    @device
    def row(w: Any, cols: Any, r: Any, out: Any) -> None:
        blocks = cols // columns_of_block
        block = w + r // TILE_ROWS * blocks * _block_bytes(columns_of_block)
        lane = r % TILE_ROWS
        place = SCALES_BYTES + place_of(lane)
        minus_one = simd.splat_i32x8(-1)
        for _block in range(blocks):
            d = simd.splat_f32x8(memory.load_f16(block + 2 * lane))
            for column in range(columns_of_block // 8):
                at = block + place + column // 4 * 2 * GROUP + column % 4 * COLUMN
                low, high = _is_set(memory.load_u8(at)), _is_set(memory.load_u8(at + GROUP))
                code = simd.sub(simd.sub(simd.sub(minus_one, low), high), high)
                simd.store(out, simd.mul(simd.to_f32(code), d))
                out += 32
            block += _block_bytes(columns_of_block)

    return row


def packed_bytes(tensor_type: TensorType, rows: int, cols: int) -> int:
    """Bytes of a packed matrix of whole tiles: 2 bits a weight, and a float16 per row and block of the type."""
    block_bytes = 2 + tensor_type.block_size // 4
    return -(-rows // TILE_ROWS) * TILE_ROWS * (cols // tensor_type.block_size) * block_bytes


def pack(tensor_type: TensorType, raw: Bytes, rows: int, cols: int) -> Bytes:
    """A tensor's bytes as tiles. ValueError if they are not `rows` x `cols` of them."""
    blocks = cols // tensor_type.block_size
    if cols % tensor_type.block_size or raw.size != rows * blocks * tensor_type.block_bytes:
        raise ValueError(f"{rows} x {cols} {tensor_type.name} weights are not {raw.size} bytes")
    packed = (np.zeros if rows % TILE_ROWS else np.empty)(packed_bytes(tensor_type, rows, cols), np.uint8)
    pack_codes(tensor_type, np.ascontiguousarray(raw), rows, blocks, packed)
    return packed


def _family(columns_of_block: int) -> Family:
    @device
    def tile_bytes(cols: Any) -> Any:
        return cols // columns_of_block * _block_bytes(columns_of_block)

    read = _row(columns_of_block)

    def row(w: Any, rows: Any, cols: Any, r: Any, out: Any) -> None:
        read(w, cols, r, out)

    name = f"ternary{columns_of_block}"
    if WIDE:
        one, four = _wide(columns_of_block)
        matmul = matmul_of(name, tile_bytes, one, four)
    elif PAIRS:
        one, two = _narrow(columns_of_block, _term_four, NEAR)
        matmul = matmul_of(name, tile_bytes, one, two=two)
    else:
        matmul = matmul_of(name, tile_bytes, _narrow(columns_of_block, _term_narrow, AHEAD)[0])
    return Family(name, TILE_ROWS, LUT, pack, packed_bytes, matmul, entry(ROW, name=f"{name}_row")(row))


@functools.cache
def _family_of_block(columns_of_block: int) -> Family:
    return _family(columns_of_block)


def family(tensor_type: TensorType) -> Family:
    """The family of a ternary type: one for each number of columns with a scale."""
    return _family_of_block(tensor_type.block_size)
