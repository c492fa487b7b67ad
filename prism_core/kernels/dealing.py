"""A vocabulary dealt into buckets by its logits, to find where a sum of weights falls without putting it in order.

The order is by logit, highest first, then by id. A bucket holds logits of one stretch, and no later bucket has a higher
one, so running sums over buckets tell which of them to look into; only its members are collected, narrowed to some
dozens by the bits of their floats (at most three times, whatever they are), and put in order. Sums are of whole units
(`weights`), so what is found is exactly what the full order gives.

A `plan` is the address of int64 words, see the constants; `limit` is the last token that takes part, as its logit and
its id, and `floor` the lowest difference from the best logit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from prism_core.kernels.jit import device
from prism_core.kernels.memory import load_f32, load_i32, load_i64, store_f32, store_i32, store_i64
from prism_core.kernels.simd import (
    equal,
    extract,
    load_f32x16,
    max_lanes,
    minimum,
    mul,
    round_i32,
    splat_f32x16,
    splat_i32x16,
    store,
    sub,
)
from prism_core.kernels.weights import LANES, UNIT, sixteen, units
from prism_core.kernels.words import word

BUCKETS = 1024
FEW = 64
STRETCH = 64
SMALL = 64
"""So many members are put in order at once."""
TOP_K, TOP_P, FLOOR, INVERSE, WINDOW, REPETITION, COPY, VALUES, IDS, KEPT, KEPT_IDS = range(11)
"""Words of a plan: 0 or how many take part (int); top-p; log(min-p); 1 / temperature; how far below the best anything
has weight; repetition penalty (floats); addresses of float32[vocabulary] for penalised logits, of float32[vocabulary +
16] and int32[vocabulary] for the members of a bucket, and of float32 and int32[top-k + 1] for what that leaves."""
_PADDED, _UNITS, _INDICES = 16, 24, 40
FEW_VALUES, FEW_IDS, FEW_UNITS = 64, 96, 160
_SUMS, _NARROW = 224, 224 + BUCKETS
PLAN_WORDS = 224 + 2 * BUCKETS

NO_LIMIT = np.float32(-np.inf)
_LOWEST, _HIGHEST = np.float32(-np.finfo(np.float32).max), np.float32(np.finfo(np.float32).max)
_LAST = np.float32(BUCKETS - 1)
_ZERO = np.float32(0.0)


@device
def padded(plan: Any) -> Any:
    """64 bytes for the last few logits."""
    return plan + 8 * _PADDED


@device
def spare(plan: Any) -> Any:
    """128 bytes for sixteen weights."""
    return plan + 8 * _UNITS


@device
def scale_of(logits: Any, size: Any, best: Any, window: Any) -> Any:
    """What a difference from the best is multiplied by to give its bucket; 0 if all logits are equal."""
    least = splat_f32x16(best)
    whole = size - size % LANES
    for at in range(0, whole, LANES):
        least = minimum(least, load_f32x16(logits + 4 * at))
    low = -max_lanes(sub(splat_f32x16(_ZERO), least))
    for at in range(whole, size):
        low = min(low, load_f32(logits + 4 * at))
    width = min(np.float64(best) - np.float64(low), window)
    return np.float32(min((BUCKETS - 1) / width, np.float64(_HIGHEST))) if width > 0 else _ZERO


@device
def _bucket(gaps: Any, scale: Any) -> Any:
    return round_i32(minimum(mul(gaps, splat_f32x16(scale)), splat_f32x16(_LAST)))


@device
def deal(plan: Any, logits: Any, size: Any, best: Any, scale: Any, inverse: Any) -> None:
    """Fill the sums of each bucket with weights at 1 / `inverse`; with 0 everything weighs one unit of the best."""
    sums = plan + 8 * _SUMS
    for at in range(BUCKETS):
        store_i64(sums + 8 * at, 0)
    top, places = splat_f32x16(best), plan + 8 * _INDICES
    for at in range(0, size, LANES):
        values, lanes = sixteen(logits, at, size, padded(plan)), min(LANES, size - at)
        store(places, _bucket(sub(top, values), scale))
        if inverse > 0:
            store(plan + 8 * _UNITS, units(values, best, inverse))
        if lanes < LANES:
            for lane in range(lanes):
                _add(places, lane, plan + 8 * _UNITS if inverse > 0 else 0, sums)
        elif inverse > 0:
            for lane in range(LANES):  # a number known beforehand makes it a third quicker
                _add(places, lane, plan + 8 * _UNITS, sums)
        else:
            for lane in range(LANES):
                _add(places, lane, 0, sums)


@device
def _add(places: Any, lane: Any, weights: Any, sums: Any) -> None:
    place = sums + 8 * load_i32(places + 4 * lane)
    store_i64(place, load_i64(place) + (load_i64(weights + 8 * lane) if weights != 0 else UNIT))


@device
def _collect(
    plan: Any, logits: Any, size: Any, best: Any, scale: Any, bucket: Any, limit: Any, last: Any, floor: Any
) -> Any:
    """Gather what takes part of a bucket, by id; how many."""
    found, top, wanted, none = 0, splat_f32x16(best), splat_i32x16(bucket), splat_i32x16(0)
    for begin in range(0, size, STRETCH):
        if begin + STRETCH <= size:
            inside = none
            for at in range(4 * begin, 4 * (begin + STRETCH), 4 * LANES):
                inside = sub(inside, equal(_bucket(sub(top, load_f32x16(logits + at)), scale), wanted))
            if max_lanes(inside) == 0:
                continue
        for at in range(begin, min(begin + STRETCH, size), LANES):
            inside = sub(none, equal(_bucket(sub(top, sixteen(logits, at, size, padded(plan))), scale), wanted))
            if max_lanes(inside) == 0:
                continue
            store(plan + 8 * _INDICES, inside)
            for lane in range(min(LANES, size - at)):
                if load_i32(plan + 8 * _INDICES + 4 * lane) == 1:
                    value = load_f32(logits + 4 * (at + lane))
                    before = value > limit or (value == limit and at + lane <= last)
                    if before and np.float64(max(value - best, _LOWEST)) >= floor:
                        store_f32(word(plan, VALUES) + 4 * found, value)
                        store_i32(word(plan, IDS) + 4 * found, at + lane)
                        found += 1
    return found


@device
def keep(plan: Any, logits: Any, size: Any, limit: Any, last: Any) -> Any:
    """Write what takes part to the plan's memory for it, by id; its address."""
    values, ids, found, whole = word(plan, KEPT), word(plan, KEPT_IDS), 0, size - size % LANES
    for begin in range(0, whole, LANES):
        if max_lanes(load_f32x16(logits + 4 * begin)) >= limit:
            for lane in range(LANES):
                found += _keep_one(logits, begin + lane, values, ids, found, limit, last)
    for at in range(whole, size):
        found += _keep_one(logits, at, values, ids, found, limit, last)
    return values


