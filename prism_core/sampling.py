"""The sampler protocol, greedy sampling, and giving a sampler its state back.

Invariant: a sampler's state is what its `copy()` holds and what is given back by `give_back`, exactly, so that a failed
request leaves no trace in it. Not promised: state that a copy does not hold.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import MemberDescriptorType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from prism_core.candidates import Vector, as_vector, highest_finite, refuse
from prism_core.temperature import TemperatureSampler

__all__ = ["Greedy", "Sampler", "TemperatureSampler", "give_back", "greedy"]


@runtime_checkable
class Sampler(Protocol):
    """Draws tokens. May also have `restore(copy)`: see `give_back`."""

    def sample(self, logits: npt.NDArray[np.float32]) -> int:
        """The next token. `logits` is read-only, one finite float32 for each token of the vocabulary."""

    def copy(self) -> Any:
        """An independent sampler in the same state, or whatever `restore` takes."""


def give_back(sampler: Any, saved: Any) -> None:
    """Puts the state of the copy `saved` back into the caller's own `sampler`.

    By `sampler.restore(saved)` if there is one. Else every value of its `__dict__` and `__slots__` is replaced by the
    copy's; state that lives elsewhere, such as in a C base class, needs a `restore`.
    """
    restore = getattr(sampler, "restore", None)
    if restore is not None:
        restore(saved)
        return
    for kind in type(sampler).__mro__:
        if "__slots__" in kind.__dict__:
            for slot in kind.__dict__.values():
                if isinstance(slot, MemberDescriptorType):
                    _copy_slot(slot, saved, sampler)
    if hasattr(sampler, "__dict__"):
        object.__setattr__(sampler, "__dict__", dict(saved.__dict__))


def _copy_slot(slot: MemberDescriptorType, source: object, target: object) -> None:
    try:
        value = slot.__get__(source)
    except AttributeError:  # empty there, so it is to be empty here
        with suppress(AttributeError):
            slot.__delete__(target)
    else:
        slot.__set__(target, value)


def greedy(logits: npt.ArrayLike) -> int:
    """The token of the highest logit, the lowest id among equals (+0 equals -0); `SamplerError` for bad logits."""
    values = as_vector(logits)
    return int((values == highest_finite(values)).argmax())


class Greedy:
    """`greedy` as a sampler. It has no state; over float32 logits it is one call of a kernel."""

    def __init__(self) -> None:
        from prism_core.kernels.selection import highest  # not sooner: a client of the pool needs no compiler

        self._vector = Vector()
        self._highest: Callable[[int, int], int] = highest

    def sample(self, logits: npt.ArrayLike) -> int:
        """See `greedy`."""
        if not self._vector.fits(logits):
            return greedy(logits)
        token = self._highest(self._vector.address, self._vector.size)
        return token if token >= 0 else refuse(np.asarray(logits))

    def copy(self) -> Greedy:
        return Greedy()

    def restore(self, saved: Greedy) -> None:
        """Nothing to restore."""
