"""What a Runtime asks of a decoder, and a base class for decoders that work token by token.

A decoder is one causal state over a vocabulary. A Runtime is its only user: it calls one operation at a time, from
whichever thread called `generate`, and it survives an error of any of them by restoring a checkpoint, so a decoder may
be left partly advanced by an error. Nothing here promises speed or thread safety.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from prism_core.errors import DecoderError

FloatArray = npt.NDArray[np.float32]


@runtime_checkable
class Decoder(Protocol):
    """The protocol. A decoder may also offer `checkpoint_bytes_at(tokens) -> int`, the bytes that a checkpoint of so
    many tokens would own; with it the Runtime warns at start-up of limits that a full context cannot meet."""

    @property
    def identity(self) -> str:
        """Not empty: the model's SHA-256 and the numeric contract. Equal identities give bit-equal logits."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens, 1..1,048,576; constant."""

    def checkpoint_bytes(self) -> int:
        """The bytes that the next `checkpoint()` of the present state would own, shared pages included, without tokens
        and logits. Pure; called before each `checkpoint()`."""

    def reset(self) -> None:
        """Go to the empty state."""

    def ingest_block(self, tokens: Sequence[int], check: Callable[[], None]) -> None:
        """Advance causally over 1..512 tokens without logits, calling `check()` between internal steps and letting
        its error through. The split into blocks must not change the state, to the bit."""

    def evaluate_into(self, token: int, logits: FloatArray) -> None:
        """Advance over one token and write all of `logits`: float32, one finite value for each token of the
        vocabulary. The buffer arrives full of NaN and belongs to the caller again afterwards."""

    def checkpoint(self) -> Any:
        """The present state, independently owned: later operations do not change it."""

    def restore(self, checkpoint: Any) -> None:
        """Go to the state of `checkpoint`, which can be restored any number of times."""


class DecoderBase(ABC):
    """`ingest_block` from a per-token `ingest`, and `evaluate_into` from an `evaluate` that returns its logits.

    A decoder that cannot ingest without logits defines `evaluate` alone.
    """

    identity: str
    vocab_size: int

    @abstractmethod
    def checkpoint_bytes(self) -> int:
        """See `Decoder`."""

    @abstractmethod
    def reset(self) -> None:
        """See `Decoder`."""

    def ingest(self, token: int) -> None:
        """Advance over one token without logits. As given, by evaluating it and dropping them."""
        self.evaluate(token)

    def evaluate(self, token: int) -> Sequence[float] | npt.NDArray[Any]:
        """Advance over one token and return the logits of the next: `vocab_size` numbers."""
        raise DecoderError(f"{type(self).__name__} defines neither evaluate nor what it is needed for")

    @abstractmethod
    def checkpoint(self) -> Any:
        """See `Decoder`."""

    @abstractmethod
    def restore(self, checkpoint: Any) -> None:
        """See `Decoder`."""

    def ingest_block(self, tokens: Sequence[int], check: Callable[[], None]) -> None:
        """Ingests the tokens in order, with a check between each two."""
        for at, token in enumerate(tokens):
            if at:
                check()
            self.ingest(token)

    def evaluate_into(self, token: int, logits: FloatArray) -> None:
        """Evaluates `token` and copies the answer; `DecoderError` unless it has exactly as many values as `logits`."""
        values = np.asarray(self.evaluate(token))
        if values.shape != logits.shape:
            raise DecoderError(
                f"evaluate({token}) returned logits of shape {values.shape}, "
                f"but the vocabulary has {logits.size} tokens"
            )
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite, which the Runtime refuses
            np.copyto(logits, values, casting="same_kind")
