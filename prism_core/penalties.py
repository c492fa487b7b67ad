"""Repetition, presence and frequency penalties over a sampler's own draws."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from prism_core.errors import SamplerError

FloatArray = npt.NDArray[np.float32]
_HIGHEST = float(np.finfo(np.float32).max)


class Penalties:
    """Counts draws, and lowers (or raises) the logits of what was drawn.

    A positive logit is divided by `repetition`, a negative one multiplied, however often the token was drawn;
    then `presence` is subtracted, and `frequency` for each draw. Not `active`: they change nothing.
    """

    def __init__(self, repetition: float, presence: float, frequency: float) -> None:
        self._repetition, self._presence, self._frequency = repetition, presence, frequency
        self.active = (repetition, presence, frequency) != (1.0, 0.0, 0.0)
        self._places: dict[int, int] = {}
        self._ids: npt.NDArray[np.int64] = np.zeros(64, dtype=np.int64)
        self._draws: npt.NDArray[np.float64] = np.zeros(64, dtype=np.float64)

    def empty(self) -> Penalties:
        """One with the same parameters and no draws."""
        return Penalties(self._repetition, self._presence, self._frequency)

    def copy(self) -> Penalties:
        """An independent one with the same draws."""
        twin = self.empty()
        twin._places = self._places.copy()
        twin._ids, twin._draws = self._ids.copy(), self._draws.copy()
        return twin

    def record(self, tokens: Iterable[int]) -> None:
        """Counts one more draw of each."""
        for token in tokens:
            place = self._places.setdefault(token, len(self._places))
            if place == self._ids.size:
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._draws = np.concatenate((self._draws, np.zeros_like(self._draws)))
            self._ids[place] = token
            self._draws[place] += 1

    def apply(self, logits: FloatArray) -> None:
        """Changes `logits`, in place; `SamplerError` if a counted token has none."""
        drawn = len(self._places)
        ids, draws = self._ids[:drawn], self._draws[:drawn]
        if drawn and ids.max() >= logits.size:
            raise SamplerError(f"token {ids.max()} was drawn before, but there are only {logits.size} logits")
        values = logits[ids].astype(np.float64)
        values = np.where(values > 0, values / self._repetition, values * self._repetition)
        values -= self._presence + self._frequency * draws
        logits[ids] = np.clip(values, -_HIGHEST, _HIGHEST)
