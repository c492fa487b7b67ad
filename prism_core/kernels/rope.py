"""Rotary positions: the angles of each token's position once per call, then the rotation of q and k in place."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from prism_core.kernels.jit import device, entry
from prism_core.kernels.memory import load_f32, store_f32
from prism_core.kernels.simd import add, load_f32x8, mul, store, sub
from prism_core.kernels.words import OPERATION, POSITION, argument, load_f64, real, word


@entry(OPERATION)
def rope_table(operation: Any, context: Any, begin: Any, end: Any, thread: Any) -> None:
    """(table, pitch, frequencies (float64), divisors or 0, pairs, magnitude): cosines, then sines, of every pair.

    Angles are float64, so that far positions turn exactly.
    """
    frequencies, divisors = argument(operation, 2), argument(operation, 3)
    pairs, magnitude = argument(operation, 4), real(operation, 5)
    for token in range(begin, end):
        table = argument(operation, 0) + 4 * token * argument(operation, 1)
        position = np.float64(word(context, POSITION) + token)
        for i in range(pairs):
            angle = position * load_f64(frequencies + 8 * i)
            if divisors != 0:
                angle /= np.float64(load_f32(divisors + 4 * i))
            store_f32(table + 4 * i, np.float32(math.cos(angle)) * magnitude)
            store_f32(table + 4 * (pairs + i), np.float32(math.sin(angle)) * magnitude)


@device
def _turn(first: Any, second: Any, table: Any, pairs: Any, i: Any) -> None:
    cosine, sine = load_f32(table + 4 * i), load_f32(table + 4 * (pairs + i))
    a, b = load_f32(first), load_f32(second)
    store_f32(first, a * cosine - b * sine)
    store_f32(second, a * sine + b * cosine)


@device
def _turn8(first: Any, second: Any, table: Any, pairs: Any, i: Any) -> None:
    """Eight pairs, whose members stand together."""
    cosine, sine = load_f32x8(table + 4 * i), load_f32x8(table + 4 * (pairs + i))
    a, b = load_f32x8(first), load_f32x8(second)
    store(first, sub(mul(a, cosine), mul(b, sine)))
    store(second, add(mul(a, sine), mul(b, cosine)))


def _rope(interleaved: bool, name: str) -> Any:
    near, far = (2, 1) if interleaved else (1, 0)

    def rope(operation: Any, context: Any, begin: Any, end: Any, thread: Any) -> None:
        """(x, pitch, table, table pitch, pairs, heads, head stride): turn the leading pairs of each head."""
        pairs, heads, stride = argument(operation, 4), argument(operation, 5), argument(operation, 6)
        distance = 4 * far if far else 4 * pairs
        eights = 0 if interleaved else pairs // 8 * 8
        for token in range(begin, end):
            table = argument(operation, 2) + 4 * token * argument(operation, 3)
            for head in range(heads):
                x = argument(operation, 0) + 4 * (token * argument(operation, 1) + head * stride)
                for i in range(0, eights, 8):
                    _turn8(x + 4 * i, x + 4 * i + distance, table, pairs, i)
                for i in range(eights, pairs):
                    first = x + 4 * near * i
                    _turn(first, first + distance, table, pairs, i)

    return entry(OPERATION, name=name)(rope)


rope_interleaved = _rope(True, "rope_interleaved")
"""Pairs (2i, 2i + 1)."""
rope_halves = _rope(False, "rope_halves")
"""Pairs (i, i + pairs)."""
