"""The decoder of a model: one conversation's state, advanced by the compiled program of its architecture.

Invariant: state and logits after a token depend on the tokens alone, to the bit: not on how they were cut into blocks,
not on the number of threads, not on what was restored before. A step that is broken off (by `check`) leaves the length
as it was; a hybrid then refuses to go on until something is restored or reset.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism_core import kv
from prism_core.errors import DecoderError, InvalidRequest
from prism_core.kernels import words
from prism_core.kernels.threads import Crew
from prism_core.models.assembly import Program
from prism_core.models.graph import QUERIES_PER_UNIT

SLICE_NS = 50_000_000
"""A prefill call gives the caller a chance to `check` after about this long."""
LONGEST_SLICE_NS = 200_000_000
"""Where one phase alone takes longer than this, the next tile has half the tokens."""
SMALLEST_TILE = 8

Logits = NDArray[np.float32]


class ModelDecoder:
    """The Decoder protocol over a `Program`. Single owner; `close` stops its threads.

    A step whose numbers grow too large for float32 raises `DecoderError` and counts as broken off.
    """

    def __init__(
        self, program: Program, *, identity: str, vocab_size: int, page_bytes: int, state_words: int,
        context_tokens: int, threads: int,
    ) -> None:  # fmt: skip
        self.identity = identity
        self.vocab_size = vocab_size
        self.context_tokens = context_tokens
        self._program = program
        self._sequence = kv.Sequence(page_bytes, state_words, context_tokens)
        self._crew = Crew(program.phases, program.operations, threads)
        self._ids = np.zeros(program.tokens, dtype=np.int64)
        self._logits = np.zeros(vocab_size, dtype=np.float32)
        self._tile = program.tokens
        context = self._crew.context
        context[words.IDS] = self._ids.ctypes.data
        context[words.PAGES] = self._sequence.page_table.ctypes.data

    @property
    def length(self) -> int:
        """Tokens that the state covers."""
        return self._sequence.length

    @property
    def arena_bytes(self) -> int:
        """Bytes of pages that have memory."""
        return self._sequence.arena.pages * self._sequence.arena.page_bytes

    def reset(self) -> None:
        """Go to the empty state."""
        self._sequence.reset()

    def ingest_block(self, tokens: Sequence[int], check: Callable[[], None]) -> None:
        """Advance over `tokens` without logits, calling `check` every 50 ms or so; its error breaks the step off."""
        ids = self._checked(tokens)
        at = 0
        while at < len(ids):
            count = min(self._tile, len(ids) - at)
            self._advance(ids[at : at + count], self._program.ingest_phases, check)
            at += count
            if at < len(ids):
                check()

    def evaluate_into(self, token: int, logits: Logits) -> None:
        """Advance over one token and write the float32 logits of the next, `vocab_size` of them."""
        if logits.shape != (self.vocab_size,) or logits.dtype != np.float32:
            raise DecoderError(f"logits must be float32 of {self.vocab_size} values, not {logits.dtype}{logits.shape}")
        direct = logits.flags.c_contiguous and logits.flags.writeable
        target = logits if direct else self._logits
        self._crew.context[words.LOGITS] = target.ctypes.data
        self._advance(self._checked([token]), self._program.phase_count, None)
        if not direct:
            logits[:] = target

    def _advance(self, ids: NDArray[np.int64], last: int, check: Callable[[], None] | None) -> None:
        count = len(ids)
        sequence, context = self._sequence, self._crew.context
        try:
            before, after = sequence.begin(count)
        except MemoryError as error:
            raise DecoderError(f"no memory for {count} more tokens after {sequence.length}: {error}") from error
        self._ids[:count] = ids
        context[words.TOKENS] = count
        context[words.POSITION] = sequence.length
        segments = sequence.length // words.SEGMENT_TOKENS + 1
        context[words.BLOCKS] = segments if count == 1 else -(-count // QUERIES_PER_UNIT)
        context[words.STATE_BEFORE], context[words.STATE_AFTER] = before, after
        context[words.FAULT] = 0
        if check is None:
            self._crew.run(0, last)
        else:
            self._run_in_slices(last, check)
        if context[words.FAULT]:
            raise DecoderError(self._too_large(ids))
        sequence.end(count)

    def _too_large(self, ids: NDArray[np.int64]) -> str:
        tensor = self._program.tensor_at(int(self._crew.context[words.FAULT]))
        first = self._sequence.length
        where = f"position {first}" if len(ids) == 1 else f"positions {first} to {first + len(ids) - 1}"
        return f"the numbers that reach tensor {tensor} at {where} overflow float32: the model's weights are damaged"

    def _run_in_slices(self, last: int, check: Callable[[], None]) -> None:
        from time import monotonic_ns

        done = 0
        while done < last:
            begun = monotonic_ns()
            done = self._crew.run(done, last, SLICE_NS)
            if monotonic_ns() - begun > LONGEST_SLICE_NS + SLICE_NS:
                self._tile = max(self._tile // 2, min(SMALLEST_TILE, self._program.tokens))
            if done < last:
                check()

    def _checked(self, tokens: Sequence[int]) -> NDArray[np.int64]:
        ids = np.asarray(tokens, dtype=np.int64)
        if ids.ndim != 1 or not len(ids):
            raise InvalidRequest("a block must be a non-empty sequence of token ids")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocab_size:
            raise InvalidRequest(f"token ids must be in 0..{self.vocab_size - 1}, not {low if low < 0 else high}")
        return ids

    def checkpoint_bytes(self) -> int:
        """Bytes that a checkpoint of the present state refers to, shared pages included."""
        return self._sequence.checkpoint_bytes()

    def checkpoint_bytes_at(self, tokens: int) -> int:
        """The same for a state of `tokens` tokens."""
        return self._sequence.checkpoint_bytes(tokens)

    def checkpoint(self) -> kv.Checkpoint:
        """The present state; pages and recurrent state are shared with it, nothing is copied."""
        return self._sequence.checkpoint()

    def restore(self, checkpoint: Any) -> None:
        """Go to the state of a checkpoint of this decoder, any number of times."""
        self._sequence.restore(checkpoint)

    def profile(self) -> dict[str, int]:
        """Nanoseconds spent so far by kind of phase; counting begins with the first call."""
        spent: dict[str, int] = {}
        for label, ns in zip(self._program.labels, self._crew.profile(), strict=True):
            spent[label] = spent.get(label, 0) + int(ns)
        return spent

    def close(self) -> None:
        """Stop the threads. The decoder may not be used any more."""
        self._crew.close()
