"""The text of a turn, token by token: whole characters only, stop strings withheld.

Invariant: the text given out after token n is a function of the first n token ids alone, so that a worker that takes a
turn over can replay the ids and go on at the exact character where its predecessor stopped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from workers.stops import StopMatcher


class TextStream(Protocol):
    """The tokenizer's incremental decoder."""

    def push(self, token: int, /) -> str: ...

    def finish(self) -> str: ...


class TurnText:
    """Turns token ids into the text deltas of one turn."""

    def __init__(self, stream: TextStream, stops: Iterable[str] = ()) -> None:
        self._stream = stream
        self._stops = StopMatcher(stops)
        self._plain = not self._stops.strings
        self._parts: list[str] = []
        self._skip = 0

    @property
    def text(self) -> str:
        """All text given out so far, replayed text included."""
        return "".join(self._parts)

    @property
    def stopped(self) -> bool:
        """True once a stop string is complete."""
        return self._stops.matched is not None

    def push(self, token: int) -> str:
        """The text that this token makes final, perhaps empty."""
        text = self._stream.push(token)
        if self._plain and not self._skip:
            self._parts.append(text)
            return text
        return self._give(self._stops.push(text))

    def finish(self) -> str:
        """What was held back: an unfinished character, an unfinished stop string. Call once, after the last token."""
        if self.stopped:
            return ""
        return self._give(self._stops.push(self._stream.finish()) + self._stops.finish())

    def replay(self, tokens: Iterable[int], logged: str) -> None:
        """Take in tokens whose text is in the log already, and give nothing of it out again.

        `logged` may be longer than what the tokens alone release: the predecessor may have died between its last
        delta (the held-back tail) and its end event. Those characters are then skipped when they come again.
        """
        for token in tokens:
            self.push(token)
        self._skip = max(0, len(logged) - len(self.text))

    def _give(self, text: str) -> str:
        self._parts.append(text)
        skipped = min(self._skip, len(text))
        self._skip -= skipped
        return text[skipped:]
