"""One draw from a vocabulary's logits in one call: penalties, top-k, top-p, min-p, temperature, and the token.

The order, the weights and their sums are those of `dealing` and `weights`. Of the tokens that are left, in order:

    top-p      the fewest whose weights at temperature 1 reach ceil(top_p * sum of all)
    min-p      those whose difference from the best is at least log(min_p)
    the draw   the first whose running sum of weights passes floor(uniform * sum of all)

with the products in float64. Mostly the best 64 tell the answer, beside the sum over all. Else a sample tells about
where to look (`surveying`), a pass over all makes the sums exact and gathers what lies there (`sifting`), and the token
is found among that (`dealing`). If it is not there, the sample was wrong, and more is gathered, of the side that the
sums point to: once by a wider guess, then all of it.
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
    KEPT,
    KEPT_IDS,
    PADDED,
    PASSES,
    REPETITION,
    ROOM,
    TOP_K,
    TOP_P,
    UNITS,
    VALUES,
    reach,
)
from prism_core.kernels.jit import device, kernel
from prism_core.kernels.memory import load_f32, load_i32, load_i64, store_f32, store_i64
from prism_core.kernels.selection import few_highest
from prism_core.kernels.sifting import EVEN_THE_BEST, NO_LIMIT, adopt, keep, lowest_within, sift
from prism_core.kernels.simd import load_f32x16, store
from prism_core.kernels.surveying import SAMPLED, bracket, survey
from prism_core.kernels.weights import LANES, UNIT, mass, write_units
from prism_core.kernels.words import load_f64, word

COUNT, CUT, DRAW = range(3)
"""The steps that need sums; the first two are at the inverse temperature of their number."""
MANY = 4096
"""Of fewer logits all are members: a sample of them would say little."""
MUCH = 4
"""If the members are less than one of so many parts, only they are looked at from then on."""
ERRORS = 2.0
"""So many standard errors of the sample are looked into on either side."""
WIDER, MOST_ERRORS = 4.0, 8.0
"""So many times wider is a guess after one that was wrong; after the widest, all is looked into that can still be."""
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
def _drawn_finite(logits: Any, drawn: Any, ids: Any) -> Any:
    """Whether the logits that penalties would hold to float32's range are in it."""
    finite = True
    for at in range(drawn):
        value = load_f32(logits + 4 * load_i64(ids + 8 * at))
        finite = finite and _LOWEST <= value <= _HIGHEST
    return finite


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
def _among_few(plan: Any, count: Any, top_p: Any, uniform: Any) -> Any:
    """The token, if none but the best `count` take part."""
    values, weights, inverse = plan + 8 * FEW_VALUES, plan + 8 * FEW_UNITS, _real(plan, INVERSE)
    best = load_f32(values)
    if top_p < 1:
        write_units(values, count, best, 1.0, weights)
        count = _reached(plan, count, _share(_sum(plan, count), top_p)) + 1
    while np.float64(load_f32(values + 4 * (count - 1)) - best) < _real(plan, FLOOR):
        count -= 1
    write_units(values, count, best, inverse, weights)
    return word(plan, FEW_IDS + _reached(plan, count, _point(_sum(plan, count), uniform)))


@device
def _target(step: Any, plan: Any, whole: Any, every: Any, uniform: Any) -> Any:
    """What the running sum is to reach."""
    if step == COUNT:
        return whole * UNIT
    return _share(every, _real(plan, TOP_P)) if step == CUT else _point(every, uniform)


@device
def _asked(step: Any, plan: Any, whole: Any, size: Any, uniform: Any) -> Any:
    """The share of the sum where the target is, or about so."""
    if step == COUNT:
        return whole / size
    return _real(plan, TOP_P) if step == CUT else uniform


@device
def _mass(plan: Any, values: Any, size: Any, best: Any, inverse: Any) -> Any:
    if inverse == 0:
        return size * UNIT
    return mass(values, size, best, inverse, plan + 8 * ROOM, plan + 8 * PADDED, plan + 8 * UNITS)


@device
def _members(
    plan: Any, values: Any, size: Any, inverse: Any, step: Any, whole: Any, uniform: Any, every: Any, share: Any,
    sample: Any,
) -> tuple[Any, Any, Any, Any, Any, Any]:  # fmt: skip
    """Make members of what is around the one with which the running sum reaches its target: (how many, what they are to
    reach, the sum of those above them, of them, of all, whether there are none above). `every`: the sum to draw from
    if it is known, or -1."""
    best, over, under, errors = load_f32(plan + 8 * FEW_VALUES), NO_LIMIT, EVEN_THE_BEST, ERRORS
    while True:
        low, high = over, under
        if errors <= MOST_ERRORS:
            low, high = bracket(plan, sample, best, inverse, share, errors)
            low, high = max(low, over), min(high, under)
            if low >= high:
                low, high = over, under
        added_before = every >= 0 and high == EVEN_THE_BEST
        store_i64(plan + 8 * PASSES, word(plan, PASSES) + 1)
        added, above, count = sift(plan, values, size, best, 0.0 if added_before else inverse, low, high)
        if every < 0 and step != COUNT:
            every = added
        target = _target(step, plan, whole, every, uniform) - above
        inside = _mass(plan, word(plan, VALUES), count, best, inverse)
        if 0 < target <= inside:
            return count, target, above, inside, every, high == EVEN_THE_BEST
        over, under = (high, under) if target <= 0 else (over, low)
        errors *= WIDER


