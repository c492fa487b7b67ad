"""Small float32 functions on vectors that several operations share, each with one fixed order of roundings."""

from __future__ import annotations

from typing import Any

import numpy as np

from prism_core.kernels.jit import device
from prism_core.kernels.simd import (
    add,
    as_f32x8,
    as_f32x16,
    as_i32x8,
    as_i32x16,
    div,
    extract,
    fma,
    maximum,
    minimum,
    mul,
    round_i32,
    shl,
    splat_f32x8,
    splat_f32x16,
    sub,
    to_f32,
)

_LOWEST, _HIGHEST = np.float32(-87.0), np.float32(88.0)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(-0.693145751953125), np.float32(-1.428606765330187e-06)
_C2, _C3, _C4, _C5, _C6, _C7 = (np.float32(c) for c in (1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720, 1 / 5040))


def _exponential(splat: Any, as_float: Any, as_integer: Any) -> Any:
    @device
    def exponential(x: Any) -> Any:
        x = minimum(maximum(x, splat(_LOWEST)), splat(_HIGHEST))
        whole = round_i32(mul(x, splat(_LOG2_E)))
        turns = to_f32(whole)
        r = fma(turns, splat(_LN2_LOW), fma(turns, splat(_LN2_HIGH), x))
        p = fma(splat(_C7), r, splat(_C6))
        p = fma(p, r, splat(_C5))
        p = fma(p, r, splat(_C4))
        p = fma(p, r, splat(_C3))
        p = fma(p, r, splat(_C2))
        p = fma(p, r, splat(_ONE))
        p = fma(p, r, splat(_ONE))
        return as_float(add(as_integer(p), shl(whole, 23)))

    return exponential


exp_f32x8 = _exponential(splat_f32x8, as_f32x8, as_i32x8)
exp_f32x16 = _exponential(splat_f32x16, as_f32x16, as_i32x16)
"""e^x with x held to [-87, 88]; relative error below 2e-7."""


@device
def one_plus_exp_of_minus(x: Any) -> Any:
    """1 + e^-x: the divisor of a sigmoid."""
    return add(splat_f32x16(_ONE), exp_f32x16(sub(splat_f32x16(_ZERO), x)))


@device
def sigmoid_f32x16(x: Any) -> Any:
    """1 / (1 + e^-x)."""
    return div(splat_f32x16(_ONE), one_plus_exp_of_minus(x))


@device
def exp_f32(x: Any) -> Any:
    """The same e^x of one float32."""
    return extract(exp_f32x8(splat_f32x8(x)), 0)
