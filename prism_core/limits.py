"""What a Runtime and one request may ask for: the constants, and the three records a caller fills in.

The records hold what they are given: they are checked where they are used, `Limits` by the Runtime's constructor and
the other two by step 3 of a request, because a cancelled or expired request is to say so before it says that its
arguments are wrong.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

MAX_CONTEXT_TOKENS = 262_144
MAX_CHECKPOINTS = 8
MAX_VOCAB = 1_048_576
MAX_STOP_TOKENS = 256
MAX_PREFILL_BLOCK_TOKENS = 512
SNAPSHOT_OVERHEAD_BYTES = 80
"""Charged for every snapshot beside its tokens, its logits and what the decoder's checkpoint owns."""


@dataclass(frozen=True)
class Limits:
    """The bounds of one Runtime.

    `context_tokens`: prompt and answer together, 1..262,144. `checkpoints`: how many completed prefixes are kept for
    reuse, 0..8 (0: none). `checkpoint_bytes`: memory of the kept prefixes and of the running request's rollback
    snapshot together, at least 1.
    """

    context_tokens: int
    checkpoints: int
    checkpoint_bytes: int


@dataclass(frozen=True)
class Generation:
    """How a request ends: after `max_tokens` draws (at least 1; a stop token's draw counts), or at one of
    `stop_tokens` (up to 256 token ids, in any order)."""

    max_tokens: int
    stop_tokens: Collection[int] = ()


@dataclass(frozen=True)
class Prefill:
    """How many prompt tokens a decoder is handed at a time, 1..512. It changes speed, never a result."""

    block_tokens: int = 1
