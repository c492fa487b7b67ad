"""The two inner products of attention, several query rows at a time over one tile of 32 keys or values.

A tile of keys is [dim][32], of values [32][row]; queries, scores and sums are float32. For each row the operations and
their order are the same however many rows go together: dimensions rising in a score, keys rising in a weighted sum.
Rows of scores and of states stand `ROW_BYTES` apart; a state's second float is the factor for what was summed before.

Both ask, one cache line per step, for what comes `ahead`: values while keys are read, the next keys while values are.
In a burst the requests would wait for each other instead of for the memory.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from prism_core.kernels.simd import f16x16, f32x16
from prism_core.kernels.staging import Lanes, Place, filled, fused
from prism_core.kernels.target import target
from prism_core.kernels.vectors import I32, I64, call, intrinsic, pointer

ROW_BYTES = 128
FACTOR = 4
"""Where a state keeps the factor."""
ROWS_TOGETHER = 4 if target().avx512 else 2
"""Rows of a block: as many as there are registers for."""
_VECTOR = 64


def _floats(place: Place, element_bytes: int, offset: int) -> Lanes:
    """16 elements of a tile as float32."""
    if element_bytes == 2:
        return place.load(f16x16, offset).floats()
    return place.load(f32x16, offset)


def _moved(builder: Any, base: Any, index: Any, step: int) -> Place:
    return Place(builder, builder.add(base, builder.mul(index, ir.Constant(I64, step))))


def _ask(builder: Any, ahead: Any, line: Any) -> None:
    place = _moved(builder, ahead, line, _VECTOR)
    hints = [ir.Constant(I32, value) for value in (0, 3, 1)]
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer(builder, place.address), *hints])


def scores_of(rows: int, element_bytes: int) -> Any:
    """(queries, their pitch in bytes, keys, dim, scores, ahead): write 32 scores for each of `rows` rows."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        queries, pitch, keys, dim, scores, ahead = arguments
        starts = [builder.add(queries, builder.mul(pitch, ir.Constant(I64, r))) for r in range(rows)]
        zero = filled(builder, f32x16, 0.0).value
        held = [[cgutils.alloca_once_value(builder, zero) for _ in range(2)] for _ in range(rows)]
        with cgutils.for_range(builder, dim) as loop:
            _ask(builder, ahead, loop.index)
            tile = _moved(builder, keys, loop.index, 32 * element_bytes)
            halves = [_floats(tile, element_bytes, 16 * element_bytes * half) for half in range(2)]
            for start, slots in zip(starts, held, strict=True):
                query = _moved(builder, start, loop.index, 4).repeat(f32x16, 0)
                for slot, half in zip(slots, halves, strict=True):
                    total = Lanes(builder, f32x16, builder.load(slot))
                    builder.store(fused(query, half, total).value, slot)
        out = Place(builder, scores)
        for r, slots in enumerate(held):
            for index, slot in enumerate(slots):
                out.store(Lanes(builder, f32x16, builder.load(slot)), ROW_BYTES * r + _VECTOR * index)
        return context.get_dummy_value()

    @intrinsic
    def scores_block(_context: Any, queries: Any, pitch: Any, keys: Any, dim: Any, scores: Any, ahead: Any) -> Any:
        return types.void(*[types.int64] * 6), generate

    return scores_block


def values_of(rows: int, vectors: int, element_bytes: int) -> Any:
    """(weights, states, values, row in bytes, low, high, sums, their pitch, ahead): for each of `rows` rows and
    16 x `vectors` dimensions, sums = factor * sums + weight x value over the keys [low, high)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, states, values, row, low, high, sums, pitch, ahead = arguments
        places = [Place(builder, builder.add(sums, builder.mul(pitch, ir.Constant(I64, r)))) for r in range(rows)]
        held = []
        for r, place in enumerate(places):
            factor = Place(builder, states).repeat(f32x16, ROW_BYTES * r + FACTOR)
            scaled = [place.load(f32x16, _VECTOR * v) * factor for v in range(vectors)]
            held.append([cgutils.alloca_once_value(builder, each.value) for each in scaled])
        with cgutils.for_range(builder, builder.sub(high, low)) as loop:
            key = builder.add(loop.index, low)
            _ask(builder, ahead, key)
            tile = Place(builder, builder.add(values, builder.mul(key, row)))
            numbers = [_floats(tile, element_bytes, 16 * element_bytes * v) for v in range(vectors)]
            for r, slots in enumerate(held):
                weight = _moved(builder, weights, key, 4).repeat(f32x16, ROW_BYTES * r)
                for slot, number in zip(slots, numbers, strict=True):
                    total = Lanes(builder, f32x16, builder.load(slot))
                    builder.store(fused(weight, number, total).value, slot)
        for place, slots in zip(places, held, strict=True):
            for v, slot in enumerate(slots):
                place.store(Lanes(builder, f32x16, builder.load(slot)), _VECTOR * v)
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
        ahead: Any,
    ) -> Any:
        return types.void(*[types.int64] * 9), generate

    return values_block
