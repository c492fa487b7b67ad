"""Snapshots, and the saved prefixes that later requests may start from, within a budget of count and bytes.

Invariant: reserved bytes, saved prefixes and a new snapshot never exceed `checkpoint_bytes` together, and a snapshot
that cannot fit evicts nothing. Evictions are not undone when the request that caused them fails.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from prism_core.decoder import Decoder, FloatArray
from prism_core.errors import BudgetExceeded, DecoderError
from prism_core.limits import SNAPSHOT_OVERHEAD_BYTES, Limits
from prism_core.validation import IntArray, as_integer, short

TOKEN_BYTES = LOGIT_BYTES = 4


def snapshot_bytes(tokens: int, logits: int, checkpoint_bytes: int) -> int:
    """What a snapshot is charged: 4 bytes for each token and logit, the decoder's part, and a constant."""
    return TOKEN_BYTES * tokens + LOGIT_BYTES * logits + checkpoint_bytes + SNAPSHOT_OVERHEAD_BYTES


def decoder_bytes(name: str, value: object) -> int:
    """A size that a decoder reported, else `DecoderError`."""
    size = as_integer(value)
    if size is None or size < 0:
        raise DecoderError(f"the decoder's {name} is {short(value)}, but must be an integer of at least 0")
    return size


def full_snapshot_bytes(decoder: Decoder, context_tokens: int) -> int | None:
    """What a snapshot of a full context would be charged; None if the decoder offers no `checkpoint_bytes_at`."""
    bytes_at = getattr(decoder, "checkpoint_bytes_at", None)
    if bytes_at is None:
        return None
    size = decoder_bytes(f"checkpoint_bytes_at({context_tokens})", bytes_at(context_tokens))
    return snapshot_bytes(context_tokens, decoder.vocab_size, size)


class Snapshot:
    """An owned copy of a conversation: tokens int32[n], logits float32[vocab] or None, the decoder's checkpoint."""

    __slots__ = ("logits", "size", "state", "tokens")

    def __init__(self, tokens: IntArray, logits: FloatArray | None, state: Any, size: int) -> None:
        self.tokens = tokens
        self.logits = logits
        self.state = state
        self.size = size

    def serves(self, prompt: IntArray) -> bool:
        """Whether the prompt starts with all of these tokens; equal ones need the logits too."""
        least = self.tokens.size + (self.logits is None)
        return bool(prompt.size >= least) and np.array_equal(prompt[: self.tokens.size], self.tokens)

    def release(self) -> None:
        """Gives up the memory, though a traceback may keep this object alive: a decoder's pages are scarce."""
        self.state = self.logits = None


class SavedPrefixes:
    """The snapshots kept for reuse, from the oldest to the youngest."""

    def __init__(self, limits: Limits, *, lru: bool, saved: Iterable[Snapshot] = ()) -> None:
        self._limits = limits
        self._lru = lru
        self._saved = list(saved)

    def __len__(self) -> int:
        return len(self._saved)

    def make_room(self, size: int, reserved: int) -> None:
        """Evicts the oldest until `size` fits beside `reserved`; evicts none if it cannot fit: `BudgetExceeded`."""
        limit = self._limits.checkpoint_bytes
        if size > limit - reserved:
            beside = f" beside {short(reserved)} reserved" if reserved else ""
            raise BudgetExceeded(
                f"a snapshot needs {short(size)} bytes{beside}, but checkpoint_bytes is {short(limit)}"
            )
        while reserved + sum(snapshot.size for snapshot in self._saved) + size > limit:
            self._saved.pop(0).release()

    def longest(self, prompt: IntArray) -> Snapshot | None:
        """The longest one that the prompt starts with; of equals, the youngest."""
        fits = [snapshot for snapshot in self._saved if snapshot.serves(prompt)]
        return max(reversed(fits), key=lambda snapshot: snapshot.tokens.size, default=None)

    def equal_to(self, tokens: IntArray) -> list[Snapshot]:
        """Those that hold exactly these tokens."""
        return [snapshot for snapshot in self._saved if np.array_equal(snapshot.tokens, tokens)]

    def reuse(self, reused: list[Snapshot]) -> list[Snapshot]:
        """Under "lru" makes the reused ones the youngest, and returns them: a longer one may replace them."""
        if not self._lru:
            return []
        self._saved = [snapshot for snapshot in self._saved if snapshot not in reused] + reused
        return reused

    def after(self, added: list[Snapshot], replaced: list[Snapshot]) -> SavedPrefixes:
        """A new store: without the replaced ones, then with each of `added`, the oldest making room by count.

        What it has no place for is gone from this store too, like any eviction.
        """
        every = [snapshot for snapshot in self._saved if snapshot not in replaced] + added
        kept = every[max(0, len(every) - self._limits.checkpoints) :]
        dropped = [snapshot for snapshot in self._saved + added if snapshot not in kept]
        self._saved = [snapshot for snapshot in self._saved if snapshot in kept]
        for snapshot in dropped:
            snapshot.release()
        return SavedPrefixes(self._limits, lru=self._lru, saved=kept)
