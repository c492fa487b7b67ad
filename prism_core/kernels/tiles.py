"""Matrix products over tiles of 8 interleaved rows: one body for every layout of integer codes.

Lane r of a vector belongs to row r of the tile, so nothing is summed across lanes. The arithmetic is that of `dots`
for each 32 columns in order, on all paths; so a (row, token) gives the same bits whether it is computed alone, among
many tokens, by 8 or by 16 lanes.

Few tokens stream the packed weights and decode them in registers. Many (from `FEW_TOKENS` on) decode 16 rows x `CHUNK`
columns to bytes on the stack, once per `GROUP` tokens, and multiply them in blocks of rows x tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from prism_core.gguf.types import TensorType
from prism_core.kernels import memory, simd
from prism_core.kernels.coding import A8, A8_RECORD
from prism_core.kernels.dots import add_columns, integer_sums
from prism_core.kernels.families import MATMUL, ROW, Bytes, Family
from prism_core.kernels.jit import Entry, entry
from prism_core.kernels.layout import CODES_BYTES, Layout
from prism_core.kernels.packing import TILE_ROWS
from prism_core.kernels.simd import f32x8, i8x32
from prism_core.kernels.staging import Lanes, Place
from prism_core.kernels.target import target
from prism_core.kernels.vectors import I8, I64, intrinsic, vector

GROUP = 128
"""Tokens per decoding of a tile."""
CHUNK = 1024
"""Columns decoded at a time."""
FEW_TOKENS = 4

LANES, TOKENS = (16, 8) if target().avx512 else (8, 4)
"""Rows of a vector and tokens of a register block in the product of many tokens."""


def decoder(layout: Layout) -> Any:
    """(block of a tile, activations, f32x8) -> f32x8 with the block's columns added, for one token."""

    @intrinsic
    def decode_block(_context: Any, block: Any, act: Any, acc: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            place = Place(builder, arguments[0])
            total = Lanes(builder, f32x8, arguments[2])
            for part in range(layout.block // 32):
                record = Place(builder, arguments[1]).at(part * A8_RECORD)
                values = [record.repeat(i8x32, 4 * j) for j in range(8)]
                sums = integer_sums(layout, layout.codes(place, part), [values], layout.scales_per_32)[0]
                total = add_columns(
                    layout, sums, layout.scales(place, part), layout.minimums(place, part), record, total
                )
            return total.value

        return f32x8(types.int64, types.int64, f32x8), generate

    return decode_block


def unpacker(layout: Layout) -> Any:
    """(block of a tile, records, half): decode the block into its half (8 of 16 rows) of the records."""

    @intrinsic
    def unpack_block(_context: Any, block: Any, records: Any, half: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            place = Place(builder, arguments[0])
            out = Place(builder, builder.add(arguments[1], builder.mul(arguments[2], ir.Constant(I64, 32))))
            for part in range(layout.block // 32):
                base = part * layout.record
                for j, code in enumerate(layout.codes(place, part)):
                    out.store(code, base + 64 * j)
                numbers = layout.scales(place, part) + layout.minimums(place, part)
                for index, number in enumerate(numbers):
                    out.store(number, base + CODES_BYTES + 64 * index)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), generate

    return unpack_block


def multiplier(layout: Layout) -> Any:
    """(records, count, activations, their stride, tokens left, sums): add `count` x 32 columns to the sums.

    Sums are 16 float32 per token. `TOKENS` of them are read and written; where fewer tokens are left, the last token's
    activations stand in for the missing ones, and what those sums become is not used.
    """
    kind, bytes_ = vector("f32", LANES), vector("i8", 4 * LANES)

    def one_block(builder: Any, record: Place, acts: list[Place], part: int, accs: list[Lanes]) -> list[Lanes]:
        codes = [record.load(bytes_, 64 * j + 4 * LANES * part) for j in range(8)]
        numbers = [
            record.load(kind, CODES_BYTES + 64 * index + 4 * LANES * part)
            for index in range(layout.scales_per_32 + layout.minimums_per_32)
        ]
        scales, minimums = numbers[: layout.scales_per_32], numbers[layout.scales_per_32 :]
        values = [[act.repeat(bytes_, 4 * j) for j in range(8)] for act in acts]
        sums = integer_sums(layout, codes, values, layout.scales_per_32)
        return [
            add_columns(layout, each, scales, minimums, act, acc)
            for each, act, acc in zip(sums, acts, accs, strict=True)
        ]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        records, count, act, stride, left, sums = arguments
        last = builder.sub(left, ir.Constant(I64, 1))
        starts = []
        for token in range(TOKENS):
            number = ir.Constant(I64, token)
            number = builder.select(builder.icmp_signed("<", number, last), number, last)
            starts.append(builder.add(act, builder.mul(number, stride)))
        for part in range(16 // LANES):
            places = [Place(builder, sums).at(64 * token + 4 * LANES * part) for token in range(TOKENS)]
            held = [cgutils.alloca_once_value(builder, place.load(kind, 0).value) for place in places]
            with cgutils.for_range(builder, count) as loop:
                record = Place(builder, builder.add(records, builder.mul(loop.index, ir.Constant(I64, layout.record))))
                distance = builder.mul(loop.index, ir.Constant(I64, A8_RECORD))
                acts = [Place(builder, builder.add(start, distance)) for start in starts]
                accs = [Lanes(builder, kind, builder.load(slot)) for slot in held]
                for slot, acc in zip(held, one_block(builder, record, acts, part, accs), strict=True):
                    builder.store(acc.value, slot)
            for place, slot in zip(places, held, strict=True):
                place.store(Lanes(builder, kind, builder.load(slot)), 0)
        return context.get_dummy_value()

    @intrinsic
    def multiply(_context: Any, records: Any, count: Any, act: Any, stride: Any, left: Any, sums: Any) -> Any:
        return types.void(*[types.int64] * 6), generate

    return multiply


def stack(size: int) -> Any:
    """A function that gives the address of `size` bytes on the stack, 64-byte aligned, for the life of the call."""

    @intrinsic
    def reserved(_context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            with builder.goto_entry_block():
                space = builder.alloca(ir.ArrayType(I8, size))
                space.align = 64
            return builder.ptrtoint(space, I64)

        return types.int64(), generate

    return reserved


def matmul_for(layout: Layout) -> Entry:
    """The family's `matmul`; see `families`."""
    block, block_bytes, record = layout.block, layout.block_bytes, layout.record
    decode_block, unpack_block, multiply = decoder(layout), unpacker(layout), multiplier(layout)
    record_space, sum_space = stack(CHUNK // 32 * record), stack(GROUP * 64)
    act_block = block // 32 * A8_RECORD

    @entry(MATMUL, name=f"matmul_{layout.name}")
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
        blocks = cols // block
        if n_tokens < FEW_TOKENS:
            for tile in range(tile_begin, tile_end):
                for token in range(n_tokens):
                    place, values = w + tile * blocks * block_bytes, act + token * act_stride
                    total = simd.splat_f32x8(0.0)
                    for _ in range(blocks):
                        total = decode_block(place, values, total)
                        place += block_bytes
                        values += act_block
                    first = tile * TILE_ROWS
                    simd.store_first(out + 4 * (token * out_stride + first), total, rows - first)
            return
        records, sums = record_space(), sum_space()
        for begin in range(0, n_tokens, GROUP):
            tokens = min(GROUP, n_tokens - begin)
            for tile in range(tile_begin, tile_end, 2):
                second = min(tile + 1, tile_end - 1)
                memory.fill(sums, 0, tokens * 64)
                for start in range(0, blocks, CHUNK // block):
                    stop = min(start + CHUNK // block, blocks)
                    for index in range(start, stop):
                        place = records + (index - start) * (block // 32) * record
                        unpack_block(w + (tile * blocks + index) * block_bytes, place, 0)
                        unpack_block(w + (second * blocks + index) * block_bytes, place, 1)
                    values = act + begin * act_stride + start * act_block
                    count = (stop - start) * (block // 32)
                    for token in range(0, tokens, TOKENS):
                        multiply(
                            records, count, values + token * act_stride, act_stride, tokens - token, sums + token * 64
                        )
                first = tile * TILE_ROWS
                here = min(rows, tile_end * TILE_ROWS) - first
                for token in range(tokens):
                    where = out + 4 * ((begin + token) * out_stride + first)
                    simd.store_first(where, simd.load_f32x16(sums + token * 64), here)

    return matmul


def row_for(layout: Layout) -> Entry:
    """The family's `row`; see `families`."""
    block, block_bytes, record, offset, signed = (
        layout.block,
        layout.block_bytes,
        layout.record,
        layout.offset,
        layout.signed,
    )
    scales, minimums = layout.scales_per_32, layout.minimums_per_32
    unpack_block, record_space = unpacker(layout), stack(block // 32 * record)

    @entry(ROW, name=f"row_{layout.name}")
    def row(w: Any, rows: Any, cols: Any, r: Any, out: Any) -> None:
        records, blocks, lane = record_space(), cols // block, r % TILE_ROWS
        for index in range(blocks):
            unpack_block(w + (r // TILE_ROWS * blocks + index) * block_bytes, records, 0)
            for column in range(block):
                place, inside = records + column // 32 * record, column % 32
                code_place = place + inside // 4 * 64 + lane * 4 + inside % 4
                code = memory.load_i8(code_place) if signed else memory.load_u8(code_place)
                numbers = place + CODES_BYTES + lane * 4
                value = np.float32(code - offset) * memory.load_f32(numbers + inside // 16 * (scales - 1) * 64)
                if minimums:
                    value += memory.load_f32(numbers + (scales + inside // 16 * (minimums - 1)) * 64)
                memory.store_f32(out + 4 * (index * block + column), value)

    return row


def family_of(layout: Layout, pack: Any) -> Family:
    """The family of a layout; `pack(type, raw, rows, cols)` as in `Family`."""

    def packed_bytes(_tensor_type: TensorType, rows: int, cols: int) -> int:
        return -(-rows // TILE_ROWS) * (cols // layout.block) * layout.block_bytes

    def checked(tensor_type: TensorType, raw: Bytes, rows: int, cols: int) -> Bytes:
        if cols % layout.block or raw.size != tensor_type.nbytes(rows * cols):
            raise ValueError(f"{raw.size} bytes are not {rows} x {cols} values of {tensor_type.name}")
        out = np.zeros(packed_bytes(tensor_type, rows, cols), dtype=np.uint8)
        pack(tensor_type, raw, rows, cols, out)
        return out

    return Family(layout.name, TILE_ROWS, A8, checked, packed_bytes, matmul_for(layout), row_for(layout))
