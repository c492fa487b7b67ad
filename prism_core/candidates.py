"""Accepting a vocabulary's logits: their form, that all are finite, and which is the highest.

The order of tokens is everywhere the same: by logit, highest first (+0 equals -0), then by id.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import numpy as np
import numpy.typing as npt

from prism_core.errors import SamplerError
from prism_core.limits import MAX_VOCAB

FloatArray = npt.NDArray[np.float32]

FLOAT32 = np.dtype(np.float32)
MAX_FLOAT32 = float(np.finfo(np.float32).max)
_NO_LOGITS = object()


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


class Vector:
    """float32 logits in one piece, and where they are. A buffer that was the last one too is accepted at once."""

    def __init__(self) -> None:
        self._last: object = _NO_LOGITS
        self._shape: tuple[int, ...] = ()
        self.address = 0
        self.size = 0

    def fits(self, logits: npt.ArrayLike) -> bool:
        """Whether `logits` is an array of such values; `address` and `size` are then valid while it lives.

        They may still be infinite or NaN. `SamplerError` for what is no vector of 1..1,048,576 numbers.
        """
        if logits is self._last and logits.shape == self._shape:  # type: ignore[union-attr]
            return True
        self._last = _NO_LOGITS
        values = as_vector(logits)
        if values is not logits or values.dtype != FLOAT32 or values.strides != (4,):
            return False
        self.address, self.size, self._shape = values.ctypes.data, values.size, values.shape
        self._last = values
        return True

    def accept(self, logits: npt.ArrayLike) -> FloatArray:
        """`logits` if it fits, else a copy that does, where values beyond float32's range are the last in it."""
        if self.fits(logits):
            return logits  # type: ignore[return-value]
        values = as_vector(logits)
        if not np.can_cast(values.dtype, FLOAT32):
            highest_finite(values)
            values = np.clip(values, -MAX_FLOAT32, MAX_FLOAT32)
        copied = np.array(values, dtype=FLOAT32)
        self.fits(copied)
        return copied


class Compiled:
    """A compiled function that an engine, which compiles anyway, lends to whoever looks for the highest logit.

    Without it numpy finds the same one, in more and longer steps.
    """

    highest: ClassVar[Callable[[int, int], int] | None] = None
    """(address of float32 logits, how many) -> the lowest id of the highest, or -1 if not all are finite."""

    @classmethod
    def lend(cls, highest: Callable[[int, int], int] | None) -> None:
        """Has this process use it from now on; None takes it back."""
        cls.highest = None if highest is None else staticmethod(highest)
