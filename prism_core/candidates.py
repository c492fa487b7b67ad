"""Checking a whole vocabulary's logits, and selecting the highest without sorting it.

The order is exact: by logit, highest first (+0 equals -0), then by id. Two buffers of the vocabulary's size are
allocated once; a `Selector` must not be used by two threads at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from prism_core.errors import SamplerError
from prism_core.limits import MAX_VOCAB

FloatArray = npt.NDArray[np.float32]
IdArray = npt.NDArray[np.int64]

FLOAT32 = np.dtype(np.float32)
FewHighest = Callable[[int, int, int, int, int], int]
"""(address of float32 logits, how many, count, address for int64 ids, address for float32 logits) -> all finite?"""

FEW = 64
"""The most that are selected at once as lists."""
GROUPS = 4096
FEW_GROUPS = 1024
LOWEST_DIVISOR = 1e-30  # below it, and above its inverse, a quotient needs float64's range


def as_vector(logits: npt.ArrayLike) -> npt.NDArray[Any]:
    """`logits` as a 1-D array of 1..1,048,576 numbers, else `SamplerError`."""
    try:
        values = logits if type(logits) is np.ndarray else np.asarray(logits)
    except ValueError as error:
        raise SamplerError(f"logits must be a 1-D array of numbers: {error}") from error
    if values.ndim != 1 or values.dtype.kind not in "fiu":
        raise SamplerError(f"logits must be a 1-D array of numbers, not {values.ndim}-D of {values.dtype.name}")
    if not 1 <= values.size <= MAX_VOCAB:
        raise SamplerError(f"there are {values.size} logits, but must be from 1 to {MAX_VOCAB}")
    return values


def highest_finite(values: npt.NDArray[Any]) -> Any:
    """The highest value, in two passes; `SamplerError` unless all are finite."""
    best, least = np.maximum.reduce(values), np.minimum.reduce(values)  # both NaN if there is any
    if not (math.isfinite(best) and math.isfinite(least)):
        refuse(values)
    return best


def refuse(values: npt.NDArray[Any]) -> NoReturn:
    """The `SamplerError` for values that are not all finite."""
    at = int(np.isfinite(values).argmin())
    raise SamplerError(f"logit {at} of {values.size} is {values[at]}, but all must be finite")


class Few:
    """Selects up to `FEW` of the highest by a compiled function, if whoever has one has lent it: `lend`.

    An engine that compiles anyway lends its own; without it numpy selects the same ones, in more and longer steps.
    """

    _lent: FewHighest | None = None

    def __init__(self) -> None:
        self._ids: IdArray = np.empty(FEW, dtype=np.int64)
        self._logits: FloatArray = np.empty(FEW, dtype=np.float32)
        self._addresses = self._ids.ctypes.data, self._logits.ctypes.data

    @classmethod
    def lend(cls, function: FewHighest | None) -> None:
        """Has every `Few` of this process select by `function` from now on; None takes it back."""
        cls._lent = None if function is None else staticmethod(function)

    def select(self, logits: FloatArray, count: int) -> tuple[list[int], list[float]] | None:
        """Ids and logits of the `count` highest in order; None if this cannot be told so.

        `SamplerError` unless all are finite.
        """
        lent = self._lent
        if lent is None or count > min(FEW, logits.size) or logits.dtype is not FLOAT32 or logits.strides != (4,):
            return None
        if not lent(logits.ctypes.data, logits.size, count, *self._addresses):
            refuse(logits)
        return self._ids[:count].tolist(), self._logits[:count].tolist()


class Selector:
    """For float32[vocab_size] vectors of finite values (`first`: of any numbers)."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._mask: npt.NDArray[np.bool_] = np.empty(vocab_size, dtype=np.bool_)
        self._maxima: FloatArray = np.empty(GROUPS, dtype=np.float32)
        self._scratch: FloatArray = np.empty(vocab_size, dtype=np.float32)
        self._few = Few()
        self._dealt: tuple[FloatArray | None, int, FloatArray, FloatArray] = (None, 0, self._scratch, self._scratch)

    def first(self, logits: npt.NDArray[Any], best: Any) -> int:
        """The lowest id whose logit equals `best`. (On a read-only array numpy's argmax copies all of it.)"""
        return int(np.equal(logits, best, out=self._mask).argmax())

    def highest(self, logits: FloatArray, count: int) -> IdArray:
        """The ids of the `count` highest logits (1..vocab_size), in order."""
        if count >= self.vocab_size:
            return descending(logits, np.arange(self.vocab_size))
        ids = self._candidates(logits, count)
        return descending(logits[ids], ids)[:count]

    def few(self, logits: FloatArray, count: int) -> tuple[list[int], list[float]]:
        """`highest` with the logits, as lists, for a count up to `FEW`; `SamplerError` unless all are finite."""
        count = min(count, self.vocab_size)
        selected = self._few.select(logits, count)
        if selected is not None:
            return selected
        if not math.isfinite(np.minimum.reduce(logits)):  # NaN as well; the other infinity would be the best
            refuse(logits)
        if count == self.vocab_size:
            ids, values = list(range(count)), logits.tolist()
        else:
            found = self._candidates(logits, count)
            ids, values = found.tolist(), logits[found].tolist()
        order = sorted(range(len(ids)), key=values.__getitem__, reverse=True)[:count]  # keeps equals in order
        if not math.isfinite(values[order[0]]):
            refuse(logits)
        return [ids[at] for at in order], [values[at] for at in order]

    def _candidates(self, logits: FloatArray, count: int) -> IdArray:
        """Ascending ids that include the `count` highest, and at most four times as many."""
        least = self._reached(logits, count)
        ids: IdArray = np.greater_equal(logits, least, out=self._mask).nonzero()[0]
        if ids.size <= 4 * count:
            return ids
        values = logits[ids]
        if np.count_nonzero(values > least) >= count:  # the bound was low; else it is right, and there are ties
            least = np.partition(values, ids.size - count)[ids.size - count]
        above, level = ids[values > least], ids[values == least]
        return np.sort(np.concatenate((above, level[: count - above.size])))

    def _reached(self, logits: FloatArray, count: int) -> Any:
        """A value that at least `count` logits reach, and if possible few more.

        The vocabulary is dealt into groups: the count-th highest of their maxima is such a value. That is one cheap
        pass, against several for a partition of the whole, which remains for small vocabularies and large counts.
        """
        groups = FEW_GROUPS if count <= FEW_GROUPS // 16 else GROUPS
        if self.vocab_size < 2 * groups or count > groups // 4:
            np.copyto(self._scratch, logits)
            self._scratch.partition(logits.size - count)
            return self._scratch[logits.size - count]
        if self._dealt[0] is not logits or self._dealt[1] != groups:  # mostly it is the same buffer, token after token
            whole = logits.size - logits.size % groups
            self._dealt = logits, groups, logits[:whole].reshape(-1, groups), logits[whole:]
        _, _, table, rest = self._dealt
        maxima = self._maxima[:groups]
        np.maximum.reduce(table, axis=0, out=maxima)
        if rest.size:
            np.maximum(maxima[: rest.size], rest, out=maxima[: rest.size])
        maxima.partition(groups - count)
        return maxima[groups - count]

    def mass(self, logits: FloatArray, best: float, temperature: float) -> float:
        """The sum of exp((logit - best) / temperature) over the whole vocabulary, to float32's accuracy."""
        with np.errstate(over="ignore"):  # a logit far below the best becomes -inf: its weight is 0 as it should be
            np.subtract(logits, best, out=self._scratch)
            if not LOWEST_DIVISOR <= temperature <= 1 / LOWEST_DIVISOR:
                np.copyto(self._scratch, (logits.astype(np.float64) - best) / temperature, casting="same_kind")
            elif temperature != 1.0:
                np.divide(self._scratch, np.float32(temperature), out=self._scratch)
        np.exp(self._scratch, out=self._scratch)
        return float(np.add.reduce(self._scratch))  # pairwise: no worse than the exponentials


def descending(logits: FloatArray, ids: IdArray) -> IdArray:
    """`ids` by (logit descending, id ascending): sorted as integers that hold both, faster than by two keys."""
    bits = (np.float32(0.0) - logits).view(np.int32)  # 0 - x has one zero only
    ordered = bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))
    keys = (ordered.astype(np.int64) << 32) | ids
    keys.sort()
    return keys & 0xFFFFFFFF
