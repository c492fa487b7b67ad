"""The two inner products of attention, several query rows at a time over one tile of 32 keys or values.

A tile of keys is [dim][32], of values [32][row]; queries, scores and sums are float32. For each row the operations and
their order are the same however many rows go together: dimensions rising in a score, keys rising in a weighted sum.
Rows of scores and of states stand `ROW_BYTES` apart; a state's second float is the factor for what was summed before.

Both ask for what comes later, a cache line for every line that they read, in turn from four places: memory gives half
as much again as from one, and in a burst the requests would wait for each other instead of for the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from prism_core.kernels.staging import Lanes, Place, filled, fused
from prism_core.kernels.target import target
from prism_core.kernels.vectors import I32, I64, call, intrinsic, pointer, vector

ROW_BYTES = 128
FACTOR = 4
"""Where a state keeps the factor."""
ROWS_TOGETHER = 4
LINE = 64
PLACES = types.UniTuple(types.int64, 4)
"""Where lines are asked for, in turn."""
LANES = 16 if target().avx512 else 8
_FLOATS, _HALVES, _BYTES, _ALL = vector("f32", LANES), vector("f16", LANES), 4 * LANES, 32 // LANES
"""What is loaded at a time, the bytes of its float32, and how many there are in 32 keys or dimensions."""


def _vectors_at_once(rows: int) -> tuple[int, bool]:
    """(vectors of 32 keys that are summed in one pass: all or half of them, whether that takes every register)."""
    now = target()
    registers = 32 if now.avx512 or now.arch == "aarch64" else 16
    each = LANES // (16 if now.avx512 else 8 if now.avx2 else 4)
    needed = rows * (_ALL * each + 1) + each
    return (_ALL, needed == registers) if needed <= registers else (_ALL // 2, False)


def _floats(place: Place, element_bytes: int, index: int) -> Lanes:
    """A vector of a tile as float32."""
    if element_bytes == 2:
        return place.load(_HALVES, 2 * LANES * index).floats()
    return place.load(_FLOATS, 4 * LANES * index)


def _add_products(
    tile: Place, element_bytes: int, factors: list[Lanes], held: list[list[Any]], first: int, tight: bool
) -> None:
    """held[row][v] += factor of the row x vector first + v of the tile."""
    builder = tile.builder
    for v in range(len(held[0])):
        if tight:
            # Or LLVM loads all vectors first, and has no register left for them.
            builder.fence("seq_cst", "singlethread")
        part = _floats(tile, element_bytes, first + v)
        for factor, slots in zip(factors, held, strict=True):
            builder.store(fused(factor, part, Lanes(builder, _FLOATS, builder.load(slots[v]))).value, slots[v])


def _moved(builder: Any, base: Any, index: Any, step: int) -> Place:
    return Place(builder, builder.add(base, builder.mul(index, ir.Constant(I64, step))))


def _in_turn(builder: Any, begin: Any, end: Any, asked: Sequence[Any], step: Callable[[Any], None]) -> None:
    """step(index) for begin <= index < end; each but a few last ones asks for a line of the next of the four places."""
    each, hints = len(PLACES), [ir.Constant(I32, value) for value in (0, 2, 1)]
    whole = builder.add(begin, builder.and_(builder.sub(end, begin), ir.Constant(I64, -each)))
    with cgutils.for_range_slice(builder, begin, whole, ir.Constant(I64, each), I64) as (index, _):
        for number in range(each):
            for base in asked[number : number + 1]:
                line = _moved(builder, base, builder.lshr(index, ir.Constant(I64, 2)), LINE)
                call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer(builder, line.address), *hints])
            # Or LLVM loads the rows of all four steps first, and has no registers left for them.
            builder.fence("seq_cst", "singlethread")
            step(builder.add(index, ir.Constant(I64, number)))
    with cgutils.for_range_slice(builder, whole, end, ir.Constant(I64, 1), I64) as (index, _):
        step(index)


def scores_of(rows: int, element_bytes: int) -> Any:
    """(queries, their pitch in bytes, keys, dim, scores, asked): 32 scores for each of `rows` rows."""
    vectors, tight = _vectors_at_once(rows)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        queries, pitch, keys, dim, scores, places = arguments
        asked = cgutils.unpack_tuple(builder, places, len(PLACES))
        starts = [builder.add(queries, builder.mul(pitch, ir.Constant(I64, r))) for r in range(rows)]
        zero = filled(builder, _FLOATS, 0.0).value
        for first in range(0, _ALL, vectors):
            held = [[cgutils.alloca_once_value(builder, zero) for _ in range(vectors)] for _ in range(rows)]

            def step(index: Any, first: int = first, held: Any = held) -> None:
                factors = [_moved(builder, start, index, 4).repeat(_FLOATS, 0) for start in starts]
                tile = _moved(builder, keys, index, 32 * element_bytes)
                _add_products(tile, element_bytes, factors, held, first, tight)

            _in_turn(builder, ir.Constant(I64, 0), dim, asked if first == 0 else (), step)
            for r, slots in enumerate(held):
                for v, slot in enumerate(slots):
                    out = Place(builder, scores).at(ROW_BYTES * r + _BYTES * (first + v))
                    out.store(Lanes(builder, _FLOATS, builder.load(slot)), 0)
        return context.get_dummy_value()

    @intrinsic
    def scores_block(_context: Any, queries: Any, pitch: Any, keys: Any, dim: Any, scores: Any, asked: Any) -> Any:
        return types.void(*[types.int64] * 5, PLACES), generate

    return scores_block


def values_of(rows: int, element_bytes: int) -> Any:
    """(weights, states, values, row in bytes, low, high, sums, their pitch, asked): for each of `rows` rows
    and 32 dimensions, sums = factor * sums + weight x value over the keys [low, high)."""
    vectors, tight = _vectors_at_once(rows)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, states, values, row, low, high, sums, pitch, places = arguments
        asked = cgutils.unpack_tuple(builder, places, len(PLACES))
        totals = [Place(builder, builder.add(sums, builder.mul(pitch, ir.Constant(I64, r)))) for r in range(rows)]
        for first in range(0, _ALL, vectors):
            held = []
            for r, total in enumerate(totals):
                factor = Place(builder, states).repeat(_FLOATS, ROW_BYTES * r + FACTOR)
                scaled = [total.load(_FLOATS, _BYTES * (first + v)) * factor for v in range(vectors)]
                held.append([cgutils.alloca_once_value(builder, each.value) for each in scaled])

            def step(key: Any, first: int = first, held: Any = held) -> None:
                place = _moved(builder, weights, key, 4)
                factors = [place.repeat(_FLOATS, ROW_BYTES * r) for r in range(rows)]
                tile = Place(builder, builder.add(values, builder.mul(key, row)))
                _add_products(tile, element_bytes, factors, held, first, tight)

            _in_turn(builder, low, high, asked if first == 0 else (), step)
            for total, slots in zip(totals, held, strict=True):
                for v, slot in enumerate(slots):
                    total.store(Lanes(builder, _FLOATS, builder.load(slot)), _BYTES * (first + v))
        return context.get_dummy_value()

    @intrinsic
    def values_block(
        _context: Any,
        weights: Any,
        states: Any,
        values: Any,
        row: Any,
        low: Any,
        high: Any,
        sums: Any,
        pitch: Any,
        asked: Any,
    ) -> Any:
        return types.void(*[types.int64] * 8, PLACES), generate

    return values_block