@device
def _keep_one(logits: Any, at: Any, values: Any, ids: Any, found: Any, limit: Any, last: Any) -> Any:
    """1 if it is kept. It is written without a condition, which would be guessed wrong too often."""
    value = load_f32(logits + 4 * at)
    store_f32(values + 4 * found, value)
    store_i32(ids + 4 * found, at)
    return (value > limit) | ((value == limit) & (at <= last))


@device
def _key(values: Any, at: Any, spare: Any) -> Any:
    """An integer that is the less, the higher the value is; equal for both zeros."""
    store_f32(spare, _ZERO - load_f32(values + 4 * at))
    bits = load_i32(spare)
    return bits ^ 0x7FFFFFFF if bits < 0 else bits


@device
def _narrow(plan: Any, count: Any, best: Any, inverse: Any, target: Any) -> tuple[Any, Any]:
    """Leave only members among which the running sum reaches `target`, equals or few; (how many, what they are to
    reach)."""
    values, ids, sums, spare = word(plan, VALUES), word(plan, IDS), plan + 8 * _NARROW, plan + 8 * _INDICES
    while count > SMALL:
        first = last = _key(values, 0, spare)
        for at in range(count):
            key = _key(values, at, spare)
            first, last = min(first, key), max(last, key)
        if first == last:
            break
        shift = 0
        while (last - first) >> shift >= BUCKETS:
            shift += 1
        for at in range(BUCKETS):
            store_i64(sums + 8 * at, 0)
        for at in range(0, count, LANES):
            store(plan + 8 * _UNITS, units(load_f32x16(values + 4 * at), best, inverse))
            for lane in range(min(LANES, count - at)):
                place = sums + 8 * ((_key(values, at + lane, spare) - first) >> shift)
                store_i64(place, load_i64(place) + word(plan, _UNITS + lane))
        bucket = 0
        while target > load_i64(sums + 8 * bucket):
            target -= load_i64(sums + 8 * bucket)
            bucket += 1
        kept = 0
        for at in range(count):
            if (_key(values, at, spare) - first) >> shift == bucket:
                store_f32(values + 4 * kept, load_f32(values + 4 * at))
                store_i32(ids + 4 * kept, load_i32(ids + 4 * at))
                kept += 1
        count = kept
    return count, target


