"""The state of one conversation: the live buffers, the last commit, and snapshots of both.

Invariant: between requests the decoder, the live buffers and the last commit describe the same tokens, unless the
conversation is latched or unsettled. A committed history that is not empty always has its logits, because a request
evaluates every token that it leaves behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from prism_core.candidates import Compiled
from prism_core.decoder import Decoder, FloatArray
from prism_core.errors import DecoderError
from prism_core.limits import Limits
from prism_core.prefixes import SavedPrefixes, Snapshot
from prism_core.validation import IntArray


class TokenView(Sequence[int]):
    """Token ids that cannot change: compares equal to any sequence of the same ids, and becomes an array for free."""

    __slots__ = ("_ids",)

    def __init__(self, ids: IntArray) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> TokenView: ...
    def __getitem__(self, at: int | slice) -> int | TokenView:
        return TokenView(self._ids[at]) if isinstance(at, slice) else int(self._ids[at])

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids.tolist())

    def __eq__(self, other: object) -> bool:
        return self._ids.tolist() == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self._ids, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        return f"TokenView({self._ids.tolist()})"


class Live:
    """The history and next logits that the decoder's present state stands for, in buffers that are allocated once.

    `logits` is what the decoder writes; `view` is the same memory, read-only, for samplers.
    """

    def __init__(self, context_tokens: int, vocab_size: int) -> None:
        self._history: IntArray = np.zeros(context_tokens, dtype=np.int32)
        self._cells = self._history.data
        self.length = 0
        self.logits: FloatArray = np.full(vocab_size, np.nan, dtype=np.float32)
        self._best: int  # of the highest, or -1: known once `require_logits` or `load` was there, as for any history
        self._address = self.logits.ctypes.data
        # Over a read-only buffer, whereas a mere view's owner could be asked to make it writable again.
        self.view: FloatArray = np.frombuffer(self.logits.data.toreadonly(), dtype=np.float32)

    @property
    def tokens(self) -> IntArray:
        """The history, int32[length]; the memory is reused."""
        return self._history[: self.length]

    def frozen_tokens(self) -> IntArray:
        """A copy of the history that nobody can make writable."""
        return np.frombuffer(self.tokens.tobytes(), dtype=np.int32)

    def starts(self, prompt: IntArray) -> bool:
        """Whether there is a history and the prompt starts with all of it."""
        return 0 < self.length <= prompt.size and np.array_equal(prompt[: self.length], self.tokens)

    def append(self, token: int) -> None:
        """Appends one token; not by way of numpy, which would cost ten times as much after a decode step."""
        self._cells[self.length] = token
        self.length += 1

    def extend(self, tokens: IntArray) -> None:
        """Appends tokens."""
        self._history[self.length : self.length + tokens.size] = tokens
        self.length += tokens.size

    def invalidate(self) -> None:
        """Makes every logit NaN, so that a decoder's short write cannot pass for an answer."""
        self.logits.fill(np.nan)

    def require_logits(self) -> None:
        """`DecoderError` unless every logit is finite."""
        highest = Compiled.highest
        self._best = -1 if highest is None else highest(self._address, self.logits.size)
        if self._best < 0 and not (
            math.isfinite(np.minimum.reduce(self.logits)) and math.isfinite(np.maximum.reduce(self.logits))
        ):
            at = int(np.isfinite(self.logits).argmin())
            raise DecoderError(
                f"the decoder left {self.logits[at]} as logit {at} of {self.logits.size}: all must be finite"
            )

    def highest(self, logits: FloatArray) -> int:
        """Greedy over `view`, whose values are known to be finite; numpy's argmax would copy a read-only array."""
        return self._best if self._best >= 0 else int(self.logits.argmax())

    def load(self, snapshot: Snapshot) -> None:
        """Becomes the snapshot; one without logits leaves NaN."""
        self._best = -1
        self.length = 0
        self.extend(snapshot.tokens)
        self.logits[:] = np.nan if snapshot.logits is None else snapshot.logits

    def clear(self) -> None:
        """Becomes empty."""
        self.length = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """What a finished request leaves behind."""

    tokens: TokenView
    prefixes: SavedPrefixes


class Conversation:
    """Everything that outlives a request.

    `latched`: a recovery or a reset is under way or has failed. `unsettled`: the tokens of the commit that a running
    request started from; while that is still the present commit, the decoder may be anywhere. A request settles by the
    one store that replaces `committed`, so an exception that a signal raises between any two instructions finds the
    request wholly committed or still to be recovered.
    """

    def __init__(self, decoder: Decoder, limits: Limits, vocab_size: int, *, lru: bool) -> None:
        self.decoder = decoder
        self.limits = limits
        self.vocab_size = vocab_size
        self.live = Live(limits.context_tokens, vocab_size)
        self._lru = lru
        self.latched = False
        self.unsettled: TokenView | None = None
        self.committed = self._nothing()

    @property
    def faulted(self) -> bool:
        """Whether the decoder's state is unknown, as seen when no request is running."""
        return self.latched or self.unsettled is self.committed.tokens

    def clear(self) -> None:
        """Forgets the history and the saved prefixes."""
        self.live.clear()
        self.committed = self._nothing()

    def _nothing(self) -> Commit:
        return Commit(TokenView(self.live.frozen_tokens()), SavedPrefixes(self.limits, lru=self._lru))
