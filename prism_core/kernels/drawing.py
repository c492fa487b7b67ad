"""One draw from a vocabulary's logits in one call: penalties, top-k, top-p, min-p, temperature, and the token.

The order, the weights and their sums are those of `dealing` and `weights`. Of the tokens that are left, in order:

    top-p      the fewest whose weights at temperature 1 reach ceil(top_p * sum of all)
    min-p      those whose difference from the best is at least log(min_p)
    the draw   the first whose running sum of weights passes floor(uniform * sum of all)

with the products in float64. Mostly the best 64 tell the answer, beside the sum over all: what is left undecided goes
through the buckets of `dealing`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from prism_core.kernels.dealing import (
    COPY,
    FEW,
    FEW_IDS,
    FEW_UNITS,
    FEW_VALUES,
    FLOOR,
    INVERSE,
    KEPT_IDS,
    NO_LIMIT,
    REPETITION,
    TOP_K,
    TOP_P,
    WINDOW,
    deal,
    keep,
    padded,
    reach,
    scale_of,
    spare,
    total,
)
from prism_core.kernels.jit import device, kernel
from prism_core.kernels.memory import load_f32, load_i32, load_i64, store_f32
from prism_core.kernels.selection import few_highest, highest_of
from prism_core.kernels.simd import load_f32x16, store
from prism_core.kernels.weights import LANES, UNIT, estimate, mass, write_units
from prism_core.kernels.words import load_f64, word

COUNT, CUT, DRAW = range(3)
"""The steps that need sums; the first two are at the inverse temperature of their number."""
MUCH = 4
"""Of so many parts of a vocabulary less than one is worth a copy."""
ENOUGH = 0.75
"""A part of what is estimated to be needed, below which the best few are not looked into: it would be in vain."""
_LOWEST, _HIGHEST = np.float32(-np.finfo(np.float32).max), np.float32(np.finfo(np.float32).max)


@device
def _real(plan: Any, at: Any) -> Any:
    return load_f64(plan + 8 * at)


@device
def _share(whole: Any, part: Any) -> Any:
    """How much reaches the part of a sum, from 0 to all of it."""
    return min(np.int64(math.ceil(np.float64(whole) * part)), whole)


@device
def _point(whole: Any, uniform: Any) -> Any:
    """What the running sum must reach to pass the fraction `uniform` of the sum."""
    return min(np.int64(np.float64(whole) * uniform), whole - 1) + 1


@device
def _sum(plan: Any, count: Any) -> Any:
    result = 0
    for at in range(count):
        result += word(plan, FEW_UNITS + at)
    return result


@device
def _reached(plan: Any, count: Any, target: Any) -> Any:
    """The place among the few where their running sum reaches the target, or `count`."""
    for at in range(count):
        target -= word(plan, FEW_UNITS + at)
        if target <= 0:
            return at
    return count


@device
def _penalised(plan: Any, logits: Any, size: Any, drawn: Any, ids: Any, offsets: Any) -> Any:
    """A copy of the logits with those of the ids drawn before lowered."""
    copy = word(plan, COPY)
    whole = size - size % LANES
    for at in range(0, whole, LANES):
        store(copy + 4 * at, load_f32x16(logits + 4 * at))
    for at in range(whole, size):
        store_f32(copy + 4 * at, load_f32(logits + 4 * at))
    repetition = _real(plan, REPETITION)
    for at in range(drawn):
        place = copy + 4 * load_i64(ids + 8 * at)
        value = np.float64(load_f32(place))
        value = value / repetition if value > 0 else value * repetition
        value -= load_f64(offsets + 8 * at)
        store_f32(place, np.float32(min(max(value, np.float64(_LOWEST)), np.float64(_HIGHEST))))
    return copy


@device
def _among_few(plan: Any, logits: Any, size: Any, count: Any, whole: Any, uniform: Any) -> Any:
    """The place of the token among the best `count`; `count` if they do not tell."""
    values, weights = plan + 8 * FEW_VALUES, plan + 8 * FEW_UNITS
    best, inverse = load_f32(values), _real(plan, INVERSE)
    top_p, floor = _real(plan, TOP_P), _real(plan, FLOOR)
    if count < whole < size:
        return count
    every, kept, closed = 0, count, count == whole
    if not closed and (top_p < 1 or floor == -np.inf):
        first = 1.0 if top_p < 1 else inverse
        write_units(values, count, best, first, weights)
        share = top_p if top_p < 1 else uniform
        if np.float64(_sum(plan, count)) < ENOUGH * share * np.float64(estimate(logits, size, best, first)):
            return count
        every = mass(logits, size, best, first, padded(plan), spare(plan))
    if top_p < 1:
        write_units(values, count, best, 1.0, weights)
        kept = _reached(plan, count, _share(_sum(plan, count) if closed else every, top_p)) + 1
        if kept > count:
            return count
        closed = True
    while np.float64(load_f32(values + 4 * (kept - 1)) - best) < floor:
        kept -= 1
        closed = True
    if not closed and floor > -np.inf:
        return count
    write_units(values, kept, best, inverse, weights)
    place = _reached(plan, kept, _point(_sum(plan, kept) if closed else every, uniform))
    return place if place < kept else count


@device
def _among_all(plan: Any, logits: Any, size: Any, whole: Any, best: Any, uniform: Any) -> Any:
    """The token, by dealing the whole vocabulary: for top-k, for top-p and for the draw."""
    top_p = _real(plan, TOP_P)
    limit, last, every, kept = NO_LIMIT, size, 0, False
    scale, dealt = scale_of(logits, size, best, _real(plan, WINDOW)), -1.0
    for step in range(3):
        if (step == COUNT and whole == size) or (step == CUT and top_p == 1):
            continue
        inverse = _real(plan, INVERSE) if step == DRAW else np.float64(step)
        floor = _real(plan, FLOOR) if step == DRAW else -np.inf
        if inverse != dealt:
            deal(plan, logits, size, best, scale, inverse)
        if step == COUNT:
            target = whole * UNIT
        else:
            if inverse != dealt or floor > -np.inf:
                every = total(plan, logits, size, best, scale, inverse, limit, last, floor)
            target = _share(every, top_p) if step == CUT else _point(every, uniform)
        limit, last, every = reach(plan, logits, size, best, scale, inverse, target, limit, last, floor)
        dealt = inverse
        if step == COUNT and MUCH * whole < size:
            logits, kept = keep(plan, logits, size, limit, last), True
            size, limit, last = whole, NO_LIMIT, whole
    return load_i32(word(plan, KEPT_IDS) + 4 * last) if kept else last


@kernel("int64(int64, int64, int64, int64, int64, int64, float64)")
def draw(plan: Any, logits: Any, size: Any, drawn: Any, ids: Any, offsets: Any, uniform: Any) -> Any:
    """The token that `uniform` in [0, 1) draws from `size` float32 logits by a plan (see `dealing`), or -1 if not all
    are finite. `drawn`: how many ids (int64) are penalised, by offsets (float64), or -1 for no penalties at all."""
    if drawn >= 0:
        if highest_of(logits, size) < 0:
            return -1
        logits = _penalised(plan, logits, size, drawn, ids, offsets)
    top_k = word(plan, TOP_K)
    whole = min(top_k, size) if top_k > 0 else size
    count = min(whole, FEW)
    if not few_highest(logits, size, count, plan + 8 * FEW_IDS, plan + 8 * FEW_VALUES):
        return -1
    place = 0 if whole == 1 else _among_few(plan, logits, size, count, whole, uniform)
    if place < count:
        return word(plan, FEW_IDS + place)
    return _among_all(plan, logits, size, whole, load_f32(plan + 8 * FEW_VALUES), uniform)