@device
def _sort(values: Any, ids: Any, count: Any) -> None:
    """By value, the highest first; equals stay in order."""
    for at in range(1, count):
        value, number, place = load_f32(values + 4 * at), load_i32(ids + 4 * at), at
        while place > 0 and load_f32(values + 4 * (place - 1)) < value:
            store_f32(values + 4 * place, load_f32(values + 4 * (place - 1)))
            store_i32(ids + 4 * place, load_i32(ids + 4 * (place - 1)))
            place -= 1
        store_f32(values + 4 * place, value)
        store_i32(ids + 4 * place, number)


@device
def reach(
    plan: Any, logits: Any, size: Any, best: Any, scale: Any, inverse: Any, target: Any, limit: Any,
    last: Any, floor: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """The token with which the running sum of what was dealt reaches `target`, at most its total: (logit, id, sum)."""
    wanted = target
    sums, bucket = plan + 8 * _SUMS, 0
    while target > load_i64(sums + 8 * bucket):
        target -= load_i64(sums + 8 * bucket)
        bucket += 1
    count = _collect(plan, logits, size, best, scale, bucket, limit, last, floor)
    count, target = _narrow(plan, count, best, inverse, target)
    values, ids = word(plan, VALUES), word(plan, IDS)
    if count <= SMALL:
        _sort(values, ids, count)
    for at in range(0, count, LANES):
        store(plan + 8 * _UNITS, units(load_f32x16(values + 4 * at), best, inverse))
        for lane in range(min(LANES, count - at)):
            target -= word(plan, _UNITS + lane)
            if target <= 0:
                place = 4 * (at + lane)
                return load_f32(values + place), load_i32(ids + place), wanted - target
    return best, 0, wanted


@device
def total(
    plan: Any, logits: Any, size: Any, best: Any, scale: Any, inverse: Any, limit: Any, last: Any,
    floor: Any,
) -> Any:  # fmt: skip
    """The sum of what was dealt and takes part: whole buckets, and the members of the one where the limit is."""
    sums, result = plan + 8 * _SUMS, 0
    if limit == NO_LIMIT and floor == -np.inf:
        for bucket in range(BUCKETS):
            result += load_i64(sums + 8 * bucket)
        return result
    end = extract(_bucket(sub(splat_f32x16(best), splat_f32x16(limit)), scale), 0)
    end = min(end, extract(_bucket(splat_f32x16(np.float32(-floor)), scale), 0))
    for bucket in range(end):
        result += load_i64(sums + 8 * bucket)
    values = word(plan, VALUES)
    count = _collect(plan, logits, size, best, scale, end, limit, last, floor)
    for at in range(0, count, LANES):
        store(plan + 8 * _UNITS, units(load_f32x16(values + 4 * at), best, inverse))
        for lane in range(min(LANES, count - at)):
            result += word(plan, _UNITS + lane)
    return result