@device
def _at_few(plan: Any, step: Any, whole: Any, every: Any, uniform: Any) -> Any:
    """The token, if the running sum reaches its target among the best few; else -1."""
    place = _reached(plan, FEW, _target(step, plan, whole, every, uniform))
    if place == FEW:
        return -1
    return _among_few(plan, place + 1, 1.0, uniform) if step == CUT else word(plan, FEW_IDS + place)


@device
def _among_all(plan: Any, logits: Any, size: Any, whole: Any, uniform: Any) -> Any:
    """The token, by looking through all logits: for top-k, for top-p and for the draw."""
    values, ids, limit, last, best = logits, np.int64(0), NO_LIMIT, np.int64(-1), load_f32(plan + 8 * FEW_VALUES)
    worst, top_p = load_f32(plan + 8 * FEW_VALUES + 4 * (FEW - 1)), _real(plan, TOP_P)
    floor, held, total = _real(plan, FLOOR), -1, np.int64(1)
    store_i64(plan + 8 * PASSES, 0)
    for step in range(3):
        if (step == COUNT and whole == size) or (step == CUT and top_p == 1):
            continue
        if step == DRAW and floor > -np.inf:
            if limit <= worst and np.float64(worst - best) < floor:
                return _among_few(plan, min(size, FEW), 1.0, uniform)
            lowest = lowest_within(best, floor)
            if lowest > limit:
                limit, last = lowest, size
        inverse = _real(plan, INVERSE) if step == DRAW else np.float64(step)
        # The draw goes on from the cut where both weigh alike: its target is reached before the limit is.
        every = held if step == DRAW and inverse == 1 and floor == -np.inf and size > MANY else -1
        if limit > NO_LIMIT and every < 0:
            size = keep(plan, values, ids, size, limit, last)
            values, ids = word(plan, KEPT), word(plan, KEPT_IDS)
        if size <= FEW:
            return _among_few(plan, size, 1.0, uniform)
        share, sample = _asked(step, plan, whole, size, uniform), (np.float32(0.0), 0.0, 0.0)
        if size > MANY:
            sample = survey(plan, values, size, inverse)
            about = sample[1] * SAMPLED
            if every >= 0:
                share, about = uniform * np.float64(every) / np.float64(total), np.float64(total)
            if step != COUNT and np.float64(_sum(plan, FEW)) >= share * about:
                every = every if every >= 0 else _mass(plan, values, size, best, inverse)
                token = _at_few(plan, step, whole, every, uniform)
                if token >= 0:
                    return token
        count, target, above, inside, total, all_above = _members(
            plan, values, size, inverse, step, whole, uniform, every, share, sample
        )
        if all_above and MUCH * count < size:
            adopt(plan, ids, count)
            values, ids, size, total = word(plan, KEPT), word(plan, KEPT_IDS), count, inside
        limit, last, reached = reach(plan, count, best, inverse, target)
        held = above + reached if step == CUT else -1
    return load_i32(ids + 4 * last) if ids != 0 else last


@kernel("int64(int64, int64, int64, int64, int64, int64, float64)")
def draw(plan: Any, logits: Any, size: Any, drawn: Any, ids: Any, offsets: Any, uniform: Any) -> Any:
    """The token that `uniform` in [0, 1) draws from `size` float32 logits by a plan (see `dealing`), or -1 if not all
    are finite. `drawn`: how many ids (int64) are penalised, by offsets (float64), or -1 for no penalties at all."""
    if drawn >= 0:
        if not _drawn_finite(logits, drawn, ids):
            return -1
        logits = _penalised(plan, logits, size, drawn, ids, offsets)
    top_k = word(plan, TOP_K)
    whole = min(top_k, size) if top_k > 0 else size
    count = min(whole, FEW)
    if not few_highest(logits, size, count, plan + 8 * FEW_IDS, plan + 8 * FEW_VALUES):
        return -1
    if whole == count:
        return _among_few(plan, count, _real(plan, TOP_P), uniform) if count > 1 else word(plan, FEW_IDS)
    return _among_all(plan, logits, size, whole, uniform)
