"""What sampling and the Runtime add to a decode step, where they run: between the steps of a real model.

    python -m ops.bench.runtime [--model FILE] [--tokens 400] [--sampler NAME ...] [--json FILE]

Short runs of `Runtime.generate` take turns with a bare loop of `evaluate_into` over the same tokens from the same
state, with each sampler in turn, so that all meet the same caches and the same load. Per sampler, as medians: a step of
the bare loop, the ratio of the Runtime's time per token to it, and the processor time from the end of one step to the
beginning of the next, which is what sampling and the Runtime take themselves; other load hardly touches that.
Without a model, or beside it: what the rollback snapshot of a conversation of 2,000 tokens costs.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from prism_core.runtime import Generation, Limits, Prefill, Runtime, Timings
from prism_core.sampling import Greedy, Sampler, TemperatureSampler

CONVERSATION_TOKENS = 2_000
VOCABULARY = 262_144
RUN = 9
"""Tokens of a run; the first one, which begins it, is not counted."""
ROUNDS = 7
SEED = 20261025


def _sampler(**options: Any) -> Callable[[], Sampler]:
    return lambda: TemperatureSampler(seed=SEED, **options)


SAMPLERS: dict[str, Callable[[], Sampler | None]] = {
    "none": lambda: None,
    "greedy": Greedy,
    "default": _sampler(),
    "penalties": _sampler(repetition_penalty=1.1, presence_penalty=0.2),
    "api": _sampler(top_k=0, top_p=1.0),
    "no top-k": _sampler(top_k=0),
    "hot": _sampler(top_k=0, top_p=1.0, temperature=2.0),
    "hot top-p": _sampler(top_k=0, top_p=0.9, temperature=2.0),
    "flat": _sampler(top_k=0, top_p=1.0, temperature=1e6),
    "top-k 5000": _sampler(top_k=5_000),
    "top-k 100000": _sampler(top_k=100_000),
}


@dataclass
class Measure:
    """One line of the result."""

    what: str
    value: float
    unit: str

    def __str__(self) -> str:
        return f"{self.what:58s}{self.value:12.3f} {self.unit}"


class Watched:
    """A decoder that notes when each evaluation ends, and this thread's processor time before and after it."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self.steps: list[tuple[float, float, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def evaluate_into(self, token: int, logits: Any) -> None:
        before = time.thread_time()
        self._decoder.evaluate_into(token, logits)
        self.steps.append((time.perf_counter(), before, time.thread_time()))

    def take(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The steps since the last time."""
        steps, self.steps = self.steps, []
        return np.array(steps)


@dataclass
class Times:
    """Seconds per token."""

    bare: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)


def in_place(model: Any, names: list[str], tokens: int) -> list[Measure]:
    """The ratio of the Runtime's time per token to that of a bare loop, for each sampler."""
    decoder = Watched(model.decoder())
    runtime = Runtime(decoder, Limits(model.context_tokens, 0, 1 << 40))
    samplers = {name: SAMPLERS[name]() for name in names}
    logits = np.empty(model.vocab_size, dtype=np.float32)
    times = {name: Times() for name in names}
    for _ in range(-(-tokens // (RUN - 1))):
        if len(runtime.tokens) + RUN * len(names) + 3 > model.context_tokens:
            runtime.reset()
        for name in names:
            one_run(runtime, decoder, samplers[name], logits, times[name])
    found = []
    for name, spent in times.items():
        step = median(spent.bare)
        found += [
            Measure(f"{name}: decode step", step * 1e3, "ms"),
            Measure(f"{name}: Runtime and sampling, ratio to the bare loop", median(spent.whole) / step, ""),
            Measure(f"{name}: between two steps", median(spent.between) * 1e6, "us"),
            Measure(f"{name}: between two steps, of a step", median(spent.between) / step * 100, "%"),
        ]
    return found


def one_run(runtime: Runtime, decoder: Watched, sampler: Sampler | None, logits: Any, times: Times) -> None:
    """The Runtime, then the bare loop, which ends in the same state."""
    if not runtime.tokens:
        runtime.generate([1, 2, 3], Generation(1))
    before, emitted = decoder.checkpoint(), list[int]()
    decoder.take()
    runtime.generate(runtime.tokens, Generation(RUN), sampler=sampler, emit=emitted.append)
    steps = decoder.take()
    decoder.restore(before)
    for token in emitted:
        decoder.evaluate_into(token, logits)
    bare = decoder.take()
    times.bare += np.diff(bare[:, 0]).tolist()
    times.whole += np.diff(steps[:, 0]).tolist()
    times.between += (steps[1:, 1] - steps[:-1, 2]).tolist()


class RowDecoder:
    """No state and no work."""

    identity, vocab_size = "row+bench", VOCABULARY

    def checkpoint_bytes(self) -> int:
        return 0

    def reset(self) -> None: ...

    def ingest_block(self, tokens: Any, check: Callable[[], None]) -> None: ...

    def evaluate_into(self, token: int, logits: Any) -> None:
        logits.fill(0.0)

    def checkpoint(self) -> None: ...

    def restore(self, checkpoint: None) -> None: ...


def rollback(decoder: Any, context_tokens: int) -> list[Measure]:
    """The rollback snapshot of a long conversation, beside its logits."""
    runtime = Runtime(decoder, Limits(context_tokens, 0, 1 << 40))
    length = min(CONVERSATION_TOKENS, context_tokens - 2 * ROUNDS - 2)
    runtime.generate([1] * length, Generation(1), prefill=Prefill(128))
    seconds = []
    for _ in range(ROUNDS):
        timings = Timings()
        runtime.generate(runtime.tokens, Generation(1), timings=timings)
        seconds.append(timings.rollback_snapshot)
    during: list[int] = []
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    runtime.generate(
        runtime.tokens, Generation(1), on_prefix=lambda _: during.append(tracemalloc.get_traced_memory()[0] - before)
    )
    tracemalloc.stop()
    name = f"rollback of {length} tokens, vocabulary {decoder.vocab_size}"
    return [
        Measure(f"{name}: time", median(seconds) * 1e3, "ms"),
        Measure(f"{name}: new memory beside its logits", (during[0] - 4 * decoder.vocab_size) / 1e6, "MB"),
    ]


def main(arguments: list[str] | None = None) -> list[Measure]:
    """Prints and returns the measures."""
    parser = argparse.ArgumentParser(description="Costs of the Runtime and the samplers.")
    parser.add_argument("--model", help="a GGUF file; without one, only the snapshot is measured")
    parser.add_argument("--tokens", type=int, default=400, help="of each sampler")
    parser.add_argument("--sampler", action="append", choices=SAMPLERS, help="may be repeated (default: all)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.model:
        from prism_core.model import open_model

        model = open_model(options.model, context_tokens=CONVERSATION_TOKENS + 100)
        measures = in_place(model, options.sampler or list(SAMPLERS), options.tokens)
        measures += rollback(model.decoder(), model.context_tokens)
    else:
        measures = rollback(RowDecoder(), CONVERSATION_TOKENS + 100)
    print(*measures, sep="\n")
    if options.json:
        options.json.write_text(json.dumps([vars(measure) for measure in measures], indent=1) + "\n")
    return measures


if __name__ == "__main__":
    main()
