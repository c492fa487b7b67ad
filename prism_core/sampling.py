"""Samplers: how the next token is drawn from logits.

Invariant: a sampler's state is what its `copy()` holds and its `restore()` takes back, exactly, so that a failed
request leaves no trace in it; and draw n of a seed depends on the seed, n, the parameters and the draws before it,
never on how requests were cut. Not promised: the same tokens from a build of numpy whose `exp` rounds differently.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from types import MemberDescriptorType
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from prism_core.candidates import FloatArray, IdArray, Selector
from prism_core.errors import InvalidRequest, SamplerError
from prism_core.limits import MAX_VOCAB
from prism_core.penalties import Penalties
from prism_core.validation import in_vocabulary, integer, integers, number

WIDENING = (1024, 16_384)  # candidates looked at without a top-k, before the whole vocabulary is put in order
UNIFORMS_PER_BLOCK = 64  # a multiple of the 4 words that one step of Philox's counter gives
MIN_TEMPERATURE = 1e-30  # below it a quotient could overflow, and nothing but equals of the best has any weight
MAX_FLOAT32 = float(np.finfo(np.float32).max)


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


def finite_vector(logits: npt.ArrayLike) -> tuple[npt.NDArray[Any], Any]:
    """`logits` as a 1-D array of 1..1,048,576 finite numbers, and the highest, else `SamplerError`; in two passes."""
    values = np.asarray(logits)
    if values.ndim != 1 or values.dtype.kind not in "fiu":
        raise SamplerError(f"logits must be a 1-D array of numbers, not {values.ndim}-D of {values.dtype.name}")
    if not 1 <= values.size <= MAX_VOCAB:
        raise SamplerError(f"there are {values.size} logits, but must be from 1 to {MAX_VOCAB}")
    best = values.max()  # NaN if there is any
    if not (np.isfinite(best) and np.isfinite(values.min())):
        at = int(np.isfinite(values).argmin())
        raise SamplerError(f"logit {at} of {values.size} is {values[at]}, but all must be finite")
    return values, best


def greedy(logits: npt.ArrayLike) -> int:
    """The token of the highest logit, the lowest id among equals (+0 equals -0); `SamplerError` for bad logits."""
    values, best = finite_vector(logits)
    return int((values == best).argmax())


class Greedy:
    """`greedy` as a sampler. It has no state, but a buffer, so that a token allocates nothing."""

    def __init__(self) -> None:
        self._selector = Selector(0)

    def sample(self, logits: npt.ArrayLike) -> int:
        """See `greedy`."""
        values, best = finite_vector(logits)
        if self._selector.vocab_size != values.size:
            self._selector = Selector(values.size)
        return self._selector.first(values, best)

    def copy(self) -> Greedy:
        return Greedy()

    def restore(self, saved: Greedy) -> None:
        """Nothing to restore."""


class TemperatureSampler:
    """Penalties, then top-k, top-p, min-p, temperature, and one uniform draw; logits are read as float32.

    `top_k`: how many of the highest logits take part, 0 for all. `top_p`: of those, the fewest whose probabilities,
    renormalised, reach it. `min_p`: of those, the ones at least this fraction as probable as the best. Both look at
    temperature 1. `temperature` 0 takes the best. Equal logits are ordered by id.

    The penalties apply to tokens that this sampler has drawn: `repetition_penalty` divides a positive logit and
    multiplies a negative one, `presence_penalty` is subtracted once, `frequency_penalty` once for each draw.

    Draw n uses the n-th number of `numpy.random.Generator(Philox(key=seed modulo 2**64)).random()`.
    `InvalidRequest` for a parameter out of range.
    """

    def __init__(
        self,
        *,
        seed: int,
        temperature: float = 1.0,
        top_k: int = 20,
        top_p: float = 0.95,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
    ) -> None:
        self._seed = integer("seed", seed, -(2**63), 2**64 - 1) % 2**64
        self._temperature = real("temperature", temperature, "at least 0", lambda x: x >= 0)
        self._top_k = integer("top_k", top_k, 0)
        self._top_p = real("top_p", top_p, "above 0 and at most 1", lambda x: 0 < x <= 1)
        self._min_p = real("min_p", min_p, "from 0 to 1", lambda x: 0 <= x <= 1)
        self._penalties = Penalties(
            real("repetition_penalty", repetition_penalty, "above 0", lambda x: x > 0),
            real("presence_penalty", presence_penalty, "from -2 to 2", lambda x: -2 <= x <= 2),
            real("frequency_penalty", frequency_penalty, "from -2 to 2", lambda x: -2 <= x <= 2),
        )
        self._divisor = max(self._temperature, MIN_TEMPERATURE)
        self._draws = 0
        self._uniforms: tuple[int, list[float]] = (-1, [])
        self._selector = Selector(0)
        self._penalised: FloatArray = np.empty(0, dtype=np.float32)

    @property
    def draws(self) -> int:
        """How many tokens have been drawn."""
        return self._draws

    def resume(self, ids: Sequence[int]) -> Self:
        """Goes to the state after having drawn exactly `ids`, to take over from another sampler; returns itself."""
        tokens = integers("ids", ids, sys.maxsize)
        in_vocabulary("ids", tokens, MAX_VOCAB)
        self._penalties = self._penalties.empty()
        self._penalties.record(tokens)
        self._draws = len(tokens)
        return self

    def copy(self) -> Self:
        """An independent sampler that will draw the same tokens."""
        twin = copy(self)
        twin._penalties = self._penalties.copy()
        twin._selector = Selector(0)  # buffers are not shared
        return twin

    def restore(self, saved: TemperatureSampler) -> None:
        """Goes to the state of a copy, which stays independent."""
        self._penalties = saved._penalties.copy()
        self._draws = saved._draws

    def sample(self, logits: npt.ArrayLike) -> int:
        """Draws a token; `SamplerError` unless there are 1..1,048,576 logits, all finite. They are not changed."""
        values, best = finite_vector(logits)
        if values.dtype != np.float32:
            values = np.clip(values, -MAX_FLOAT32, MAX_FLOAT32).astype(np.float32)
            best = values.max()
        if self._selector.vocab_size != values.size:
            self._selector = Selector(values.size)
            self._penalised = np.empty(values.size if self._penalties.active else 0, dtype=np.float32)
        with np.errstate(over="ignore", under="ignore"):  # a hopeless logit becomes -inf, and its weight 0
            if self._penalties.active:
                np.copyto(self._penalised, values)
                values = self._penalised
                self._penalties.apply(values)
                best = values.max()
            if self._temperature == 0:
                token = self._selector.first(values, best)
            else:
                token = self._draw(values, best, self._uniform())
        self._penalties.record((token,))
        self._draws += 1
        return token

    def _uniform(self) -> float:
        """The number in [0, 1) of the present draw. A function of seed and draw alone; a block of them is kept."""
        block, at = divmod(self._draws, UNIFORMS_PER_BLOCK)
        if self._uniforms[0] != block:
            words = np.random.Philox(key=self._seed, counter=block * UNIFORMS_PER_BLOCK // 4)
            numbers = (words.random_raw(UNIFORMS_PER_BLOCK) >> np.uint64(11)) * 2.0**-53
            self._uniforms = block, numbers.tolist()
        return self._uniforms[1][at]

    def _draw(self, values: FloatArray, best: np.float32, uniform: float) -> int:
        """The token at the fraction `uniform` of the survivors' weights, counted from the best down."""
        top_k = self._top_k if 0 < self._top_k < values.size else values.size
        if top_k == values.size:
            token = self._draw_from_few(values, best, uniform)
            if token is not None:
                return token
        ids = self._selector.highest(values, top_k)
        gaps = _gaps(values, ids, best)
        return int(ids[self._place(gaps[: self._kept(gaps)], uniform)])

    def _draw_from_few(self, values: FloatArray, best: np.float32, uniform: float) -> int | None:
        """Without top-k: the same token, if a limited number of the best hold the cut, or the draw; else None."""
        cuts = self._top_p < 1 or self._min_p > 0
        mass = self._selector.mass(values, best, 1.0 if cuts else self._divisor)
        for count in WIDENING:
            if count < values.size:
                ids = self._selector.highest(values, count)
                gaps = _gaps(values, ids, best)
                if not cuts:
                    place = self._place(gaps, uniform, mass)
                else:
                    kept = self._kept(gaps, mass)
                    place = self._place(gaps[:kept], uniform) if kept < count else count
                if place < count:
                    return int(ids[place])
        return None

    def _kept(self, gaps: npt.NDArray[np.float64], mass: float | None = None) -> int:
        """How many of the best pass top-p and min-p; `mass`: of all survivors of top-k, if these are not all."""
        kept = gaps.size
        odds = np.exp(gaps)
        if self._top_p < 1:
            summed = np.cumsum(odds)
            kept = min(kept, int(np.searchsorted(summed, self._top_p * (mass or summed[-1]))) + 1)
        return min(kept, int(np.count_nonzero(odds >= self._min_p)))

    def _place(self, gaps: npt.NDArray[np.float64], uniform: float, mass: float | None = None) -> int:
        """Where the draw falls among the best; `mass`: of all survivors, if these are not all: it may fall beyond."""
        summed = np.cumsum(np.exp(gaps / self._divisor))
        if mass is None:
            return min(int(np.searchsorted(summed, uniform * summed[-1], side="right")), gaps.size - 1)
        return int(np.searchsorted(summed, uniform * mass, side="right"))


def _gaps(values: FloatArray, ids: IdArray, best: np.float32) -> npt.NDArray[np.float64]:
    """How far each logit is below the best, at most 0."""
    return values[ids].astype(np.float64) - float(best)


def real(name: str, value: object, limit: str, holds: Callable[[float], bool]) -> float:
    """`value` as a finite float for which `holds`, else `InvalidRequest` that tells the `limit`."""
    given = number(name, value)
    if not (math.isfinite(given) and holds(given)):
        raise InvalidRequest(f"{name} is {given}, but must be {limit}")
    return given
