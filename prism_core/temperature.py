"""The temperature sampler: penalties, top-k, top-p, min-p, temperature, one uniform draw.

Invariant: draw n of a seed depends on the seed, n, the parameters, the logits and the draws before it, never on how
requests were cut nor on the processor, so that a copy or a resumed sampler continues to the token anywhere. The draw is
one call of a kernel, see `kernels.drawing`, which says how everything is rounded.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from copy import copy
from typing import Self

import numpy as np
import numpy.typing as npt

from prism_core.candidates import Vector, refuse
from prism_core.errors import InvalidRequest
from prism_core.limits import MAX_VOCAB
from prism_core.penalties import Penalties
from prism_core.validation import in_vocabulary, integer, integers, number

UNIFORMS_PER_BLOCK = 64  # a multiple of the 4 words that one step of Philox's counter gives
LEAST_TEMPERATURE = 1e-300  # anything below it tells the same float32 apart, and its inverse could overflow


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
        self._top_p, self._min_p = top_p, min_p
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
        self._vector = Vector()
        self._plan: Plan | None = None

    def restore(self, saved: TemperatureSampler) -> None:
        """Goes to the state of a copy, which stays independent."""
        self._penalties = saved._penalties.copy()
        self._draws = saved._draws

    def sample(self, logits: npt.ArrayLike) -> int:
        """Draws a token; `SamplerError` unless there are 1..1,048,576 logits, all finite. They are not changed."""
        values = self._vector.accept(logits)
        size = self._vector.size
        plan = self._plan
        if plan is None or plan.size != size:
            plan = self._plan = self._planned(size)
        penalties = self._penalties
        if penalties.active:
            drawn, ids, offsets = penalties.of(size)
            token = plan.draw(plan.address, self._vector.address, size, drawn, ids, offsets, self._uniform())
        else:
            token = plan.draw(plan.address, self._vector.address, size, -1, 0, 0, self._uniform())
        if token < 0:
            refuse(values)
        if penalties.active:
            penalties.record((token,))
        self._draws += 1
        return token

    def _planned(self, size: int) -> Plan:
        top_k = 1 if self._temperature == 0 else self._top_k
        return Plan(size, top_k, self._top_p, self._min_p, self._temperature, self._penalties)

    def _uniform(self) -> float:
        """The number in [0, 1) of the present draw. A function of seed and draw alone; a block of them is kept."""
        block, at = divmod(self._draws, UNIFORMS_PER_BLOCK)
        if self._uniforms[0] != block:
            words = np.random.Philox(key=self._seed, counter=block * UNIFORMS_PER_BLOCK // 4)
            numbers = (words.random_raw(UNIFORMS_PER_BLOCK) >> np.uint64(11)) * 2.0**-53
            self._uniforms = block, numbers.tolist()
        return self._uniforms[1][at]


class Plan:
    """The kernel's parameters and scratch memory for a vocabulary of `size`."""

    def __init__(
        self, size: int, top_k: int, top_p: float, min_p: float, temperature: float, penalties: Penalties
    ) -> None:
        from prism_core.kernels import dealing, drawing, weights  # not sooner: a client of the pool needs no compiler

        temperature = max(temperature, LEAST_TEMPERATURE)
        members = 0 if 0 < top_k <= dealing.FEW else size + weights.LANES
        self._words = np.zeros(dealing.PLAN_WORDS, dtype=np.int64)
        self._scratch = (
            np.empty(size if penalties.active else 0, dtype=np.float32),
            np.empty(members, dtype=np.float32),
            np.empty(members, dtype=np.int32),
            np.empty(members, dtype=np.float32),
            np.empty(members, dtype=np.int32),
        )
        self._words[dealing.TOP_K] = min(top_k, size)
        reals = self._words.view(np.float64)
        reals[dealing.TOP_P] = top_p
        reals[dealing.FLOOR] = math.log(min_p) if min_p > 0 else -math.inf
        reals[dealing.INVERSE] = 1 / temperature
        reals[dealing.WINDOW] = weights.NO_WEIGHT * max(temperature, 1.0)
        reals[dealing.REPETITION] = penalties.repetition
        places = (dealing.COPY, dealing.VALUES, dealing.IDS, dealing.KEPT, dealing.KEPT_IDS)
        for at, memory in zip(places, self._scratch, strict=True):
            self._words[at] = memory.ctypes.data
        self.size = size
        self.address = int(self._words.ctypes.data)
        self.draw: Callable[..., int] = drawing.draw


def real(name: str, value: object, limit: str, holds: Callable[[float], bool]) -> float:
    """`value` as a finite float for which `holds`, else `InvalidRequest` that tells the `limit`."""
    given = number(name, value)
    if not (math.isfinite(given) and holds(given)):
        raise InvalidRequest(f"{name} is {given}, but must be {limit}")
    return given
