"""The temperature sampler: penalties, top-k, top-p, min-p, temperature, one uniform draw.

Invariant: draw n of a seed depends on the seed, n, the parameters, the logits and the draws before it, never on how
requests were cut, so that a copy or a resumed sampler continues to the token. Not promised: the same tokens from a
build of numpy whose `exp` rounds differently.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from copy import copy
from typing import Self

import numpy as np
import numpy.typing as npt

from prism_core.candidates import FEW, FLOAT32, FloatArray, IdArray, Selector, as_vector, highest_finite
from prism_core.errors import InvalidRequest
from prism_core.limits import MAX_VOCAB
from prism_core.penalties import Penalties
from prism_core.spread import Spread
from prism_core.survivors import Gaps, Survivors
from prism_core.validation import in_vocabulary, integer, integers, number

MORE = 1024  # candidates that are looked at without a top-k, if the few do not tell
MOST = 16_384  # candidates that are put in order; a draw from more of them is left to `Spread`
UNIFORMS_PER_BLOCK = 64  # a multiple of the 4 words that one step of Philox's counter gives
MAX_FLOAT32 = float(np.finfo(np.float32).max)


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
        top_p = real("top_p", top_p, "above 0 and at most 1", lambda x: 0 < x <= 1)
        min_p = real("min_p", min_p, "from 0 to 1", lambda x: 0 <= x <= 1)
        self._penalties = Penalties(
            real("repetition_penalty", repetition_penalty, "above 0", lambda x: x > 0),
            real("presence_penalty", presence_penalty, "from -2 to 2", lambda x: -2 <= x <= 2),
            real("frequency_penalty", frequency_penalty, "from -2 to 2", lambda x: -2 <= x <= 2),
        )
        self._survivors = Survivors(top_p, min_p, self._temperature)
        self._simple = 0 < self._top_k <= FEW and self._temperature > 0 and not self._penalties.active
        self._draws = 0
        self._uniforms: tuple[int, list[float]] = (-1, [])
        self._forget_buffers()

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
        twin._forget_buffers()
        return twin

    def _forget_buffers(self) -> None:
        """Buffers are made for the logits at hand, and not shared with copies."""
        self._selector = Selector(0)
        self._spread = Spread(0)
        self._penalised: FloatArray = np.empty(0, dtype=np.float32)

    def restore(self, saved: TemperatureSampler) -> None:
        """Goes to the state of a copy, which stays independent."""
        self._penalties = saved._penalties.copy()
        self._draws = saved._draws

    def sample(self, logits: npt.ArrayLike) -> int:
        """Draws a token; `SamplerError` unless there are 1..1,048,576 logits, all finite. They are not changed."""
        values = self._accept(logits)
        token = self._draw_simply(values) if self._simple else self._draw(values)
        if self._penalties.active:
            self._penalties.record((token,))
        self._draws += 1
        return token

    def _accept(self, logits: npt.ArrayLike) -> FloatArray:
        """`logits` as float32, with buffers of their size; the usual ones, of the same form as before, at once."""
        size = self._selector.vocab_size
        if size and type(logits) is np.ndarray and logits.dtype is FLOAT32 and logits.shape == (size,):
            return logits
        values = as_vector(logits)
        if values.dtype != FLOAT32:
            highest_finite(values)
            values = np.clip(values, -MAX_FLOAT32, MAX_FLOAT32).astype(np.float32)
        if size != values.size:
            self._selector = Selector(values.size)
        return values

    def _uniform(self) -> float:
        """The number in [0, 1) of the present draw. A function of seed and draw alone; a block of them is kept."""
        block, at = divmod(self._draws, UNIFORMS_PER_BLOCK)
        if self._uniforms[0] != block:
            words = np.random.Philox(key=self._seed, counter=block * UNIFORMS_PER_BLOCK // 4)
            numbers = (words.random_raw(UNIFORMS_PER_BLOCK) >> np.uint64(11)) * 2.0**-53
            self._uniforms = block, numbers.tolist()
        return self._uniforms[1][at]

    def _draw_simply(self, values: FloatArray) -> int:
        """`_draw` for a small top-k without penalties, with as few calls as can be: it runs once a token."""
        ids, logits = self._selector.few(values, self._top_k)
        return ids[self._survivors.place_few(logits, self._uniform())]

    def _draw(self, values: FloatArray) -> int:
        """The token at that fraction of the survivors' weights, from the best down, that this draw's number is."""
        if self._penalties.active:
            highest_finite(values)
            if self._penalised.size != values.size:
                self._penalised = np.empty(values.size, dtype=np.float32)
            np.copyto(self._penalised, values)
            values = self._penalised
            self._penalties.apply(values)
        if self._temperature == 0:
            return self._selector.first(values, highest_finite(values))
        top_k = self._top_k if 0 < self._top_k < values.size else values.size
        if top_k <= FEW:
            ids, logits = self._selector.few(values, top_k)
            return ids[self._survivors.place_few(logits, self._uniform())]
        if top_k == values.size:
            token = self._draw_from_few(values, self._uniform())
            if token is not None:
                return token
        else:
            highest_finite(values)
        if top_k > MOST:
            return self._draw_from_all(values, top_k, self._uniform())
        found = self._selector.highest(values, top_k)
        gaps = _gaps(values, found)
        kept = self._survivors.kept(gaps)
        return int(found[self._survivors.place(gaps[:kept], self._uniform())])

    def _draw_from_few(self, values: FloatArray, uniform: float) -> int | None:
        """Without top-k: the same token, if a limited number of the best hold the cut, or the draw; else None."""
        survivors = self._survivors
        ids, logits = self._selector.few(values, FEW)
        mass = self._selector.mass(values, logits[0], 1.0 if survivors.cuts else survivors.divisor)
        # No weight is above 1, so a sum of weights needs as many candidates at least; min-p alone may cut earlier.
        least = mass * (survivors.top_p if survivors.cuts else uniform) if survivors.min_p == 0 else 0.0
        if least < FEW:
            place = survivors.place_few(logits, uniform, mass)
            if place < FEW:
                return ids[place]
        if least < MORE < values.size:
            found = self._selector.highest(values, MORE)
            gaps = _gaps(values, found)
            if not survivors.cuts:
                place = survivors.place(gaps, uniform, mass)
            else:
                kept = survivors.kept(gaps, mass)
                place = survivors.place(gaps[:kept], uniform) if kept < MORE else MORE
            if place < MORE:
                return int(found[place])
        return None

    def _draw_from_all(self, values: FloatArray, top_k: int, uniform: float) -> int:
        """From so many candidates that putting them in order would cost more than all the rest."""
        if self._spread.vocab_size != values.size:
            self._spread = Spread(values.size)
        survivors = self._survivors
        return self._spread.draw(
            values,
            top_k=top_k,
            top_p=survivors.top_p,
            min_p=survivors.min_p,
            temperature=survivors.divisor,
            uniform=uniform,
        )


def _gaps(values: FloatArray, ids: IdArray) -> Gaps:
    """How far each logit is below the first, which is the best; at most 0."""
    gaps: Gaps = values[ids].astype(np.float64)
    gaps -= gaps[0]
    return gaps


def real(name: str, value: object, limit: str, holds: Callable[[float], bool]) -> float:
    """`value` as a finite float for which `holds`, else `InvalidRequest` that tells the `limit`."""
    given = number(name, value)
    if not (math.isfinite(given) and holds(given)):
        raise InvalidRequest(f"{name} is {given}, but must be {limit}")
    return given
