"""Which of the best candidates survive top-p and min-p, and which of these a draw falls on.

Candidates come in order, the best first, so that survivors are always the first so many. Everything is computed from
the gaps to the best logit, in float64. The same in two forms: lists for some dozens, where calls of numpy would cost
more than the arithmetic, and arrays for more.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate

import numpy as np
import numpy.typing as npt

Gaps = npt.NDArray[np.float64]


class Survivors:
    """`top_p`: the fewest candidates whose probabilities reach it. `min_p`: those at least so probable as a share of
    the best one. Both look at temperature 1; the draw's weights are those of `temperature`."""

    def __init__(self, top_p: float, min_p: float, temperature: float) -> None:
        self.top_p, self.min_p = top_p, min_p
        self.divisor = temperature or 1.0  # at 0 nothing is drawn
        self.cuts = top_p < 1 or min_p > 0

    def place_few(self, logits: list[float], uniform: float, mass: float | None = None) -> int:
        """What `kept` and `place` say, for so few logits that plain Python is faster than calls of numpy.

        With `mass` it may be beyond the end: the few do not tell.
        """
        best, kept = logits[0], len(logits)
        odds = [math.exp(logit - best) for logit in logits]
        summed = list(accumulate(odds))
        if self.cuts:
            if self.top_p < 1:
                kept = min(kept, bisect_left(summed, self.top_p * (mass or summed[-1])) + 1)
            while odds[kept - 1] < self.min_p:
                kept -= 1
            if mass is not None and kept == len(odds):
                return kept
            mass = None
        if self.divisor != 1.0:
            summed = list(accumulate(math.exp((logit - best) / self.divisor) for logit in logits[:kept]))
        if mass is None:
            return min(bisect_right(summed, uniform * summed[kept - 1], 0, kept), kept - 1)
        return bisect_right(summed, uniform * mass)

    def kept(self, gaps: Gaps, mass: float | None = None) -> int:
        """How many of the best pass top-p and min-p; `mass`: of all survivors of top-k, if these are not all."""
        kept = gaps.size
        odds = np.exp(gaps)
        if self.top_p < 1:
            summed = np.cumsum(odds)
            kept = min(kept, int(np.searchsorted(summed, self.top_p * (mass or summed[-1]))) + 1)
        return min(kept, int(np.count_nonzero(odds >= self.min_p)))

    def place(self, gaps: Gaps, uniform: float, mass: float | None = None) -> int:
        """Where the draw falls among the best; `mass`: of all survivors, if these are not all: it may fall beyond."""
        with np.errstate(over="ignore"):  # a gap beyond measure is -inf: a weight of 0, as it should be
            summed = np.cumsum(np.exp(gaps / self.divisor))
        if mass is None:
            return min(int(np.searchsorted(summed, uniform * summed[-1], side="right")), gaps.size - 1)
        return int(np.searchsorted(summed, uniform * mass, side="right"))
