"""The transactional Runtime: one conversation over one decoder, changed by whole requests or not at all.

A `generate` either commits, or the decoder, the history, the logits and the caller's sampler are exactly what they were
before it. If even going back fails, the Runtime latches and refuses work until `reset()` succeeds. Not promised: a
saved prefix that was evicted for a failed request stays evicted, and a Runtime serves one request at a time; a second
one is refused, it does not wait.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from prism_core.conversation import Conversation, TokenView
from prism_core.decoder import Decoder
from prism_core.errors import InvalidRequest
from prism_core.limits import (
    MAX_CHECKPOINTS,
    MAX_CONTEXT_TOKENS,
    MAX_PREFILL_BLOCK_TOKENS,
    MAX_STOP_TOKENS,
    MAX_VOCAB,
    SNAPSHOT_OVERHEAD_BYTES,
    Generation,
    Limits,
    Prefill,
)
from prism_core.prefixes import full_snapshot_bytes
from prism_core.sampling import Sampler, give_back
from prism_core.timings import Timings, Untimed
from prism_core.transaction import Completion, Finish, Transaction
from prism_core.validation import Arguments, check_decoder, check_limits, short

__all__ = [
    "MAX_CHECKPOINTS",
    "MAX_CONTEXT_TOKENS",
    "MAX_PREFILL_BLOCK_TOKENS",
    "MAX_STOP_TOKENS",
    "MAX_VOCAB",
    "SNAPSHOT_OVERHEAD_BYTES",
    "Cancellation",
    "Completion",
    "Finish",
    "Generation",
    "Limits",
    "Prefill",
    "Runtime",
    "Timings",
]

P = ParamSpec("P")
T = TypeVar("T")
RETENTIONS = ("fifo", "lru")
_ONE_BY_ONE = Prefill()


class Cancellation:
    """A flag that any thread may set once. The Runtime reads it before and after every decoder operation."""

    __slots__ = ("_cancelled",)

    def __init__(self) -> None:
        self._cancelled = False

    def cancel(self) -> None:
        """Asks the request to stop; it cannot be taken back."""
        self._cancelled = True

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled


def _exclusive(method: Callable[Concatenate[Runtime, P], T]) -> Callable[Concatenate[Runtime, P], T]:
    """Refuses a call that starts while another one is running, before it touches anything.

    The claim is one atomic dictionary operation and is recognised by identity, and it is given up twice, so that an
    interrupt at any point neither leaves a claim behind nor takes away another's.
    """

    @wraps(method)
    def claimed(self: Runtime, /, *args: P.args, **kwargs: P.kwargs) -> T:
        claim = object()
        try:
            try:
                if self._claims.setdefault("owner", claim) is not claim:
                    raise InvalidRequest(
                        f"{method.__name__}() was called while the Runtime is running a request: it runs one at a time"
                    )
                return method(self, *args, **kwargs)
            finally:
                self._release(claim)
        finally:
            self._release(claim)

    return claimed


class Runtime:
    """A conversation with `decoder`, which the Runtime owns from now on and resets at once.

    `clock() -> float` gives the seconds that deadlines are compared with. `retention`: which saved prefix makes room,
    "fifo" the oldest, "lru" the least recently reused, and then a reused prefix is replaced by the longer one that grew
    from it. `checkpoint_ceiling`, at least 8, raises the limit of `Limits.checkpoints`.

    Raises `InvalidRequest` for limits, a vocabulary or an identity out of range, and whatever `decoder.reset()` raises.
    Warns (`RuntimeWarning`) if the decoder tells the size of its checkpoints and the budget cannot hold two of a full
    context: such a conversation would come to a length after which every request fails.
    """

    def __init__(
        self,
        decoder: Decoder,
        limits: Limits,
        *,
        clock: Callable[[], float] = time.monotonic,
        retention: str = "fifo",
        checkpoint_ceiling: int = MAX_CHECKPOINTS,
    ) -> None:
        limits = check_limits(limits, checkpoint_ceiling)
        vocab_size = check_decoder(decoder)
        if not callable(clock):
            raise InvalidRequest(f"clock must be callable, not {clock!r}")
        if retention not in RETENTIONS:
            raise InvalidRequest(f"retention is {retention!r}, but must be one of {', '.join(RETENTIONS)}")
        self._clock = clock
        self._claims: dict[str, object] = {}
        decoder.reset()
        self._conversation = Conversation(decoder, limits, vocab_size, lru=retention == "lru")
        _warn_of_budget_trap(decoder, limits)

    @property
    def tokens(self) -> TokenView:
        """The history of the last commit, also while a request is running; unchanging."""
        return self._conversation.committed.tokens

    @property
    def decoder(self) -> Decoder:
        return self._conversation.decoder

    @property
    def is_faulted(self) -> bool:
        """Whether a recovery or a reset is under way or has failed; then only `reset()` helps."""
        return self._conversation.latched or (not self._claims and self._conversation.faulted)

    @property
    def checkpoint_count(self) -> int:
        """How many prefixes are saved for reuse."""
        return len(self._conversation.committed.prefixes)

    def _release(self, claim: object) -> None:
        if self._claims.get("owner") is claim:
            del self._claims["owner"]

    @_exclusive
    def reset(self) -> None:
        """Forgets everything and lifts the latch. If the decoder's reset fails, its error is raised, the latch is on
        and the history stays visible. Refused (`InvalidRequest`) while a request is running."""
        self._conversation.latched = True
        self._conversation.decoder.reset()
        self._conversation.clear()
        self._conversation.latched = False

    @_exclusive
    def generate(
        self,
        prompt: Sequence[int] | npt.NDArray[np.integer[Any]],
        options: Generation,
        *,
        prefill: Prefill = _ONE_BY_ONE,
        cancellation: Any = None,
        deadline: float | None = None,
        sampler: Sampler | None = None,
        emit: Callable[[int], object] | None = None,
        save_at: Sequence[int] = (),
        keep_saved: bool = False,
        stop_when: Callable[[], object] | None = None,
        on_prefix: Callable[[int], object] | None = None,
        timings: Timings | None = None,
    ) -> Completion:
        """Continues `prompt`, the whole conversation so far as token ids, and commits prompt and answer.

        `cancellation`: any object with `is_cancelled`. `deadline`: in `clock()` seconds; reached counts as passed.
        `sampler`: None draws greedily. `emit(token)` is called for each token of the answer once its successor's logits
        are there; what it emitted is provisional until `generate` returns. `stop_when()` is asked after each emit; true
        ends the answer. `on_prefix(n)` is told once how many prompt tokens were reused. `save_at`: strictly increasing
        lengths, 1..len(prompt)-1, at which to save a prefix as well; those already reused are passed over.
        `keep_saved`: a reused prefix of such a length is not replaced under "lru", so that a beginning which many
        conversations share stays. `timings` is filled in.

        Raises `InvalidRequest`, `Cancelled`, `DeadlineExceeded`, `RuntimeFaulted`, `BudgetExceeded`, `DecoderError`,
        `SamplerError`, `RestoreFailed`, and unchanged whatever the decoder, the sampler or a callback raises. After any
        error `sampler` is as before, and so is the conversation; only after `RestoreFailed` it must be reset first.
        """
        arguments = Arguments(
            prompt, options, prefill, deadline, sampler, emit, save_at, keep_saved, stop_when, on_prefix, timings
        )
        timings = timings if isinstance(timings, Timings) else Untimed()
        timings.begin()
        timings.enter("sampler_copy")
        loan = _Loan(sampler)
        timings.enter(None)
        transaction = Transaction(
            self._conversation, arguments, clock=self._clock, cancellation=cancellation, timings=timings
        )
        try:
            try:
                return transaction.run()
            except BaseException:
                if loan.owed and not transaction.committed:
                    timings.enter("recovery")
                    loan.repay()
                timings.enter(None)
                raise
        except BaseException:  # an interrupt may have come before or amid the giving back
            if not transaction.committed:
                with suppress(Exception):
                    loan.repay()
            raise


class _Loan:
    """The caller's sampler, and the state in which it is owed back if the request fails."""

    def __init__(self, sampler: Sampler | None) -> None:
        self._sampler = sampler
        self._saved = None if sampler is None else sampler.copy()
        self.owed = sampler is not None

    def repay(self) -> None:
        """Gives the state back, unless that has been done; what the sampler's `restore` raises passes through."""
        if self.owed:
            give_back(self._sampler, self._saved)
            self.owed = False


def _warn_of_budget_trap(decoder: Decoder, limits: Limits) -> None:
    one = full_snapshot_bytes(decoder, limits.context_tokens)
    if one is not None and limits.checkpoint_bytes < 2 * one:
        warnings.warn(
            f"checkpoint_bytes is {short(limits.checkpoint_bytes)}, but two snapshots of a full context of "
            f"{limits.context_tokens} tokens need {short(2 * one)}: a long conversation will fail or lose its prefixes",
            RuntimeWarning,
            stacklevel=3,
        )
