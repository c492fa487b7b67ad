"""Numbers too large to go on with: how an operation notices them, and tells.

Weights are below 2^32 (gguf/scales.py) and rows no longer than 2^20, so what is below `LARGEST` goes through any matrix
product or attention without overflow (a score stays below 2^98), and so does what an RMS norm leaves. What may exceed
it is watched: queries, keys, values and products of two activations here, the residual stream by every norm, which
needs its mean square. The first operation that meets more, an infinity or a NaN leaves its address in the context's
`FAULT`; what the step computes from there on means nothing, and the decoder raises an error.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from prism_core.kernels.jit import device, entry
from prism_core.kernels.memory import load_u32, store_i64
from prism_core.kernels.simd import and_, as_i32x16, load_f32x16, max_lanes, maximum, splat_i32x16
from prism_core.kernels.words import FAULT, OPERATION, argument, word

LARGEST = 2.0**44
_LARGEST_BITS = int(np.float32(LARGEST).view(np.uint32))
_MAGNITUDE = 0x7FFFFFFF


@device
def report(context: Any, operation: Any) -> None:
    """Remember the operation, unless an earlier one is."""
    if word(context, FAULT) == 0:
        store_i64(context + 8 * FAULT, operation)


@device
def check(context: Any, operation: Any, x: Any, width: Any) -> None:
    """Report the operation if one of `width` float32 values at x is not below LARGEST, or no number."""
    whole = width - width % 16
    bits = splat_i32x16(0)
    for at in range(0, 4 * whole, 64):
        bits = maximum(bits, and_(as_i32x16(load_f32x16(x + at)), splat_i32x16(_MAGNITUDE)))
    most = max_lanes(bits)
    for i in range(whole, width):
        most = max(most, load_u32(x + 4 * i) & _MAGNITUDE)
    if most >= _LARGEST_BITS:
        report(context, operation)


@entry(OPERATION)
def watch(operation: Any, context: Any, begin: Any, end: Any, thread: Any) -> None:
    """(x, pitch, width): report a token whose x is too large."""
    for token in range(begin, end):
        check(context, operation, argument(operation, 0) + 4 * token * argument(operation, 1), argument(operation, 2))
