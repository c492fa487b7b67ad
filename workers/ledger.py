"""The numbered events of one turn: what its log must come to hold, whatever happens on the way there.

Invariant: numbers have no holes, and an event that has one keeps it, and its bytes, until the turn ends; so any tail of
them can be sent again. Tokens that wait together become one event, as if they had been emitted at once.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from broker import events

MAX_EVENTS_PER_APPEND = 256
MAX_TOKENS_PER_DELTA = 512

Token = tuple[int | None, str, Any]
"""A token, the text that it released, its log-probability; no token for text that was held back to the end."""


class Ledger:
    """Events of one claim. For one thread at a time."""

    def __init__(self, ev: int, n: int) -> None:
        """`ev` events with `n` tokens in all are in the log already, by earlier attempts."""
        self._before = ev
        self._events: list[tuple[bytes, int]] = []  # each with the tokens up to it
        self.n = n
        """Tokens up to the last event."""

    @property
    def ev(self) -> int:
        """Number of the last event."""
        return self._before + len(self._events)

    def enter(self, waiting: deque[Any]) -> int:
        """Numbers the payloads and tokens at the head of `waiting`, at most an append's worth, up to anything else.

        Returns how many it took from there.
        """
        before, room = len(waiting), MAX_EVENTS_PER_APPEND
        while waiting and room and isinstance(waiting[0], (bytes, tuple)):
            item = waiting.popleft()
            self._events.append((item if isinstance(item, bytes) else self._delta(item, waiting), self.n))
            room -= 1
        return before - len(waiting)

    def since(self, ev: int) -> tuple[list[bytes], int] | None:
        """Payloads of event `ev` and those after it, at most an append's worth, and the tokens up to the last of them.

        None if an earlier attempt had that event, and nobody has it now.
        """
        at = ev - self._before - 1
        if at < 0:
            return None
        part = self._events[at : at + MAX_EVENTS_PER_APPEND]
        return [payload for payload, _ in part], part[-1][1]

    def _delta(self, first: Token, waiting: deque[Any]) -> bytes:
        """One event of as many tokens in a row as have log-probabilities, or have none, like the first."""
        parts = [first]
        while waiting and len(parts) < MAX_TOKENS_PER_DELTA:
            item = waiting[0]
            if not isinstance(item, tuple) or (item[0] is not None and (item[2] is None) != (first[2] is None)):
                break
            parts.append(item)
            waiting.popleft()
        ids = [token for token, _, _ in parts if token is not None]
        logprobs = None if first[2] is None else [logprob for _, _, logprob in parts if logprob is not None]
        self.n += len(ids)
        return events.delta(n=self.n, ids=ids, text="".join([text for _, text, _ in parts]), logprobs=logprobs)
