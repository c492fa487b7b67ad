"""Repetition, presence and frequency penalties over a sampler's own draws."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from prism_core.errors import SamplerError

_MOST = 1e200  # a repetition penalty beyond it, or below its inverse, gives the same float32 and could overflow float64


class Penalties:
    """Counts draws, and tells how the logits of what was drawn are lowered (or raised).

    A positive logit is divided by `repetition`, a negative one multiplied, however often the token was drawn;
    then `presence` is subtracted, and `frequency` for each draw, together the offset of its id. Not `active`: they
    change nothing.
    """

    def __init__(self, repetition: float, presence: float, frequency: float) -> None:
        self._parameters = repetition, presence, frequency
        self.repetition = min(max(repetition, 1 / _MOST), _MOST)
        self.active = self._parameters != (1.0, 0.0, 0.0)
        self._places: dict[int, int] = {}
        self._highest = -1
        self._ids = array("q")
        self._offsets = array("d")

    def empty(self) -> Penalties:
        """One with the same parameters and no draws."""
        return Penalties(*self._parameters)

    def copy(self) -> Penalties:
        """An independent one with the same draws."""
        twin = self.empty()
        twin._places, twin._highest = self._places.copy(), self._highest
        twin._ids, twin._offsets = self._ids[:], self._offsets[:]
        return twin

    def record(self, tokens: Iterable[int]) -> None:
        """Counts one more draw of each."""
        _, presence, frequency = self._parameters
        for token in tokens:
            place = self._places.get(token)
            if place is None:
                # What an interrupt left behind the known places is written over; a place is known when all is there.
                place = len(self._places)
                self._ids[place:], self._offsets[place:] = array("q", (token,)), array("d", (presence,))
                self._highest = max(self._highest, token)
                self._places[token] = place
            self._offsets[place] += frequency

    def of(self, size: int) -> tuple[int, int, int]:
        """(how many ids, their address, that of the offsets); `SamplerError` if an id has no logit among `size`."""
        if self._highest >= size:
            raise SamplerError(f"token {self._highest} was drawn before, but there are only {size} logits")
        return len(self._places), self._ids.buffer_info()[0], self._offsets.buffer_info()[0]
