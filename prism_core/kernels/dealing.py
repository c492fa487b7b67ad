"""Members of a vocabulary dealt into buckets by their logits, to find where a sum of weights falls, not all in order.

The order is by logit, highest first, then by place. A bucket holds logits of one stretch, and no later bucket has a
higher one, so running sums over buckets tell which of them to look into; only its members are left, narrowed to some
dozens by the bits of their floats (at most three times, whatever they are), and put in order. Sums are of whole units
(`weights`), so what is found is exactly what the full order gives.

A `plan` is the address of int64 words, see the constants. Members are in its memory for them, by place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from prism_core.kernels.jit import device
from prism_core.kernels.memory import f32_bits, load_f32, load_i32, load_i64, store_f32, store_i32, store_i64
from prism_core.kernels.simd import (
    equal,
    load_f32x16,
    max_lanes,
    maximum,
    minimum,
    mul,
    round_i32,
    splat_f32x16,
    splat_i32x16,
    store,
    sub,
)
from prism_core.kernels.vectors import I64, Vector, intrinsic
from prism_core.kernels.weights import BLOCK, LANES, units
from prism_core.kernels.words import word

BUCKETS = 1024
FEW = 64
SMALL = 64
"""So many members are put in order at once."""
TOP_K, TOP_P, FLOOR, INVERSE, WINDOW, REPETITION, COPY, VALUES, IDS, KEPT, KEPT_IDS, PASSES = range(12)
"""Words of a plan: 0 or how many take part (int); top-p; log(min-p); 1 / temperature; how far below the best anything
has weight; repetition penalty (floats); addresses of float32[vocabulary] for penalised logits, of float32 and int32
[vocabulary + 16] for members and their places, and of the same for what is kept of a vocabulary and its ids; how often
the last draw that looked through all gathered members."""
PADDED, UNITS, INDICES = 16, 24, 40
"""Room for sixteen floats, int64 and int32."""
FEW_VALUES, FEW_IDS, FEW_UNITS, SUMS = 64, 96, 160, 224
SQUARES = SUMS + BUCKETS
HEAVIEST = SQUARES + BUCKETS // 2
HITS = HEAVIEST + BUCKETS // 2
ROOM = HITS + BLOCK // LANES
TAIL = ROOM + BLOCK
PLAN_WORDS = TAIL + BLOCK // 2

_HIGHEST = np.float32(np.finfo(np.float32).max)
_LAST = np.float32(BUCKETS - 1)
_ZERO = np.float32(0.0)


@intrinsic
def lanes_set(_context: Any, mask: Any) -> Any:
    """The lanes of a mask (of `less`, `equal`) that are -1, as bits of an int64."""
    if not isinstance(mask, Vector) or mask.is_float:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        negative = builder.icmp_signed("<", arguments[0], mask.constant(0))
        return builder.zext(builder.bitcast(negative, ir.IntType(mask.lanes)), I64)

    return types.int64(mask), generate


@device
def ends(values: Any, size: Any) -> tuple[Any, Any]:
    """(the highest, the lowest) of `size` >= 1 float32."""
    first = load_f32(values)
    most, least = splat_f32x16(first), splat_f32x16(first)
    whole = size - size % LANES
    for at in range(0, whole, LANES):
        most, least = maximum(most, load_f32x16(values + 4 * at)), minimum(least, load_f32x16(values + 4 * at))
    top, low = max_lanes(most), -max_lanes(sub(splat_f32x16(_ZERO), least))
    for at in range(whole, size):
        top, low = max(top, load_f32(values + 4 * at)), min(low, load_f32(values + 4 * at))
    return top, low


@device
def scale_of(top: Any, low: Any, window: Any) -> Any:
    """What a difference from the top is multiplied by to give its bucket; 0 if there is none."""
    width = min(np.float64(top) - np.float64(low), window)
    return np.float32(min((BUCKETS - 1) / width, np.float64(_HIGHEST))) if width > 0 else _ZERO


@device
def bucket_of(gaps: Any, scale: Any) -> Any:
    return round_i32(minimum(mul(gaps, splat_f32x16(scale)), splat_f32x16(_LAST)))


@device
def deal(plan: Any, values: Any, size: Any, top: Any, scale: Any, best: Any, inverse: Any) -> None:
    """Fill the sums of each bucket with weights; the memory of `values` is a whole multiple of sixteen long."""
    sums, places, weights = plan + 8 * SUMS, plan + 8 * INDICES, plan + 8 * UNITS
    for at in range(BUCKETS):
        store_i64(sums + 8 * at, 0)
    whole = size - size % LANES
    for at in range(0, size, LANES):
        vector = load_f32x16(values + 4 * at)
        store(places, bucket_of(sub(splat_f32x16(top), vector), scale))
        store(weights, units(vector, best, inverse))
        if at < whole:
            for lane in range(LANES):  # a number known beforehand makes it a third quicker
                _add(places, lane, weights, sums)
        else:
            for lane in range(size - whole):
                _add(places, lane, weights, sums)


@device
def _add(places: Any, lane: Any, weights: Any, sums: Any) -> None:
    place = sums + 8 * load_i32(places + 4 * lane)
    store_i64(place, load_i64(place) + load_i64(weights + 8 * lane))


@device
def _leave_bucket(plan: Any, count: Any, top: Any, scale: Any, bucket: Any) -> Any:
    """Leave only the members of a bucket; how many."""
    values, ids, kept = word(plan, VALUES), word(plan, IDS), 0
    for begin in range(0, count, LANES):
        vector = load_f32x16(values + 4 * begin)
        inside = lanes_set(equal(bucket_of(sub(splat_f32x16(top), vector), scale), splat_i32x16(bucket)))
        at = begin
        while inside != 0 and at < count:
            if inside & 1:
                _move(values, ids, at, kept)
                kept += 1
            inside >>= 1
            at += 1
    return kept


@device
def _move(values: Any, ids: Any, source: Any, to: Any) -> None:
    store_f32(values + 4 * to, load_f32(values + 4 * source))
    store_i32(ids + 4 * to, load_i32(ids + 4 * source))


@device
def _passed(plan: Any, target: Any) -> tuple[Any, Any]:
    """(the bucket where the running sum reaches the target, what is left to reach there)."""
    bucket = 0
    while bucket < BUCKETS - 1 and target > word(plan, SUMS + bucket):
        target -= word(plan, SUMS + bucket)
        bucket += 1
    return bucket, target


@device
def ordered(value: Any) -> Any:
    """An integer that is the greater, the higher the float32; the same for both zeros."""
    bits = f32_bits(value)
    return bits if bits <= 0x7FFFFFFF else 0x80000000 - bits


@device
def _narrow(plan: Any, count: Any, best: Any, inverse: Any, target: Any) -> tuple[Any, Any]:
    """Leave only members among which the running sum reaches `target`, equals or few; (how many, what they are to
    reach)."""
    values, ids, sums = word(plan, VALUES), word(plan, IDS), plan + 8 * SUMS
    while count > SMALL:
        first = last = ordered(load_f32(values))
        for at in range(count):
            order = ordered(load_f32(values + 4 * at))
            first, last = max(first, order), min(last, order)
        if first == last:
            break
        shift = 0
        while (first - last) >> shift >= BUCKETS:
            shift += 1
        for at in range(BUCKETS):
            store_i64(sums + 8 * at, 0)
        for at in range(0, count, LANES):
            store(plan + 8 * UNITS, units(load_f32x16(values + 4 * at), best, inverse))
            for lane in range(min(LANES, count - at)):
                place = sums + 8 * ((first - ordered(load_f32(values + 4 * (at + lane)))) >> shift)
                store_i64(place, load_i64(place) + word(plan, UNITS + lane))
        bucket, target = _passed(plan, target)
        kept = 0
        for at in range(count):
            if (first - ordered(load_f32(values + 4 * at))) >> shift == bucket:
                _move(values, ids, at, kept)
                kept += 1
        count = kept
    return count, target


@device
def _sort(values: Any, ids: Any, count: Any) -> None:
    """By value, the highest first; equals stay in order."""
    for at in range(1, count):
        value, number, place = load_f32(values + 4 * at), load_i32(ids + 4 * at), at
        while place > 0 and load_f32(values + 4 * (place - 1)) < value:
            _move(values, ids, place - 1, place)
            place -= 1
        store_f32(values + 4 * place, value)
        store_i32(ids + 4 * place, number)


@device
def reach(plan: Any, count: Any, best: Any, inverse: Any, wanted: Any) -> tuple[Any, Any, Any]:
    """(logit, place, sum) of the member with which the running sum reaches `wanted`, at most the sum of all."""
    values, ids, weights, target = word(plan, VALUES), word(plan, IDS), plan + 8 * UNITS, wanted
    top, low = ends(values, count)
    if count > SMALL and low < top:
        scale = scale_of(top, low, np.inf)
        deal(plan, values, count, top, scale, best, inverse)
        bucket, target = _passed(plan, target)
        count = _leave_bucket(plan, count, top, scale, bucket)
        count, target = _narrow(plan, count, best, inverse, target)
    if count > SMALL:  # all equal
        store(weights, units(load_f32x16(values), best, inverse))
        each = word(plan, UNITS)
        at = (target - 1) // each
        return load_f32(values), load_i32(ids + 4 * at), wanted - target + (at + 1) * each
    _sort(values, ids, count)
    for at in range(0, count, LANES):
        store(weights, units(load_f32x16(values + 4 * at), best, inverse))
        for lane in range(min(LANES, count - at)):
            target -= word(plan, UNITS + lane)
            if target <= 0:
                return load_f32(values + 4 * (at + lane)), load_i32(ids + 4 * (at + lane)), wanted - target
    return low, 0, wanted
