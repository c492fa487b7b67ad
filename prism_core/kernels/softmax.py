"""A softmax that grows key by key: running maximum, sums of weights, weighted sums of values.

A state is its maximum, the factor of the last step, and 16 partial sums of weights that are added up only at the end.
The maximum of nothing is `NOTHING`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from prism_core.kernels.attention_tiles import FACTOR
from prism_core.kernels.jit import device, inlined
from prism_core.kernels.memory import load_f32, store_f32
from prism_core.kernels.numeric import exp_f32, exp_f32x16
from prism_core.kernels.simd import (
    add,
    and_,
    constant,
    div,
    fma,
    i32x16,
    less,
    load_f32x8,
    load_f32x16,
    max_lanes,
    maximum,
    mul,
    select,
    splat_f32x8,
    splat_f32x16,
    splat_i32x16,
    store,
    sum_lanes,
)

_LANES_LOW, _LANES_HIGH = constant(i32x16, range(16)), constant(i32x16, range(16, 32))
NOTHING, _ZERO, _ONE = np.float32(-1e30), np.float32(0.0), np.float32(1.0)
_SUMS = 64
"""Where a state keeps its partial sums."""


@device
def clear(state: Any, sums: Any, row: Any) -> None:
    """A softmax over nothing."""
    zero = splat_f32x16(_ZERO)
    store_f32(state, NOTHING)
    store_f32(state + FACTOR, _ONE)
    store(state + _SUMS, zero)
    for i in range(0, 4 * row, 64):
        store(sums + i, zero)


@inlined
def weigh(scores: Any, state: Any, low: Any, high: Any) -> None:
    """Turn 32 scores into weights against the running maximum of `state`; keys outside [low, high) get weight 0."""
    a, b = load_f32x16(scores), load_f32x16(scores + 64)
    zero = splat_f32x16(_ZERO)
    bottom, top = splat_i32x16(low - 1), splat_i32x16(high)
    seen_a = and_(less(bottom, _LANES_LOW()), less(_LANES_LOW(), top))
    seen_b = and_(less(bottom, _LANES_HIGH()), less(_LANES_HIGH(), top))
    none = splat_f32x16(NOTHING)
    a, b = select(seen_a, a, none), select(seen_b, b, none)
    before = load_f32(state)
    highest = max(before, max_lanes(maximum(a, b)))
    shift = splat_f32x16(-highest)
    a = select(seen_a, exp_f32x16(add(a, shift)), zero)
    b = select(seen_b, exp_f32x16(add(b, shift)), zero)
    store(scores, a)
    store(scores + 64, b)
    factor = _ONE
    if highest != before:
        factor = exp_f32(before - highest)
        store_f32(state, highest)
    store_f32(state + FACTOR, factor)
    store(state + _SUMS, fma(load_f32x16(state + _SUMS), splat_f32x16(factor), add(a, b)))


@device
def join(state: Any, sums: Any, other: Any, other_sums: Any, row: Any) -> None:
    """Join the softmax of later keys to that of earlier ones."""
    later = load_f32(other)
    if later == NOTHING:
        return
    before = load_f32(state)
    highest = max(before, later)
    mine, theirs = splat_f32x16(exp_f32(before - highest)), splat_f32x16(exp_f32(later - highest))
    store_f32(state, highest)
    store(state + _SUMS, fma(load_f32x16(state + _SUMS), mine, mul(load_f32x16(other + _SUMS), theirs)))
    for i in range(0, 4 * row, 64):
        store(sums + i, fma(load_f32x16(sums + i), mine, mul(load_f32x16(other_sums + i), theirs)))


@inlined
def finish(state: Any, sums: Any, out: Any, dim: Any) -> None:
    """out = sums / total weight."""
    total = sum_lanes(load_f32x16(state + _SUMS))
    whole, totals = dim - dim % 8, splat_f32x8(total)
    for i in range(0, 4 * whole, 32):
        store(out + i, div(load_f32x8(sums + i), totals))
    for i in range(4 * whole, 4 * dim, 4):
        store_f32(out + i, load_f32(sums + i) / total)
