"""The highest of a vocabulary's logits, one or a few, and whether all are finite, in one pass over them.

The order is by logit, highest first (+0 equals -0), then by id. Blocks whose highest does not reach what is held
already are passed over, so that after the first some blocks hardly anything but the reading is left.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from prism_core.kernels.jit import device, kernel
from prism_core.kernels.memory import load_f32, load_i64, load_u32, store_f32, store_i64
from prism_core.kernels.simd import (
    and_,
    as_i32x16,
    less,
    load_f32x16,
    max_lanes,
    maximum,
    select,
    splat_f32x16,
    splat_i32x16,
    sub,
)

BLOCK = 128
PARTS, SAMPLED = 64, 64
"""One of so many runs, of a logit of each part, is looked at beforehand."""
_MAGNITUDE, _INFINITY = 0x7FFFFFFF, 0x7F800000
_NOTHING, _INFINITE = np.float32(-np.inf), np.float32(np.inf)


@device
def _finite(logits: Any, begin: Any, end: Any) -> Any:
    finite = True
    for at in range(begin, end):
        finite = finite and (load_u32(logits + 4 * at) & _MAGNITUDE) < _INFINITY
    return finite


@device
def _block(address: Any, worst: Any) -> tuple[Any, Any]:
    """(the highest of each lane in a block, the greatest magnitudes seen so far)."""
    top = load_f32x16(address)
    for at in range(0, BLOCK, 16):
        vector = load_f32x16(address + 4 * at)
        worst = maximum(worst, and_(as_i32x16(vector), splat_i32x16(_MAGNITUDE)))
        top = select(less(top, vector), vector, top)  # one instruction, unlike `maximum`, which minds what is no number
    return top, worst


@device
def highest_of(logits: Any, size: Any) -> Any:
    """See `highest`."""
    worst = splat_i32x16(0)
    best, first = _NOTHING, 0
    whole = size - size % BLOCK
    for begin in range(0, whole, BLOCK):
        top, worst = _block(logits + 4 * begin, worst)
        reached = max_lanes(top)
        if reached > best:
            best, first = reached, begin
    for at in range(whole, size):
        value = load_f32(logits + 4 * at)
        if value > best:
            best, first = value, at
    if max_lanes(worst) >= _INFINITY or not _finite(logits, whole, size):
        return -1
    while load_f32(logits + 4 * first) != best:
        first += 1
    return first


@device
def _reached_by_many(logits: Any, size: Any) -> Any:
    """What at least `PARTS` logits reach, the highest of each part of a sample; -infinity if there are not many.

    Known beforehand, it spares logits that rise all the way from being each among the highest for a while."""
    if size < SAMPLED * PARTS:
        return _NOTHING
    lowest = splat_f32x16(_INFINITE)
    for part in range(0, PARTS, 16):
        top = load_f32x16(logits + 4 * part)
        for at in range(part, size - PARTS + 1, SAMPLED * PARTS):
            vector = load_f32x16(logits + 4 * at)
            top = select(less(top, vector), vector, top)
        lowest = select(less(top, lowest), top, lowest)
    return -max_lanes(sub(splat_f32x16(np.float32(0.0)), lowest))


@device
def _take(
    logits: Any, begin: Any, end: Any, count: Any, ids: Any, values: Any, held: Any, least: Any
) -> tuple[Any, Any]:
    """Insert what belongs among the highest; (how many are held, what is to be reached, or passed once `count` are)."""
    for at in range(begin, end):
        value = load_f32(logits + 4 * at)
        if value > least or (held < count and value == least):
            place = min(held, count - 1)
            while place > 0 and load_f32(values + 4 * (place - 1)) < value:
                store_f32(values + 4 * place, load_f32(values + 4 * (place - 1)))
                store_i64(ids + 8 * place, load_i64(ids + 8 * (place - 1)))
                place -= 1
            store_f32(values + 4 * place, value)
            store_i64(ids + 8 * place, at)
            held = min(held + 1, count)
            if held == count:
                least = load_f32(values + 4 * (count - 1))
    return held, least


@device
def few_highest(logits: Any, size: Any, count: Any, ids: Any, values: Any) -> Any:
    """Write ids (int64) and values (float32) of the `count` highest of `size` float32 logits, 1 <= count <= size and
    count <= `PARTS`.

    Gives whether all logits are finite; if not, what is written means nothing.
    """
    held, least = 0, _reached_by_many(logits, size)
    worst = splat_i32x16(0)
    whole = size - size % BLOCK
    for begin in range(0, whole, BLOCK):
        top, worst = _block(logits + 4 * begin, worst)
        reached = max_lanes(top)
        if reached > least or (held < count and reached == least):
            held, least = _take(logits, begin, begin + BLOCK, count, ids, values, held, least)
    _take(logits, whole, size, count, ids, values, held, least)
    return max_lanes(worst) < _INFINITY and _finite(logits, whole, size)


@kernel("int64(int64, int64)")
def highest(logits: Any, size: Any) -> Any:
    """The lowest id of the highest of `size` >= 1 float32 logits; -1 if any is not finite."""
    return highest_of(logits, size)
