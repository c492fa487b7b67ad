"""What a draw is, word for word as `prism_core.kernels.drawing` and `weights` say, by sorting the whole vocabulary."""

from __future__ import annotations

import math

import numpy as np

F32 = np.float32
UNIT = 2.0**40


def exponential(x: np.ndarray) -> np.ndarray:
    """e^x in float32, each operation rounded by itself."""
    x = np.maximum(x, F32(-30))
    turns = np.rint(x * F32(1.4426950408889634))
    r = (x - turns * F32(0.693145751953125)) - turns * F32(1.428606765330187e-06)
    c2, c3, c4, c5, c6, c7 = (F32(1 / math.factorial(n)) for n in range(2, 8))
    square = r * r
    low = (F32(1) + r) + square * (c2 + c3 * r)
    high = (c4 + c5 * r) + square * (c6 + c7 * r)
    return np.ldexp(low + (square * square) * high, turns.astype(np.int32))


def gaps(logits: np.ndarray, best: np.float32) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.maximum(logits - best, -np.finfo(F32).max)


def weights(logits: np.ndarray, best: np.float32, temperature: float) -> np.ndarray:
    """Whole units, int64."""
    inverse = 1 / max(temperature, 1e-300)
    first, second = F32(inverse) if 2.0**-100 <= inverse <= 2.0**100 else F32(0), F32(1)
    if not first:
        first = second = F32(math.sqrt(min(max(inverse, 1e-76), 1e76)))
    with np.errstate(over="ignore", under="ignore"):
        scaled = gaps(logits, best) * first * second
    return np.rint(exponential(scaled).astype(np.float64) * UNIT).astype(np.int64)


def draw(
    logits: np.ndarray, uniform: float, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, temperature=1.0
) -> int:
    order = np.lexsort((np.arange(logits.size), -logits))[: top_k or None]
    best = logits[order[0]]
    if top_p < 1:
        sums = np.cumsum(weights(logits[order], best, 1.0))
        whole = int(sums[-1])
        order = order[: int(np.searchsorted(sums, min(math.ceil(float(whole) * top_p), whole))) + 1]
    if min_p > 0:
        order = order[gaps(logits[order], best).astype(np.float64) >= math.log(min_p)]
    sums = np.cumsum(weights(logits[order], best, temperature))
    whole = int(sums[-1])
    return int(order[np.searchsorted(sums, min(int(float(whole) * uniform), whole - 1) + 1)])
