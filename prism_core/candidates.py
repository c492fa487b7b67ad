"""Selecting the highest of a whole vocabulary's logits without sorting it.

The order is exact: by logit, highest first (+0 equals -0), then by id. Two buffers of the vocabulary's size are
allocated once; a `Selector` must not be used by two threads at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
IdArray = npt.NDArray[np.int64]

GROUPS = 4096


class Selector:
    """For float32[vocab_size] vectors of finite values (`first`: of any numbers)."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._mask: npt.NDArray[np.bool_] = np.empty(vocab_size, dtype=np.bool_)
        self._maxima: FloatArray = np.empty(GROUPS, dtype=np.float32)
        self._scratch: FloatArray = np.empty(vocab_size, dtype=np.float32)

    def first(self, logits: npt.NDArray[Any], best: Any) -> int:
        """The lowest id whose logit equals `best`. (On a read-only array numpy's argmax copies all of it.)"""
        return int(np.equal(logits, best, out=self._mask).argmax())

    def highest(self, logits: FloatArray, count: int) -> IdArray:
        """The ids of the `count` highest logits (1..vocab_size), in order."""
        if count >= self.vocab_size:
            return _descending(logits, np.arange(self.vocab_size))
        least = self._reached(logits, count)
        ids = np.flatnonzero(np.greater_equal(logits, least, out=self._mask))
        if ids.size > 4 * count:
            values = logits[ids]
            if np.count_nonzero(values > least) >= count:  # the bound was low; else it is right, and there are ties
                least = np.partition(values, ids.size - count)[ids.size - count]
            above, level = ids[values > least], ids[values == least]
            ids = np.concatenate((above, level[: count - above.size]))
        return _descending(logits[ids], ids)[:count]

    def _reached(self, logits: FloatArray, count: int) -> Any:
        """A value that at least `count` logits reach, and if possible few more.

        The vocabulary is dealt into groups: the count-th highest of their maxima is such a value. That is one cheap
        pass, against several for a partition of the whole, which remains for small vocabularies and large counts.
        """
        whole = logits.size - logits.size % GROUPS
        if whole < 2 * GROUPS or count > GROUPS // 4:
            np.copyto(self._scratch, logits)
            self._scratch.partition(logits.size - count)
            return self._scratch[logits.size - count]
        maxima, rest = self._maxima, logits[whole:]
        np.max(logits[:whole].reshape(-1, GROUPS), axis=0, out=maxima)
        np.maximum(maxima[: rest.size], rest, out=maxima[: rest.size])
        maxima.partition(GROUPS - count)
        return maxima[GROUPS - count]

    def mass(self, logits: FloatArray, best: np.float32, temperature: float) -> float:
        """The sum of exp((logit - best) / temperature) over the whole vocabulary, to float32's accuracy."""
        np.subtract(logits, best, out=self._scratch)
        np.divide(self._scratch, np.float32(temperature), out=self._scratch)
        np.exp(self._scratch, out=self._scratch)
        return float(self._scratch.sum(dtype=np.float64))


def _descending(logits: FloatArray, ids: IdArray) -> IdArray:
    """`ids` by (logit descending, id ascending): sorted as integers that hold both, faster than by two keys."""
    bits = (np.float32(0.0) - logits).view(np.int32)  # 0 - x has one zero only
    ordered = bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))
    keys = (ordered.astype(np.int64) << 32) | ids
    keys.sort()
    return keys & 0xFFFFFFFF
