"""The fixture of the Runtime's contract: a decoder over 8 tokens, a clock that operations can run out, and a trace.

The decoder's state is the list of its tokens; the logits are -1 except 1.0 at the sum of the state modulo 8. Every
operation is written into the trace when it has completed, and may then expire the clock, cancel, or raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from prism_core import Cancellation, Completion, Finish, Generation, Limits, Prefill, Runtime

VOCAB = 8
DEADLINE = 100.0
LIMITS = Limits(context_tokens=32, checkpoints=4, checkpoint_bytes=16_384)
ONE = Generation(max_tokens=1)


class Trace:
    """What happened, in order: `.` a check, and the operations.

    Once each: `after[n]` runs when operation n has completed, `instead[n]` when it is half done, and should raise;
    `at_check[n]` runs before check n reads the clock.
    """

    def __init__(self) -> None:
        self.entries: list[str] = []
        self.operations: list[str] = []
        self.now = 0.0
        self.after: dict[int, Callable[[], object]] = {}
        self.instead: dict[int, Callable[[], object]] = {}
        self.at_check: dict[int, Callable[[], object]] = {}
        self.checks = 0
        self.cancellation = Cancellation()

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]

    def clock(self) -> float:
        self.entries.append(".")
        self.checks += 1
        self.at_check.pop(self.checks - 1, _nothing)()
        return self.now

    def expire(self) -> None:
        self.now = DEADLINE

    def start(self) -> None:
        """The operation is half done."""
        self.instead.pop(len(self.operations), _nothing)()

    def done(self, name: str) -> None:
        """The operation has completed."""
        self.entries.append(name)
        self.operations.append(name)
        self.after.pop(len(self.operations) - 1, _nothing)()

    def __str__(self) -> str:
        return " ".join(self.entries)


def _nothing() -> None:
    pass


def raising(error: BaseException) -> Callable[[], None]:
    """An action that raises `error`."""

    def action() -> None:
        raise error

    return action


class FixtureDecoder:
    """Section 10's decoder. It advances before it fails, as a real one may."""

    identity = "fixture+v8.1"
    vocab_size = VOCAB

    def __init__(self, trace: Trace | None = None) -> None:
        self.trace = trace or Trace()
        self.state: list[int] = []
        self.restore_errors: dict[tuple[int, ...], BaseException] = {}
        self.reset_error: BaseException | None = None
        self.bad_logits: dict[int, float] = {}

    def checkpoint_bytes(self) -> int:
        return 4 * len(self.state)

    def reset(self) -> None:
        self.trace.start()
        if self.reset_error is not None:
            raise self.reset_error
        self.state = []
        self.trace.done("R")

    def ingest_block(self, tokens: Sequence[int], check: Callable[[], None]) -> None:
        for token in tokens:
            self.state.append(token)
            self.trace.start()
            self.trace.done(f"I{token}")

    def evaluate_into(self, token: int, logits: np.ndarray) -> None:
        assert np.isnan(logits).all(), "the logits were not invalidated"
        self.state.append(token)
        self.trace.start()
        logits[:] = -1.0
        logits[sum(self.state) % VOCAB] = 1.0
        for at, value in self.bad_logits.items():
            logits[at] = value
        self.trace.done(f"E{token}")

    def checkpoint(self) -> tuple[int, ...]:
        self.trace.start()
        saved = tuple(self.state)
        self.trace.done("C")
        return saved

    def restore(self, checkpoint: tuple[int, ...]) -> None:
        self.trace.start()
        if checkpoint in self.restore_errors:
            raise self.restore_errors[checkpoint]
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
        self.trace.start()
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
        self.trace.start()
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


class Scenario(NamedTuple):
    """One of the golden requests, with the ones before it, its trace and what it answers."""

    earlier: tuple[tuple[int, ...], ...]
    prompt: tuple[int, ...]
    trace: str
    completion: Completion
    history: list[int]
    options: Generation = ONE
    block: int = 1

    def prepare(self, **options: Any) -> Bench:
        """A bench on which the earlier requests have been made, with an empty trace."""
        bench = Bench(**options)
        for prompt in self.earlier:
            bench.ask(prompt)
        bench.trace.clear()
        bench.emitted.clear()
        return bench

    def ask(self, bench: Bench, **more: Any) -> Completion:
        return bench.ask(self.prompt, self.options, block=self.block, **more)

    @property
    def operations(self) -> list[str]:
        return [entry for entry in self.trace.split() if entry != "."]


_E = ((1,), (2, 3), (2, 3, 5), (1, 1, 3))
SCENARIOS = {
    "O1": Scenario(
        _E[:0], (1,), ". . . C . . . R . . . . E1 . . P . . . E1 . . emit1 . . . C .",
        Completion(1, 0, 1, Finish.LENGTH), [1, 1],
    ),
    "O2": Scenario(
        _E[:1], (2, 3), ". . . C . . . R . . . . I2 . . . E3 . . P . . . E5 . . emit5 . . . C .",
        Completion(2, 0, 1, Finish.LENGTH), [2, 3, 5],
    ),
    "O3": Scenario(
        _E[:2], (2, 3, 5), ". . . C . . . . P . . . E2 . . emit2 . . . C .",
        Completion(3, 3, 1, Finish.LENGTH), [2, 3, 5, 2],
    ),
    "O4": Scenario(
        _E[:3], (1, 1, 3), ". . . C . . . S . . . . E3 . . P . . . E5 . . emit5 . . . C .",
        Completion(3, 2, 1, Finish.LENGTH), [1, 1, 3, 5],
    ),
    "O5": Scenario(
        _E[:4], (2, 3), ". . . C . . . R . . . . I2 . . . E3 . . P . . . C .",
        Completion(2, 0, 0, Finish.STOP), [2, 3], options=Generation(1, (5,)),
    ),
    "O6": Scenario(
        _E[:0], (2, 3, 4, 5, 6, 7, 0),
        ". . . C . . . R . . . . I2 I3 . . . I4 I5 . . . I6 I7 . . . E0 . . P . . . E3 . . emit3 . . . C .",
        Completion(7, 0, 1, Finish.LENGTH), [2, 3, 4, 5, 6, 7, 0, 3], block=2,
    ),
}  # fmt: skip
