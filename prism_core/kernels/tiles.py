"""Matrix products over tiles of 8 interleaved rows: one body for every layout of integer codes.

Lane r of a vector belongs to row r of the tile, so nothing is summed across lanes. The arithmetic is that of `dots`
for each 32 columns in order, on all paths; so a (row, token) gives the same bits whether it is computed alone, among
many tokens, by 8 or by 16 lanes.

Few tokens stream the packed weights and decode them in registers. Many (from `FEW_TOKENS` on) decode `ROWS` x `CHUNK`
codes to bytes on the stack, once per `GROUP` tokens, and multiply them in register blocks of rows x tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from prism_core.gguf.types import TensorType
from prism_core.kernels import memory, simd
from prism_core.kernels.dots import add_columns, integer_sums
from prism_core.kernels.families import MATMUL, ROW, Bytes, Family
from prism_core.kernels.jit import Entry, device, entry
from prism_core.kernels.layout import Layout
from prism_core.kernels.packing import TILE_ROWS
from prism_core.kernels.simd import f32x8
from prism_core.kernels.staging import Lanes, Place, filled
from prism_core.kernels.target import target
from prism_core.kernels.vectors import I8, I64, intrinsic, vector

ROWS = 32
"""Rows decoded together, in four tiles."""
CHUNK = 640
"""Most columns decoded together, so that codes and activations stay in the nearest cache."""
GROUP = 128
"""Tokens per decoding of a tile."""
FEW_TOKENS = 3

LANES = 16 if target().avx512 else 8


def block_of(layout: Layout) -> tuple[int, int]:
    """A register block of the product of many tokens: vectors of `LANES` rows, and tokens.

    What is done to codes for each token on its own (`A8_PARTED`) loads them for each where registers are few, at no
    cost as operands of other instructions: so few tokens, then, and the more rows.
    """
    return (4, 2) if layout.parted and LANES == 8 else (2, 4)


APART = 16384
"""The least distance of two streams in bytes; nearer ones gain nothing."""


def ask(layout: Layout, places: list[Place], ahead: int, part: int) -> None:
    """Prefetch as many lines as a part is long: a whole block's at once would fill the miss buffers."""
    parts, lines = layout.block // 32, range(0, layout.block_bytes, 64)
    if part:
        places[0].keep_order()
    for place in places:
        for line in lines[part * len(lines) // parts : (part + 1) * len(lines) // parts]:
            place.prefetch(ahead + line)


def decoder(layout: Layout, streams: int) -> Any:
    """(tile, apart, blocks, activations, out): one token's products with `streams` tiles that are `apart` bytes apart.

    Writes `streams` x 8 float32 at `out`.
    """
    parts, act_bytes = layout.block // 32, layout.act_bytes

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        tile, apart, blocks, act, out = arguments
        slots = [cgutils.alloca_once_value(builder, filled(builder, f32x8, 0.0).value) for _ in range(streams)]
        with cgutils.for_range(builder, blocks) as loop:
            here = builder.add(tile, builder.mul(loop.index, ir.Constant(I64, layout.block_bytes)))
            values = Place(builder, builder.add(act, builder.mul(loop.index, ir.Constant(I64, parts * act_bytes))))
            places = [
                Place(builder, builder.add(here, builder.mul(apart, ir.Constant(I64, stream))))
                for stream in range(streams)
            ]
            totals = [Lanes(builder, f32x8, builder.load(slot)) for slot in slots]
            for part in range(parts):
                if layout.ahead:
                    ask(layout, places, layout.ahead, part)
                record = values.at(part * act_bytes)
                for stream, place in enumerate(places):
                    codes = layout.codes(place, part)
                    (sums,) = integer_sums(layout, [codes.__getitem__], [record], 2)[0]
                    scales, minimums = layout.scales(place, part), layout.minimums(place, part)
                    totals[stream] = add_columns(layout, sums, scales, minimums, record, totals[stream])
            for slot, total in zip(slots, totals, strict=True):
                builder.store(total.value, slot)
        for stream, slot in enumerate(slots):
            Place(builder, out).store(Lanes(builder, f32x8, builder.load(slot)), 4 * TILE_ROWS * stream)
        return context.get_dummy_value()

    @intrinsic
    def decode_tiles(_context: Any, tile: Any, apart: Any, blocks: Any, act: Any, out: Any) -> Any:
        return types.void(*[types.int64] * 5), generate

    return decode_tiles


@device
def _store_tile(out: Any, sums: Any, left: Any) -> None:
    """Write those of a tile's sums whose rows are below `left`."""
    if left >= TILE_ROWS:
        simd.store(out, simd.load_f32x8(sums))
    else:
        simd.store_first(out, simd.load_f32x8(sums), left)


@device
def _store_rows(out: Any, sums: Any, left: Any) -> None:
    """Write those of `ROWS` sums whose rows are below `left`."""
    if left >= ROWS:
        simd.store(out, simd.load_f32x16(sums))
        simd.store(out + 64, simd.load_f32x16(sums + 64))
    else:
        simd.store_first(out, simd.load_f32x16(sums), left)
        simd.store_first(out + 64, simd.load_f32x16(sums + 64), left - 16)


def unpacker(layout: Layout) -> Any:
    """(block of a tile, records, index, ahead): decode the block into the index-th 8 of the `ROWS` rows of the records.

    The block that stands `ahead` bytes further is asked for.
    """

    @intrinsic
    def unpack_block(_context: Any, block: Any, records: Any, index: Any, ahead: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            place = Place(builder, arguments[0])
            out = Place(builder, builder.add(arguments[1], builder.mul(arguments[2], ir.Constant(I64, 4 * TILE_ROWS))))
            later = Place(builder, builder.add(arguments[0], arguments[3]))
            for part in range(layout.block // 32):
                ask(layout, [later], 0, part)
                base = part * record_bytes(layout)
                for j, code in enumerate(layout.codes(place, part)):
                    out.store(code, base + 4 * ROWS * j)
                numbers = layout.scales(place, part) + layout.minimums(place, part)
                for number, value in enumerate(numbers):
                    out.store(value, base + 4 * ROWS * (8 + number))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), generate

    return unpack_block


def record_bytes(layout: Layout) -> int:
    """Bytes of `ROWS` decoded rows x 32 columns: 8 vectors of codes, then scales and minimums, 4 bytes a row."""
    return 4 * ROWS * (8 + layout.scales_per_32 + layout.minimums_per_32)


def multiplier(layout: Layout) -> Any:
    """(records, count, activations, their stride, tokens left, sums): add `count` x 32 columns to the sums.

    Sums are `ROWS` float32 per token. Those of a block's tokens are read and written; where fewer are left, the last
    token's activations stand in for the missing ones, and what those sums become is not used.
    """
    kind, bytes_ = vector("f32", LANES), vector("i8", 4 * LANES)
    vectors, tokens = block_of(layout)
    scale_count = layout.scales_per_32

    def place(v: int, token: int) -> int:
        return 4 * ROWS * token + 4 * LANES * v

    def multiply_32(record: Place, acts: list[Place], totals: Place) -> None:
        def codes_of(v: int) -> Any:
            return lambda j: record.load(bytes_, 4 * ROWS * j + 4 * LANES * v)

        sums = integer_sums(layout, [codes_of(v) for v in range(vectors)], acts, 1)
        numbers = [
            [
                record.load(kind, 4 * ROWS * (8 + number) + 4 * LANES * v)
                for number in range(scale_count + layout.minimums_per_32)
            ]
            for v in range(vectors)
        ]
        # Totals stay in memory: in registers they would crowd out the integer sums.
        for token, act in enumerate(acts):
            after = [
                add_columns(
                    layout,
                    sums[v][token],
                    each[:scale_count],
                    each[scale_count:],
                    act,
                    totals.load(kind, place(v, token)),
                )
                for v, each in enumerate(numbers)
            ]
            for v, total in enumerate(after):
                totals.store(total, place(v, token))

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        records, count, act, stride, left, sums = arguments
        last = builder.sub(left, ir.Constant(I64, 1))
        starts = []
        for token in range(tokens):
            number = ir.Constant(I64, token)
            number = builder.select(builder.icmp_signed("<", number, last), number, last)
            starts.append(builder.add(act, builder.mul(number, stride)))
        rows_at_once = LANES * vectors
        with cgutils.for_range_slice(
            builder, ir.Constant(I64, 0), ir.Constant(I64, 4 * ROWS), ir.Constant(I64, 4 * rows_at_once), I64
        ) as (first, _):
            totals = Place(builder, builder.add(sums, first))
            with cgutils.for_range(builder, count) as loop:
                offset = builder.mul(loop.index, ir.Constant(I64, record_bytes(layout)))
                record = Place(builder, builder.add(builder.add(records, first), offset))
                distance = builder.mul(loop.index, ir.Constant(I64, layout.act_bytes))
                acts = [Place(builder, builder.add(start, distance)) for start in starts]
                multiply_32(record, acts, totals)
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
    block, block_bytes, record = layout.block, layout.block_bytes, record_bytes(layout)
    decode_tile, decode_tiles = decoder(layout, 1), decoder(layout, layout.streams)
    unpack_block, multiply = unpacker(layout), multiplier(layout)
    record_space, sum_space = stack(CHUNK // 32 * record), stack(GROUP * 4 * ROWS)
    few_space = stack(4 * TILE_ROWS * layout.streams)
    streams, (_, together) = layout.streams, block_of(layout)
    # Of the next tokens, where they come soon, the first lines are asked for; the processor finds the rest by itself.
    soon = 192 if together == 2 else 0
    act_block, tiles, sum_bytes = block // 32 * layout.act_bytes, ROWS // TILE_ROWS, 4 * ROWS

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
            sums, tile_bytes = few_space(), blocks * block_bytes
            side = (tile_end - tile_begin) // streams
            if side * tile_bytes < APART:
                side = 0
            for tile in range(tile_begin, tile_begin + side):
                for token in range(n_tokens):
                    decode_tiles(w + tile * tile_bytes, side * tile_bytes, blocks, act + token * act_stride, sums)
                    for stream in range(streams):
                        first = (tile + stream * side) * TILE_ROWS
                        place = sums + 4 * TILE_ROWS * stream
                        _store_tile(out + 4 * (token * out_stride + first), place, rows - first)
            for tile in range(tile_begin + streams * side, tile_end):
                for token in range(n_tokens):
                    decode_tile(w + tile * tile_bytes, 0, blocks, act + token * act_stride, sums)
                    first = tile * TILE_ROWS
                    _store_tile(out + 4 * (token * out_stride + first), sums, rows - first)
            return
        records, sums = record_space(), sum_space()
        chunks = (blocks + CHUNK // block - 1) // (CHUNK // block)
        chunk = (blocks + chunks - 1) // chunks
        for begin in range(0, n_tokens, GROUP):
            tokens = min(GROUP, n_tokens - begin)
            for tile in range(tile_begin, tile_end, tiles):
                first = tile * TILE_ROWS
                row_count = min(rows, tile_end * TILE_ROWS) - first
                for start in range(0, blocks, chunk):
                    stop = min(start + chunk, blocks)
                    # Next come the same columns of the tile further on, or the first ones of the next tiles.
                    ahead = block_bytes * (chunk if stop < blocks else tiles * blocks - start)
                    for index in range(start, stop):
                        place = records + (index - start) * (block // 32) * record
                        for number in range(tiles):
                            here = min(tile + number, tile_end - 1)
                            unpack_block(w + (here * blocks + index) * block_bytes, place, number, ahead)
                    values = act + begin * act_stride + start * act_block
                    count = (stop - start) * (block // 32)
                    for token in range(0, tokens, together):
                        left, place = tokens - token, sums + token * sum_bytes
                        # Begun and given away one register block after the other, while it is near.
                        if start == 0:
                            memory.fill(place, 0, together * sum_bytes)
                        for number in range(together):
                            for line in range(0, soon, 64):
                                memory.prefetch_t0(values + (token + together + number) * act_stride + line)
                        multiply(records, count, values + token * act_stride, act_stride, left, place)
                        if stop == blocks:
                            to = out + 4 * ((begin + token) * out_stride + first)
                            for number in range(min(together, left)):
                                _store_rows(to + 4 * number * out_stride, place + number * sum_bytes, row_count)

    return matmul


def row_for(layout: Layout) -> Entry:
    """The family's `row`; see `families`."""
    block, block_bytes, record = layout.block, layout.block_bytes, record_bytes(layout)
    offset, signed = layout.offset, layout.signed
    scales, minimums = layout.scales_per_32, layout.minimums_per_32
    unpack_block, record_space = unpacker(layout), stack(block // 32 * record)

    @entry(ROW, name=f"row_{layout.name}")
    def row(w: Any, rows: Any, cols: Any, r: Any, out: Any) -> None:
        records, blocks, lane = record_space(), cols // block, r % TILE_ROWS
        for index in range(blocks):
            unpack_block(w + (r // TILE_ROWS * blocks + index) * block_bytes, records, 0, block_bytes)
            for column in range(block):
                place, inside = records + column // 32 * record, column % 32
                code_place = place + (inside // 4 * ROWS + lane) * 4 + inside % 4
                code = memory.load_i8(code_place) if signed else memory.load_u8(code_place)
                numbers = place + (8 * ROWS + lane) * 4
                value = np.float32(code - offset) * memory.load_f32(numbers + inside // 16 * (scales - 1) * 4 * ROWS)
                if minimums:
                    value += memory.load_f32(numbers + (scales + inside // 16 * (minimums - 1)) * 4 * ROWS)
                memory.store_f32(out + 4 * (index * block + column), value)

    return row


def family_of(layout: Layout, pack: Any) -> Family:
    """The family of a layout; `pack(type, raw, rows, cols)` as in `Family`."""

    if layout.parted and (layout.scales_per_32, layout.minimums_per_32, layout.signed) != (1, 0, True):
        raise TypeError(f"{layout.name}: A8_PARTED is for signed codes with one scale and no minimum")

    def packed_bytes(_tensor_type: TensorType, rows: int, cols: int) -> int:
        return -(-rows // TILE_ROWS) * (cols // layout.block) * layout.block_bytes

    def checked(tensor_type: TensorType, raw: Bytes, rows: int, cols: int) -> Bytes:
        if cols % layout.block or raw.size != tensor_type.nbytes(rows * cols):
            raise ValueError(f"{raw.size} bytes are not {rows} x {cols} values of {tensor_type.name}")
        out = np.zeros(packed_bytes(tensor_type, rows, cols), dtype=np.uint8)
        pack(tensor_type, raw, rows, cols, out)
        return out

    return Family(layout.name, TILE_ROWS, layout.coding, checked, packed_bytes, matmul_for(layout), row_for(layout))
