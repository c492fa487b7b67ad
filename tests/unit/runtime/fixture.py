"""The fixture of the Runtime's contract: a decoder over 8 tokens, a clock that operations can run out, and a trace.

The decoder's state is the list of its tokens; the logits are -1 except 1.0 at the sum of the state modulo 8. Every
operation is written into the trace when it has completed, and may then expire the clock, cancel, or raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from prism_core import Cancellation, Completion, Generation, Limits, Prefill, Runtime

VOCAB = 8
DEADLINE = 100.0
LIMITS = Limits(context_tokens=32, checkpoints=4, checkpoint_bytes=16_384)
ONE = Generation(max_tokens=1)


class Trace:
    """What happened, in order: `.` a check, and the operations; `after[n]` runs when operation n has completed."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self.operations: list[str] = []
        self.now = 0.0
        self.after: dict[int, Callable[[], object]] = {}
        self.before: dict[str, Callable[[], object]] = {}
        self.cancellation = Cancellation()

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]

    def clock(self) -> float:
        self.entries.append(".")
        return self.now

    def expire(self) -> None:
        self.now = DEADLINE

    def start(self, name: str) -> None:
        """The operation begins: `before[name]` or `before[first letter]` may raise in its place."""
        action = self.before.get(name) or self.before.get(name[0])
        if action is not None:
            action()

    def done(self, name: str) -> None:
        """The operation has completed."""
        self.entries.append(name)
        self.operations.append(name)
        action = self.after.get(len(self.operations) - 1)
        if action is not None:
            action()

    def __str__(self) -> str:
        return " ".join(self.entries)


class FixtureDecoder:
    """Section 10's decoder. It advances before it fails, as a real one may."""

    identity = "fixture+v8.1"
    vocab_size = VOCAB

    def __init__(self, trace: Trace | None = None) -> None:
        self.trace = trace or Trace()
        self.state: list[int] = []
        self.restore_error: BaseException | None = None
        self.reset_error: BaseException | None = None
        self.bad_logits: dict[int, float] = {}
        self.live_checkpoints = 0

    def checkpoint_bytes(self) -> int:
        return 4 * len(self.state)

    def reset(self) -> None:
        self.trace.start("R")
        if self.reset_error is not None:
            raise self.reset_error
        self.state = []
        self.trace.done("R")

    def ingest_block(self, tokens: Sequence[int], check: Callable[[], None]) -> None:
        for token in tokens:
            self.state.append(token)
            self.trace.start(f"I{token}")
            self.trace.done(f"I{token}")

    def evaluate_into(self, token: int, logits: np.ndarray) -> None:
        assert np.isnan(logits).all(), "the logits were not invalidated"
        self.state.append(token)
        self.trace.start(f"E{token}")
        logits[:] = -1.0
        logits[sum(self.state) % VOCAB] = 1.0
        for at, value in self.bad_logits.items():
            logits[at] = value
        self.trace.done(f"E{token}")

    def checkpoint(self) -> tuple[int, ...]:
        self.trace.start("C")
        saved = tuple(self.state)
        self.trace.done("C")
        return saved

    def restore(self, checkpoint: tuple[int, ...]) -> None:
        self.trace.start("S")
        if self.restore_error is not None:
            raise self.restore_error
        self.state = list(checkpoint)
        self.trace.done("S")


class CountingSampler:
    """Greedy, with a state: how often it was asked. Its draws are in the trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.asked = 0
        self.history: list[int] = []

    def sample(self, logits: np.ndarray) -> int:
        self.asked += 1
        self.trace.start("P")
        token = int(np.argmax(logits))
        self.history.append(token)
        self.trace.done("P")
        return token

    def copy(self) -> CountingSampler:
        twin = CountingSampler(self.trace)
        twin.asked, twin.history = self.asked, list(self.history)
        return twin


class Bench:
    """A Runtime over the fixture, with its trace; `ask` passes every argument that makes an operation visible."""

    def __init__(self, limits: Limits = LIMITS, **options: Any) -> None:
        self.trace = Trace()
        self.decoder = FixtureDecoder(self.trace)
        self.runtime = Runtime(self.decoder, limits, clock=self.trace.clock, **options)
        self.sampler = CountingSampler(self.trace)
        self.emitted: list[int] = []
        self.trace.clear()

    def emit(self, token: int) -> None:
        self.emitted.append(token)
        self.trace.start(f"emit{token}")
        self.trace.done(f"emit{token}")

    def ask(self, prompt: Any, options: Generation = ONE, *, block: int = 1, **more: Any) -> Completion:
        arguments: dict[str, Any] = {
            "prefill": Prefill(block),
            "cancellation": self.trace.cancellation,
            "deadline": DEADLINE,
            "sampler": self.sampler,
            "emit": self.emit,
        }
        return self.runtime.generate(prompt, options, **(arguments | more))
