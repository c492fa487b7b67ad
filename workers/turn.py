"""Executes one claimed turn on the worker's Runtime and brings it to its one end.

Invariant: the tokens in a request's log are the tokens of one uninterrupted generation, whichever workers made them: a
takeover goes on at token n+1 with the prompt extended by the emitted ids, the sampler at draw n+1, and the text decoder
and stop matcher replayed. A turn ends through `finish` once everything before its end event is stored, or is handed
back, or, when fenced, is dropped without another write.
Not promised: that a turn's work is done only once; only what the epoch admits to the log counts.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from broker import events
from broker.answers import Claim
from broker.spec import RequestSpec
from broker.store import WorkerStore
from prism_core.codec import CodecError
from prism_core.errors import (
    BudgetExceeded,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    PrismError,
    RestoreFailed,
    RuntimeFaulted,
)
from prism_core.runtime import Finish, Generation, Prefill, Runtime, Timings
from workers.cancellation import Halt, Progress, TurnCancellation
from workers.config import WorkerConfig
from workers.ending import Closer, Disposition, Ending, EventsRefused, State, patiently
from workers.flusher import Flusher
from workers.prompt import TurnPrompt, build
from workers.sampling import TurnSampler, sampler_for
from workers.text import TurnText

log = logging.getLogger(__name__)

INVALID = "invalid_request: "
INTERNAL = "internal_error: "
THOUGHT_TAIL = 10  # last tokens of a prompt that may spell <think> and white space
T = TypeVar("T")
LOCAL_TRIES = 2  # runs of one claim on a Runtime that had to be reset in between


@dataclass(frozen=True)
class TurnResult:
    """How a claim left this worker."""

    disposition: Disposition
    state: State | None = None
    reason: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0


class Turn:
    """One claim, from its spec to its end event. Not reusable."""

    def __init__(
        self,
        claim: Claim,
        *,
        model: Any,
        runtime: Runtime,
        store: WorkerStore,
        config: WorkerConfig,
        progress: Progress,
        outside: Callable[[], Halt | None] = lambda: None,
        abandoned: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`outside`: asked at every check for a reason to stop; `abandoned` ends even the wait for an absent broker."""
        self._claim, self._model, self._runtime, self._store = claim, model, runtime, store
        self._config, self._abandoned, self._clock = config, abandoned, clock
        self._deadline = clock() + max(0, claim.remaining_ms) / 1000
        self._cancellation = TurnCancellation(progress, outside)
        self._flusher = Flusher(
            store,
            claim,
            self._cancellation,
            buffer_events=config.buffer_events,
            buffer_s=config.buffer_s,
            clock=clock,
        )
        self._closer = Closer(store, claim, self._flusher, progress, abandoned)
        if claim.cancel is not None:
            self._cancellation.stop(Halt.CANCELLED, claim.cancel)
        self._ids = list(claim.emitted)
        self._text: TurnText | None = None
        self._timings = Timings()
        self._prompt_tokens = claim.prompt_tokens
        self._reused = 0
        self._thinking = False

    def run(self) -> TurnResult:
        """Generates and commits. Raises if the Runtime cannot be brought back or events are refused: exit then."""
        try:
            ending = self._attempts()
            disposition: Disposition = "lost"
            if isinstance(ending, Halt):
                disposition = self._closer.hand_back("preempted" if ending is Halt.PREEMPTED else "drain")
            elif ending is not None:
                disposition = self._closer.finish(ending, self._usage)
            if disposition == "lost" and self._cancellation.halt is Halt.BROKEN:
                # Still ours in the broker's eyes, so nobody else would end it: let this worker be given up, and the
                # turn be rescued, which counts its takes.
                raise EventsRefused(self._cancellation.detail)
            return self._result(disposition, ending if isinstance(ending, Ending) else None)
        finally:
            self._flusher.close()

    def look(self) -> None:
        """A hint came that the broker has news for this turn: ask it now. From any thread."""
        self._flusher.look()

    def cancel(self, request: str, reason: str) -> None:
        """Cancels this turn if it is `request`, as a client would. From any thread."""
        if request == self._claim.request:
            self._cancellation.stop(Halt.CANCELLED, reason)

    # --- generation ----------------------------------------------------------------------------------------------

    def _attempts(self) -> Ending | Halt | None:
        """An ending, or the reason to hand the turn back, or None when it is lost to this worker."""
        for again in range(LOCAL_TRIES):
            try:
                return self._generate()
            except Cancelled:
                return self._halted()
            except DeadlineExceeded:
                return self._ending("expired", "the deadline passed while the request was running")
            except (InvalidRequest, CodecError) as error:
                return self._ending("failed", INVALID + _line(error))
            except (RestoreFailed, RuntimeFaulted, BudgetExceeded) as error:
                log.error("runtime faulted", extra={"request": self._claim.request, "error": type(error).__name__})
                self._runtime.reset()
                if again + 1 == LOCAL_TRIES:
                    return self._ending("failed", INTERNAL + _line(error))
            except Exception as error:
                # The frames only: a message may quote the prompt.
                frames = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
                log.error(
                    "turn failed",
                    extra={"request": self._claim.request, "error": type(error).__name__, "frames": frames[-8:]},
                )
                return self._ending("failed", INTERNAL + _line(error))
        raise AssertionError("unreachable: the last try returns")

    def _halted(self) -> Ending | Halt | None:
        halt = self._cancellation.halt
        if halt in (Halt.PREEMPTED, Halt.DRAINED):
            return halt
        if halt in (Halt.FENCED, Halt.BROKEN) or self._flusher.is_dead:
            return None
        return self._ending("cancelled", self._cancellation.detail or "cancelled")

    def _generate(self) -> Ending:
        spec = self._claim.spec
        conversation = self._claim.conversation
        turns = self._read(lambda: self._store.transcript(conversation)) if conversation else []
        prompt = build(spec, self._model, turns)
        self._prompt_tokens = len(prompt.token_ids)
        self._thinking = spec.messages is not None and self._opens_thought(prompt.token_ids)
        given = self._given_text()
        text = self._text = TurnText(self._model.tokenizer.stream(), spec.stop)
        text.replay(self._ids, given)
        left = self._most(spec) - len(self._ids)
        if left <= 0 or text.stopped:
            self._started(0)
            reason = "stop" if text.stopped else "length"
        else:
            reason = self._run_runtime(prompt, text, left)
        self._flusher.tail(text.finish())
        ending = self._ending("done", reason)
        if conversation:
            ending.turn = prompt.commit(
                request=self._claim.request,
                model=self._model.identity,
                answer_ids=self._answer_ids(text),
                text=text.text,
                parent=turns[prompt.base - 1].digest if prompt.base else "",
            )
        return ending

    def _most(self, spec: RequestSpec) -> int:
        """Tokens that this turn may generate in all."""
        if spec.max_tokens is not None:
            return spec.max_tokens
        room = int(self._model.context_tokens) - self._prompt_tokens
        if room <= 0:
            raise InvalidRequest(
                f"prompt has {self._prompt_tokens} tokens, but context_tokens is {self._model.context_tokens}: "
                "no room for an answer"
            )
        return room

    def _run_runtime(self, prompt: TurnPrompt, text: TurnText, left: int) -> str:
        spec = self._claim.spec
        sampler = sampler_for(spec, self._ids)

        wait_for_room, put, push, ids = self._flusher.wait_for_room, self._flusher.token, text.push, self._ids
        check = self._check_deadline

        def emit(token: int) -> None:
            wait_for_room(check)
            ids.append(token)
            put(token, push(token), None if sampler is None else self._logprob(sampler))

        completion = self._runtime.generate(
            [*prompt.token_ids, *self._ids],
            Generation(max_tokens=left, stop_tokens=self._model.tokenizer.stop_tokens),
            prefill=Prefill(block_tokens=self._config.prefill_block_tokens),
            cancellation=self._cancellation,
            deadline=self._deadline,
            sampler=sampler,
            emit=emit,
            save_at=tuple(at for at in prompt.save_at if 0 < at < len(prompt.token_ids)),
            keep_saved=True,
            timings=self._timings,
            stop_when=(lambda: text.stopped) if spec.stop else None,
            on_prefix=self._started,
        )
        return "stop" if completion.finish is Finish.STOP else "length"

    def _started(self, reused_tokens: int) -> None:
        """The prefix is chosen: tell the readers before the prefill. Emitted ids count as no part of the prompt."""
        self._reused = min(reused_tokens, self._prompt_tokens)
        self._flusher.event(
            events.start(
                attempt=self._claim.attempt,
                worker=self._store.worker,
                prompt_tokens=self._prompt_tokens,
                reused_tokens=self._reused,
                thinking=self._thinking,
            )
        )

    def _opens_thought(self, prompt: Sequence[int]) -> bool:
        """Whether the template began the answer with `<think>`: its reader sees only what comes after the prompt."""
        tail = b"".join(bytes(self._model.tokenizer.token_bytes(token)) for token in prompt[-THOUGHT_TAIL:])
        return tail.rstrip().endswith(b"<think>")

    def _logprob(self, sampler: TurnSampler) -> dict[str, Any] | None:
        """The last draw's log-probabilities with each token's bytes, which a gateway without a tokenizer needs."""
        if sampler.last is None:
            return None
        name = self._model.tokenizer.token_bytes
        top = [[token, lp, bytes(name(token))] for token, lp in sampler.last["top"]]
        return {"lp": sampler.last["lp"], "b": bytes(name(self._ids[-1])), "top": top}

    def _given_text(self) -> str:
        """All text given out so far: by this object before its Runtime was reset, or by earlier attempts."""
        return self._text.text if self._text is not None else self._claim.emitted_text

    def _answer_ids(self, text: TurnText) -> list[int]:
        """The ids that stand for the answer's text: those generated, cut where a stop string cut the text."""
        if not text.stopped:
            return list(self._ids)
        tokenizer, shown = self._model.tokenizer, text.text
        for count in range(len(self._ids), -1, -1):
            kept = tokenizer.decode(self._ids[:count])
            if shown.startswith(kept):
                rest = shown[len(kept) :]
                return self._ids[:count] + (list(tokenizer.encode(rest, add_bos=False)) if rest else [])
        return list(self._ids)

    def _read(self, call: Callable[[], T]) -> T:
        """What the broker knows, waited for until the turn must stop."""

        def check() -> None:
            if self._cancellation.is_cancelled or self._abandoned():
                raise Cancelled("the turn was stopped while it waited for the broker")
            self._check_deadline()

        return patiently(call, check)

    def _check_deadline(self) -> None:
        if self._clock() >= self._deadline:
            raise DeadlineExceeded("the deadline passed while the turn waited for the broker")

    # --- what the end says ---------------------------------------------------------------------------------------

    def _ending(self, state: State, reason: str) -> Ending:
        return Ending(state, reason, self._ids, self._text.text if self._text is not None else "")

    def _usage(self) -> dict[str, int]:
        """Token counts over all attempts, and where this attempt's time went, in microseconds."""
        spent = self._timings
        phases = {
            "prefix_us": spent.rollback_snapshot + spent.prefix_preparation,
            "prefill_us": spent.prefill_ingestion + spent.prefill_evaluation,
            "decode_us": spent.decode_evaluation,
            "sampling_us": spent.sampler_copy + spent.sampling,
            "emit_us": spent.callback,
            "snapshot_us": spent.completion_snapshot,
            "flush_us": self._flusher.append_s,
        }
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": len(self._ids),
            "reused_tokens": self._reused,
            "queue_us": self._claim.queued_ms * 1000,
            "flushes": self._flusher.appends,
            **({"thinking": 1} if self._thinking else {}),
            **{name: round(seconds * 1e6) for name, seconds in phases.items()},
        }

    def _result(self, disposition: Disposition, ending: Ending | None = None) -> TurnResult:
        return TurnResult(
            disposition=disposition,
            state=ending.state if ending else None,
            reason=ending.reason if ending else "",
            tokens=len(self._ids),
            prompt_tokens=self._prompt_tokens,
            reused_tokens=self._reused,
        )


def _line(error: BaseException) -> str:
    """An error as one line: its own words for Prism's errors, else its type alone (a message may quote the prompt)."""
    if isinstance(error, PrismError):
        return " ".join(str(error).split())
    return f"the worker met an unexpected {type(error).__name__}; its log says where"
