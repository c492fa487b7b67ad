"""Repetition, presence and frequency penalties over a sampler's own draws."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from prism_core.errors import SamplerError

FloatArray = npt.NDArray[np.float32]
_HIGHEST = float(np.finfo(np.float32).max)
_MOST = 1e200  # a repetition penalty beyond it, or below its inverse, gives the same float32 and could overflow float64


class Penalties:
    """Counts draws, and lowers (or raises) the logits of what was drawn.

    A positive logit is divided by `repetition`, a negative one multiplied, however often the token was drawn;
    then `presence` is subtracted, and `frequency` for each draw. Not `active`: they change nothing.
    """

    def __init__(self, repetition: float, presence: float, frequency: float) -> None:
        self._parameters = repetition, presence, frequency
        self._repetition = min(max(repetition, 1 / _MOST), _MOST)
        self.active = self._parameters != (1.0, 0.0, 0.0)
        self._places: dict[int, int] = {}
        self._highest = -1
        self._ids: npt.NDArray[np.int64] = np.zeros(64, dtype=np.int64)
        self._offsets: npt.NDArray[np.float64] = np.zeros(64, dtype=np.float64)

    def empty(self) -> Penalties:
        """One with the same parameters and no draws."""
        return Penalties(*self._parameters)

    def copy(self) -> Penalties:
        """An independent one with the same draws."""
        twin = self.empty()
        twin._places, twin._highest = self._places.copy(), self._highest
        twin._ids, twin._offsets = self._ids.copy(), self._offsets.copy()
        return twin

    def record(self, tokens: Iterable[int]) -> None:
        """Counts one more draw of each."""
        _, presence, frequency = self._parameters
        for token in tokens:
            place = self._places.get(token)
            if place is None:
                place = self._places[token] = len(self._places)
                if place == self._ids.size:
                    self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                    self._offsets = np.concatenate((self._offsets, np.zeros_like(self._offsets)))
                self._highest = max(self._highest, token)
                self._ids[place] = token
                self._offsets[place] = presence
            self._offsets[place] += frequency

    def apply(self, logits: FloatArray) -> None:
        """Changes `logits`, in place; `SamplerError` if a counted token has none."""
        if self._highest >= logits.size:
            raise SamplerError(f"token {self._highest} was drawn before, but there are only {logits.size} logits")
        drawn = len(self._places)
        ids = self._ids[:drawn]
        values = logits[ids].astype(np.float64)
        if self._repetition != 1.0:
            values = np.where(values > 0, values / self._repetition, values * self._repetition)
        values -= self._offsets[:drawn]
        logits[ids] = np.minimum(np.maximum(values, -_HIGHEST), _HIGHEST)
