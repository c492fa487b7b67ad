"""One request as a transaction: steps 1 to 11 in their order. It commits as a whole or leaves the last commit.

From the moment the rollback snapshot exists, every exception, an interrupt included, restores it before it is raised
again. What is not promised: evictions of saved prefixes are not undone, and tokens already emitted by a request that
fails are provisional.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from prism_core.conversation import Commit, Conversation, TokenView
from prism_core.errors import Cancelled, DeadlineExceeded, RestoreFailed, RuntimeFaulted, SamplerError
from prism_core.prefixes import Snapshot, decoder_bytes, snapshot_bytes
from prism_core.timings import Timings
from prism_core.validation import (
    Arguments,
    IntArray,
    Request,
    as_integer,
    check_request,
    clock_seconds,
    nearest_float,
    short,
)


class Finish(StrEnum):
    """Why a request ended: a stop token or `stop_when`, or its `max_tokens`."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class Completion:
    """Counts of a committed request. `reused_tokens` of the prompt cost nothing; a stop token is not counted."""

    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int
    finish: Finish


class Transaction:
    """One use of `run`."""

    def __init__(
        self,
        conversation: Conversation,
        arguments: Arguments,
        *,
        clock: Callable[[], float],
        cancellation: Any,
        timings: Timings,
    ) -> None:
        self._conversation = conversation
        self._decoder = conversation.decoder
        self._live = conversation.live
        self._arguments = arguments
        self._clock = clock
        self._cancellation = cancellation
        self._deadline: Any = clock_seconds(arguments.deadline)
        self._timings = timings
        self._reserved = 0
        self._commit: Commit | None = None
        self._held: list[Snapshot] = []

    def run(self) -> Completion:
        """Does the request; see `Runtime.generate` for what it raises."""
        conversation = self._conversation
        if conversation.faulted:
            raise RuntimeFaulted("an earlier recovery or reset failed: call reset() before anything else")
        self.check()
        request = check_request(self._arguments, conversation.limits.context_tokens, conversation.vocab_size)
        self.check()
        self._timings.enter("rollback_snapshot")
        rollback = self._snapshot(logits=self._live.length > 0)
        self._reserved = rollback.size
        try:
            conversation.unsettled = conversation.committed.tokens
            completion = self._generate(request)
            self._commit = self._completed(request)
            self._timings.enter(None)
            conversation.committed = self._commit  # step 11 is this one store
            return completion
        except BaseException as original:
            if not self.committed:
                self._timings.enter("recovery")
                self._recover(rollback, original)
            raise

    @property
    def committed(self) -> bool:
        """Whether the request has been committed: even an interrupt that arrives right after cannot undo it."""
        return self._conversation.committed is self._commit

    def check(self) -> None:
        """Raises `Cancelled`, or else `DeadlineExceeded` if the clock has reached the deadline."""
        if self._cancellation is not None:
            flag = self._cancellation.is_cancelled
            if flag and (not callable(flag) or flag()):
                raise Cancelled("the request was cancelled")
        now = self._clock()
        if self._deadline is not None and now >= self._deadline:
            raise DeadlineExceeded(f"the deadline {nearest_float(self._deadline)} has passed: the clock reads {now}")

    def _generate(self, request: Request) -> Completion:
        """Steps 6 to 9."""
        self._timings.enter("prefix_preparation")
        self.check()
        self.check()
        reused = self._choose_prefix(request.prompt)
        self.check()
        if self._arguments.on_prefix is not None:
            self._timings.enter("callback")
            self._arguments.on_prefix(reused)
        self._prefill(request, reused)
        generated, finish = self._decode(request)
        self.check()
        return Completion(request.prompt.size, reused, generated, finish)

    def _choose_prefix(self, prompt: IntArray) -> int:
        """Puts the decoder at the longest usable prefix of the prompt and returns its length."""
        live, prefixes = self._live, self._conversation.committed.prefixes
        if live.starts(prompt):
            reused = prefixes.equal_to(live.tokens)
        else:
            longest = prefixes.longest(prompt)
            self.check()
            if longest is None:
                self._decoder.reset()
            else:
                self._decoder.restore(longest.state)
            self.check()
            reused = [] if longest is None else [longest]
            if longest is None:
                live.clear()
            else:
                live.load(longest)
        self._reused = prefixes.reuse(reused)
        return live.length

    def _prefill(self, request: Request, reused: int) -> None:
        """Ingests all but the last token that is not reused, and evaluates that one alone."""
        prompt, last = request.prompt, request.prompt.size - 1
        if reused > last:
            return
        start = reused
        for end in self._block_ends(request, reused, last):
            self._timings.enter("prefill_ingestion")
            self._ingest(prompt[start:end])
            if end in request.save_at:
                self._timings.enter("completion_snapshot")
                self._save(logits=False)
            start = end
        self._timings.enter("prefill_evaluation")
        self._evaluate(int(prompt[last]))

    def _block_ends(self, request: Request, start: int, last: int) -> Iterator[int]:
        """Ends of the blocks of prompt[start:last], cut at each save position."""
        for stretch_end in (*request.save_at, last):
            while start < stretch_end:
                start = min(start + request.block_tokens, stretch_end)
                yield start

    def _ingest(self, block: IntArray) -> None:
        self.check()
        self._live.invalidate()
        self.check()
        self._decoder.ingest_block(block.tolist(), self.check)
        self.check()
        self._live.extend(block)

    def _evaluate(self, token: int) -> None:
        self.check()
        self._live.invalidate()
        self.check()
        self._decoder.evaluate_into(token, self._live.logits)
        self._live.require_logits()
        self.check()
        self._live.append(token)

    def _decode(self, request: Request) -> tuple[int, Finish]:
        """Draws, evaluates and emits; returns how many tokens, and why it ended."""
        sample = self._live.highest if self._arguments.sampler is None else self._arguments.sampler.sample
        emit, stop_when, enter = self._arguments.emit, self._arguments.stop_when, self._timings.enter
        for generated in range(request.max_tokens):
            enter("sampling")
            self.check()
            drawn = sample(self._live.view)
            self.check()
            token = self._token(drawn)
            if token in request.stop_tokens:
                return generated, Finish.STOP
            enter("decode_evaluation")
            self._evaluate(token)
            enter("callback")
            self.check()
            if emit is not None:
                emit(token)
            self.check()
            if stop_when is not None and stop_when():
                return generated + 1, Finish.STOP
        return request.max_tokens, Finish.LENGTH

    def _token(self, drawn: object) -> int:
        token, vocab_size = as_integer(drawn), self._conversation.vocab_size
        if token is None or not 0 <= token < vocab_size:
            raise SamplerError(f"the sampler returned {short(drawn)}, but a token is an integer in 0..{vocab_size - 1}")
        return token

    def _completed(self, request: Request) -> Commit:
        """Step 10, and what step 11 will store."""
        self._timings.enter("completion_snapshot")
        tokens = self._live.frozen_tokens()
        replaced: list[Snapshot] = []
        held = len(self._held)
        self._save(logits=True)
        if len(self._held) > held:
            replaced = [s for s in self._reused if s.tokens.size < tokens.size and s.tokens.size not in request.kept]
        return Commit(TokenView(tokens), self._conversation.committed.prefixes.after(self._held, replaced))

    def _save(self, *, logits: bool) -> None:
        """Holds a snapshot aside for the commit, if the limits allow one; any failure but an interrupt is swallowed."""
        if not self._conversation.limits.checkpoints:
            return
        with suppress(Exception):
            snapshot = self._snapshot(logits=logits)
            self._held.append(snapshot)
            self._reserved += snapshot.size
        self.check()

    def _snapshot(self, *, logits: bool) -> Snapshot:
        """A snapshot of the live state, once the budget has room for it beside what is reserved."""
        live = self._live
        checkpoint_bytes = decoder_bytes("checkpoint_bytes()", self._decoder.checkpoint_bytes())
        size = snapshot_bytes(live.length, live.logits.size * logits, checkpoint_bytes)
        self._conversation.committed.prefixes.make_room(size, self._reserved)
        tokens, values = live.frozen_tokens(), live.logits.copy() if logits else None
        self.check()
        return Snapshot(tokens, values, self._decoder.checkpoint(), size)

    def _recover(self, rollback: Snapshot, original: BaseException) -> None:
        """Puts the rollback snapshot back; `RestoreFailed`, and the latch left on, if the decoder cannot."""
        conversation = self._conversation
        conversation.latched = True
        failure: Exception | None = None
        try:
            self._decoder.restore(rollback.state)
        except Exception as error:
            failure = error
        finally:
            self._live.load(rollback)
            for snapshot in (rollback, *self._held):
                snapshot.release()
        if failure is not None:
            raise RestoreFailed(
                f"the decoder could not be restored ({failure!r}) after {original!r}: reset() is needed", original
            ) from failure
        conversation.latched = False
        conversation.unsettled = None
