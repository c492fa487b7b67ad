"""The normalised Walsh-Hadamard transform of rotated files: H(s * P(x)) of activations, s * H(z) of embedding rows.

H works on contiguous blocks of a power of two, natural (Sylvester) order, and is its own inverse. The scale
1/sqrt(block) is applied once at the end.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from prism_core.kernels.jit import device, entry
from prism_core.kernels.memory import load_f32, store_f32
from prism_core.kernels.simd import add, load_f32x8, store, sub
from prism_core.kernels.words import OPERATION, argument


@device
def transform(x: Any, block: Any) -> None:
    """H of one block in place, without the scale: sums and differences at distances 1, 2, 4, ..., block / 2."""
    half = 1
    while half < block:
        for start in range(0, block, 2 * half):
            low, high = x + 4 * start, x + 4 * (start + half)
            whole = half - half % 8
            for i in range(0, 4 * whole, 32):
                a, b = load_f32x8(low + i), load_f32x8(high + i)
                store(low + i, add(a, b))
                store(high + i, sub(a, b))
            for i in range(whole, half):
                a, b = load_f32(low + 4 * i), load_f32(high + 4 * i)
                store_f32(low + 4 * i, a + b)
                store_f32(high + 4 * i, a - b)
        half *= 2


@entry(OPERATION)
def rotate(operation: Any, context: Any, begin: Any, end: Any, thread: Any) -> None:
    """(x, pitch, out, pitch, width, block, signs (float32), groups, repeats, head width): out = H(signs * P(x)).

    P puts source head r * groups + k at k * repeats + r; it is the identity where groups is 0.
    """
    width, block, signs = argument(operation, 4), argument(operation, 5), argument(operation, 6)
    groups, repeats, head = argument(operation, 7), argument(operation, 8), argument(operation, 9)
    scale = np.float32(1.0 / math.sqrt(np.float64(block)))
    for token in range(begin, end):
        x = argument(operation, 0) + 4 * token * argument(operation, 1)
        out = argument(operation, 2) + 4 * token * argument(operation, 3)
        for i in range(width):
            source = i
            if groups > 0:
                place, inside = i // head, i % head
                source = (place % repeats * groups + place // repeats) * head + inside
            store_f32(out + 4 * i, load_f32(x + 4 * source) * load_f32(signs + 4 * i) * scale)
        for start in range(0, width, block):
            transform(out + 4 * start, block)


@entry(OPERATION)
def unrotate(operation: Any, context: Any, begin: Any, end: Any, thread: Any) -> None:
    """(x, pitch, width, block, signs (float32)): x = signs * H(x)."""
    width, block, signs = argument(operation, 2), argument(operation, 3), argument(operation, 4)
    scale = np.float32(1.0 / math.sqrt(np.float64(block)))
    for token in range(begin, end):
        x = argument(operation, 0) + 4 * token * argument(operation, 1)
        for start in range(0, width, block):
            transform(x + 4 * start, block)
        for i in range(width):
            store_f32(x + 4 * i, load_f32(x + 4 * i) * scale * load_f32(signs + 4 * i))
