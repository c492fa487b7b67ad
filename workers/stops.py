"""Stop strings over streamed text: nothing of a stop string, whole or begun, ever leaves.

Invariant: what `push` has returned so far, plus what it holds back, is exactly the text pushed so far, up to the
first stop string that completes. The answer does not depend on how the text was cut into pieces, so a takeover that
replays the same tokens holds back the same characters. A stop string that was begun but never completed is ordinary
text: `finish` gives it out.
"""

from __future__ import annotations

from collections.abc import Iterable


class StopMatcher:
    """Finds the stop string that completes first; of two that complete together, the longer."""

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self.strings = tuple(dict.fromkeys(stops))
        if "" in self.strings:
            raise ValueError("a stop string is empty")
        self._longest = max(map(len, self.strings), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The part of the text that can be shown now; empty once a stop string has matched."""
        if self.matched is not None:
            return ""
        if not self.strings:
            return text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self.strings if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return text[:at]
        keep = self._begun(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text held back for a stop string that never came; empty after a match."""
        held, self._held = self._held, ""
        return held

    def _begun(self, text: str) -> int:
        """How many last characters of the text are the beginning of some stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self.strings):
                return length
        return 0
