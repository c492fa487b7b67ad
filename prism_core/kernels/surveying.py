"""About where a share of a sum of weights is reached, from a sample of a vocabulary: between two logits.

One vector of every `SAMPLED` is dealt into buckets, and the best few, which may weigh as much as all others together,
as what they are. Whatever the sample says, the sums of the pass that uses it (`sifting`) are exact, so that a guess can
only be useless, never wrong.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from prism_core.kernels.dealing import (
    BUCKETS,
    FEW,
    FEW_UNITS,
    FEW_VALUES,
    HEAVIEST,
    INDICES,
    SQUARES,
    SUMS,
    UNITS,
    VALUES,
    WINDOW,
    bucket_of,
    deal,
    ends,
    scale_of,
)
from prism_core.kernels.jit import device
from prism_core.kernels.memory import load_f32, load_i32, store_f32, store_i64
from prism_core.kernels.sifting import EVEN_THE_BEST, NO_LIMIT
from prism_core.kernels.simd import (
    less,
    load_f32x16,
    select,
    splat_f32x16,
    splat_i32x16,
    store,
    sub,
    sum_lanes,
)
from prism_core.kernels.weights import LANES, UNIT, units, write_units
from prism_core.kernels.words import load_f64, word

SAMPLED = 32
"""One of so many is in the sample."""
WORTHWHILE = 8192.0
"""Fewer than so many above `high` are gathered rather than added up."""
_HALF = 0.5


@device
def _edge(best: Any, scale: Any, bucket: Any) -> Any:
    """The logit where a bucket, or a half of one, begins."""
    return np.float32(np.float64(best) - bucket / np.float64(scale)) if scale > 0 else best


@device
def survey(plan: Any, values: Any, size: Any, inverse: Any) -> tuple[Any, Any, Any]:
    """Deal a sample, and the best few as what they are, whose units are written: (the scale of the buckets, the sum of
    all, the sum of the squares of the sample's weights)."""
    sample, count, above = word(plan, VALUES), 0, splat_i32x16(0)
    best, least = load_f32(plan + 8 * FEW_VALUES), load_f32(plan + 8 * FEW_VALUES + 4 * (FEW - 1))
    for at in range(0, size - LANES + 1, LANES * SAMPLED):
        vector = load_f32x16(values + 4 * at)
        over = less(splat_f32x16(least), vector)
        above = sub(above, over)
        store(sample + 4 * count, select(over, splat_f32x16(best), vector))
        count += LANES
    _, low = ends(sample, count)
    scale = scale_of(best, low, load_f64(plan + 8 * WINDOW))
    deal(plan, sample, count, best, scale, best, inverse)
    store_i64(plan + 8 * SUMS, word(plan, SUMS) - sum_lanes(above) * UNIT)
    total, squares = _note_spread(plan, scale, best, inverse)
    write_units(plan + 8 * FEW_VALUES, FEW, best, inverse, plan + 8 * FEW_UNITS)
    for begin in range(0, FEW, LANES):
        few = load_f32x16(plan + 8 * FEW_VALUES + 4 * begin)
        store(plan + 8 * INDICES, bucket_of(sub(splat_f32x16(best), few), scale))
        for lane in range(LANES):
            place, weight = load_i32(plan + 8 * INDICES + 4 * lane), word(plan, FEW_UNITS + begin + lane) // SAMPLED
            store_i64(plan + 8 * (SUMS + place), word(plan, SUMS + place) + weight)
            total += weight
    return scale, np.float64(total), squares


@device
def _note_spread(plan: Any, scale: Any, best: Any, inverse: Any) -> tuple[Any, Any]:
    """Note about what weights a bucket has, and the sum of their squares: (the sum of all weights, of all squares)."""
    total, every = 0, 0.0
    for begin in range(0, BUCKETS, LANES):
        for lane in range(LANES):
            store_f32(plan + 8 * INDICES + 4 * lane, _edge(best, scale, begin + lane))
        store(plan + 8 * UNITS, units(load_f32x16(plan + 8 * INDICES), best, inverse))
        for lane in range(LANES):
            held, each = word(plan, SUMS + begin + lane), np.float32(word(plan, UNITS + lane))
            total += held
            every += np.float64(held) * np.float64(each)
            store_f32(plan + 8 * HEAVIEST + 4 * (begin + lane), each)
            store_f32(plan + 8 * SQUARES + 4 * (begin + lane), np.float32(held) * each)
    return total, every


@device
def bracket(plan: Any, sample: Any, best: Any, inverse: Any, share: Any, errors: Any) -> tuple[Any, Any]:
    """(low, high), between which a share of the sum is reached if the sample is not wrong by more than so many standard
    errors, nor by as many of its members."""
    scale, total, squares = sample
    low, high, running, before, above = NO_LIMIT, EVEN_THE_BEST, 0.0, 0.0, 0.0
    if scale > 0:
        for bucket in range(BUCKETS - 1):
            running += np.float64(word(plan, SUMS + bucket))
            before += np.float64(load_f32(plan + 8 * SQUARES + 4 * bucket))
            variance = (1 - share) ** 2 * before + share**2 * max(squares - before, 0.0)
            doubt = errors * (math.sqrt(variance) + np.float64(load_f32(plan + 8 * HEAVIEST + 4 * bucket)))
            if running + doubt <= share * total:
                high, above = _edge(best, scale, bucket + _HALF), running
            if running - doubt >= share * total:
                low = _edge(best, scale, bucket + _HALF)
                break
    if high < best:
        store(plan + 8 * UNITS, units(splat_f32x16(high), best, inverse))
        if above * SAMPLED < WORTHWHILE * np.float64(word(plan, UNITS)):
            high = EVEN_THE_BEST
    return low, high
