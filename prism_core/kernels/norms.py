"""RMS norm and unit length, of whole rows or of each head.

Squares are float32 and are summed in float64, in eight running sums whose order does not depend on anything but the
width; the mean goes back to float32.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from prism_core.kernels.faults import report
from prism_core.kernels.jit import device, entry
from prism_core.kernels.memory import load_f32, store_f32
from prism_core.kernels.simd import add, constant, load_f32x8, mul, splat_f32x8, store, sum_lanes, to_f64
from prism_core.kernels.vectors import vector
from prism_core.kernels.words import OPERATION, argument, real

_INFINITY = np.float32(np.inf)
_zeros = constant(vector("f64", 8), [0.0] * 8)


@device
def sum_of_squares(x: Any, width: Any) -> Any:
    """float64 sum of the squares of `width` float32 values at x."""
    sums = _zeros()
    whole = width - width % 8
    for i in range(0, 4 * whole, 32):
        values = load_f32x8(x + i)
        sums = add(sums, to_f64(mul(values, values)))
    total = sum_lanes(sums)
    for i in range(whole, width):
        value = load_f32(x + 4 * i)
        total += np.float64(value * value)
    return total


@device
def _scaled(x: Any, out: Any, weight: Any, width: Any, factor: Any) -> None:
    whole = width - width % 8
    factors = splat_f32x8(factor)
    for i in range(0, 4 * whole, 32):
        store(out + i, mul(mul(load_f32x8(x + i), factors), load_f32x8(weight + i)))
    for i in range(whole, width):
        store_f32(out + 4 * i, load_f32(x + 4 * i) * factor * load_f32(weight + 4 * i))


@entry(OPERATION)
def rms_norm(operation: Any, context: Any, begin: Any, end: Any, thread: Any) -> None:
    """(x, pitch, out, out pitch, weight, width, heads, head stride, eps): out = x / sqrt(mean(x^2) + eps) * weight."""
    width, heads, stride = argument(operation, 5), argument(operation, 6), argument(operation, 7)
    weight, eps = argument(operation, 4), real(operation, 8)
    for token in range(begin, end):
        for head in range(heads):
            x = argument(operation, 0) + 4 * (token * argument(operation, 1) + head * stride)
            out = argument(operation, 2) + 4 * (token * argument(operation, 3) + head * stride)
            mean = np.float32(sum_of_squares(x, width) / width)
            if not mean < _INFINITY:
                report(context, operation)
            _scaled(x, out, weight, width, np.float32(1.0) / math.sqrt(mean + eps))


@entry(OPERATION)
def unit_length(operation: Any, context: Any, begin: Any, end: Any, thread: Any) -> None:
    """(x, pitch, width, heads, eps): each head of x divided by sqrt(sum(x^2) + eps)."""
    width, heads, eps = argument(operation, 2), argument(operation, 3), real(operation, 4)
    for token in range(begin, end):
        for head in range(heads):
            x = argument(operation, 0) + 4 * (token * argument(operation, 1) + head * width)
            factor = np.float32(1.0) / math.sqrt(np.float32(sum_of_squares(x, width)) + eps)
            for i in range(width):
                store_f32(x + 4 * i, load_f32(x + 4 * i) * factor)
