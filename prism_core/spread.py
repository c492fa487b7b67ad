"""Drawing from a whole large vocabulary in a few passes over it, without putting it in order.

The logits are dealt into buckets of equal width, highest first. A running sum over the buckets tells in which of them a
cut or a draw falls; only that one is looked into, dealt again while many are left in it, and put in order when few are.
The token is the one that the full order, by logit and then by id, gives, to the accuracy of float32's `exp`.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from prism_core.candidates import FloatArray, IdArray, descending

Sums = npt.NDArray[np.float64]

BUCKETS = 4096
FEW_ENOUGH = 4096
"""So many are put in order at once."""
_WIDEST = float(np.finfo(np.float32).max)


class Spread:
    """For float32[vocab_size] vectors of finite values. Buffers are allocated once; not for two threads at a time."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._alive: npt.NDArray[np.bool_] = np.empty(vocab_size, dtype=np.bool_)
        self._mask: npt.NDArray[np.bool_] = np.empty(vocab_size, dtype=np.bool_)
        self._scratch: FloatArray = np.empty(vocab_size, dtype=np.float32)
        self._weights: Sums = np.empty(vocab_size, dtype=np.float64)
        self._buckets: IdArray = np.empty(vocab_size, dtype=np.int64)

    def draw(
        self, logits: FloatArray, *, top_k: int, top_p: float, min_p: float, temperature: float, uniform: float
    ) -> int:
        """The token at the fraction `uniform` of the survivors' weights, counted from the best down."""
        best = np.maximum.reduce(logits)
        self._keep_highest(logits, top_k)
        _deal(logits, best, np.minimum.reduce(logits), self._scratch, self._buckets)
        if top_p < 1 or min_p > 0:
            odds = self._weigh(logits, best, 1.0)
            sums = self._sums()
            last, kept = self._find(logits, sums, top_p * sums[-1], "left") if top_p < 1 else (None, sums[-1])
            if min_p == 0 and temperature == 1.0 and last is not None:  # the draw's weights are these
                token, _ = self._find(logits, sums, uniform * kept, "right")
                return token if (-logits[token], token) < (-logits[last], last) else last
            if last is not None:
                self._keep_down_to(logits, last)
            if min_p > 0:
                np.logical_and(self._alive, np.greater_equal(odds, min_p, out=self._mask), out=self._alive)
        self._weigh(logits, best, temperature)
        sums = self._sums()
        return self._find(logits, sums, uniform * sums[-1], "right")[0]

    def _keep_highest(self, logits: FloatArray, count: int) -> None:
        """Only the `count` highest live; of equals the lowest ids."""
        if count >= self.vocab_size:
            self._alive.fill(True)
            return
        np.copyto(self._scratch, logits)
        self._scratch.partition(self.vocab_size - count)
        least = self._scratch[self.vocab_size - count]
        np.greater(logits, least, out=self._alive)
        missing = count - np.count_nonzero(self._alive)
        self._alive[np.equal(logits, least, out=self._mask).nonzero()[0][:missing]] = True

    def _keep_down_to(self, logits: FloatArray, last: int) -> None:
        """What comes after the id `last` in the order dies."""
        equals = np.equal(logits, logits[last], out=self._mask).nonzero()[0]
        np.greater(logits, logits[last], out=self._mask)
        self._mask[equals[equals <= last]] = True
        np.logical_and(self._alive, self._mask, out=self._alive)

    def _weigh(self, logits: FloatArray, best: np.float32, temperature: float) -> Sums:
        """exp((logit - best) / temperature) of the living, 0 of the others."""
        weights = self._weights
        with np.errstate(over="ignore", under="ignore"):  # far below the best is -inf: weight 0, as it should be
            if temperature == 1.0:
                np.subtract(logits, best, out=self._scratch)
            else:  # a quotient needs float64's range
                np.subtract(logits, best, out=weights, dtype=np.float64)
                np.copyto(self._scratch, np.divide(weights, temperature, out=weights), casting="same_kind")
            np.exp(self._scratch, out=self._scratch)
        np.copyto(weights, np.multiply(self._scratch, self._alive, out=self._scratch))
        return weights

    def _sums(self) -> Sums:
        """The running sum of the weights after each bucket."""
        sums: Sums = np.cumsum(np.bincount(self._buckets, weights=self._weights))
        return sums

    def _find(self, logits: FloatArray, sums: Sums, target: Any, side: Literal["left", "right"]) -> tuple[int, Any]:
        """The id with which the running sum of the weights reaches (left) or passes (right) a target; that sum."""
        at = _reaching(sums, target, side)
        ids: IdArray = np.equal(self._buckets, at, out=self._mask).nonzero()[0]
        before = float(sums[at - 1]) if at else 0.0
        while True:
            values, weights = logits[ids], self._weights[ids]
            high, low = np.maximum.reduce(values), np.minimum.reduce(values)
            if ids.size <= FEW_ENOUGH or high == low:  # equals are in order already
                break
            buckets = _deal(values, high, low, np.empty_like(values), np.empty_like(ids))
            sums = np.cumsum(np.bincount(buckets, weights=weights))
            sums += before
            at = _reaching(sums, target, side)
            inside = (buckets == at).nonzero()[0]
            if inside.size == ids.size:  # too close together for buckets
                break
            before = float(sums[at - 1]) if at else before
            ids = ids[inside]
        if high != low:
            ids = descending(values, ids)
            weights = self._weights[ids]
        sums = np.cumsum(weights)
        sums += before
        at = _reaching(sums, target, side)
        return int(ids[at]), sums[at]


def _deal(values: FloatArray, high: np.float32, low: np.float32, scratch: FloatArray, buckets: IdArray) -> IdArray:
    """Fills `buckets`: 0 has the highest. A higher value is never in a later bucket than a lower one."""
    width = float(high) - float(low)
    scale = min((BUCKETS - 1) / width, _WIDEST) if width > 0 else 0.0
    with np.errstate(over="ignore", under="ignore"):
        np.subtract(high, values, out=scratch)
        np.multiply(scratch, np.float32(scale), out=scratch)
    np.minimum(scratch, np.float32(BUCKETS - 1), out=scratch)
    np.copyto(buckets, scratch, casting="unsafe")
    return buckets


def _reaching(sums: Sums, target: Any, side: Literal["left", "right"]) -> int:
    """Where `sums` reach or pass `target`; if rounding puts that beyond the end, the last that adds anything."""
    return int(min(np.searchsorted(sums, target, side), np.searchsorted(sums, sums[-1])))
