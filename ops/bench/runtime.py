"""What the Runtime and the samplers cost beside the decoder, and what a rollback snapshot costs.

    python -m ops.bench.runtime [--model FILE] [--tokens 200] [--json FILE]

Without a model the decoder copies one row of random logits, at the vocabularies of SmolLM2 and gemma-3, and CPU time
beside it is printed per token: Runtime alone (greedy by default) and with each sampler. With a model, the same from
the Runtime's own timings as a share of a decode step. A rollback snapshot is measured on a conversation of 2,000 tokens
(or the model's context): seconds, and bytes of new memory that numpy and Python allocate for it.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from prism_core.runtime import Generation, Limits, Prefill, Runtime, Timings
from prism_core.sampling import Greedy, Sampler, TemperatureSampler

VOCABULARIES = (49_152, 262_144)
CONVERSATION_TOKENS = 2_000
ROUNDS = 7
SEED = 20261025
SAMPLERS: dict[str, Callable[[], Sampler | None]] = {
    "none": lambda: None,
    "greedy": Greedy,
    "default": lambda: TemperatureSampler(seed=SEED),
    "penalties": lambda: TemperatureSampler(seed=SEED, repetition_penalty=1.1, presence_penalty=0.2),
    "no top-k": lambda: TemperatureSampler(seed=SEED, top_k=0),
}


@dataclass
class Measure:
    """One line of the result."""

    what: str
    value: float
    unit: str

    def __str__(self) -> str:
        return f"{self.what:58s}{self.value:12.3f} {self.unit}"


class RowDecoder:
    """No state; its logits are always the same, and the CPU time it takes is known."""

    identity = "row+bench"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._row = (np.random.default_rng(SEED).standard_normal(vocab_size) * 4).astype(np.float32)
        self.spent_s = 0.0

    def checkpoint_bytes(self) -> int:
        return 0

    def reset(self) -> None:
        pass

    def ingest_block(self, tokens: Any, check: Callable[[], None]) -> None:
        pass

    def evaluate_into(self, token: int, logits: Any) -> None:
        start = time.thread_time()
        np.copyto(logits, self._row)
        self.spent_s += time.thread_time() - start

    def checkpoint(self) -> None:
        pass

    def restore(self, checkpoint: None) -> None:
        pass


def per_token(vocab_size: int, tokens: int) -> list[Measure]:
    """CPU microseconds per token beside the decoder, the least of some rounds."""
    found = []
    for name, make in SAMPLERS.items():
        times = []
        for _ in range(ROUNDS):
            decoder = RowDecoder(vocab_size)
            runtime = Runtime(decoder, Limits(tokens + 1, 0, 1 << 30))
            start = time.thread_time()
            runtime.generate([1], Generation(tokens), sampler=make(), emit=lambda _: None, deadline=1e12)
            times.append((time.thread_time() - start - decoder.spent_s) / tokens)
        found.append(
            Measure(f"vocabulary {vocab_size}, sampler {name}: beside the decoder", min(times) * 1e6, "us/token")
        )
    return found


def shares(model: Any, tokens: int) -> list[Measure]:
    """Milliseconds of a real decode step, and what sampling and all the rest of the Runtime add to it."""
    found = []
    for name, make in SAMPLERS.items():
        steps, added, sampled = [], [], []
        runtime = Runtime(model.decoder(), Limits(model.context_tokens, 0, 1 << 40))
        for _ in range(ROUNDS):
            timings = Timings()
            start = time.perf_counter()
            runtime.generate([1, 2, 3], Generation(tokens), sampler=make(), timings=timings, emit=lambda _: None)
            whole = time.perf_counter() - start
            phases = {phase.name: getattr(timings, phase.name) for phase in fields(timings) if phase.init}
            decoding = phases["decode_evaluation"]
            steps.append(decoding / tokens * 1e3)
            sampled.append(phases["sampling"] / decoding * 100)
            prefill = phases["prefill_ingestion"] + phases["prefill_evaluation"] + phases["rollback_snapshot"]
            added.append((whole - decoding - prefill) / decoding * 100)
        found.append(Measure(f"{name}: decode step", median(steps), "ms"))
        found.append(Measure(f"{name}: sampling, of a decode step", median(sampled), "%"))
        found.append(Measure(f"{name}: all beside the decoder, of a decode step", median(added), "%"))
    return found


def rollback(decoder: Any, context_tokens: int) -> list[Measure]:
    """The rollback snapshot of a long conversation, beside its logits."""
    limits = Limits(context_tokens, 0, 1 << 40)
    runtime = Runtime(decoder, limits)
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
    parser.add_argument("--model", help="a GGUF file; without one, a decoder that costs nothing")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.model:
        from prism_core.model import open_model

        model = open_model(options.model, context_tokens=CONVERSATION_TOKENS + 100)
        measures = shares(model, options.tokens) + rollback(model.decoder(), model.context_tokens)
    else:
        measures = [measure for size in VOCABULARIES for measure in per_token(size, options.tokens)]
        measures += [one for size in VOCABULARIES for one in rollback(RowDecoder(size), CONVERSATION_TOKENS + 100)]
    print(*measures, sep="\n")
    if options.json:
        options.json.write_text(json.dumps([vars(measure) for measure in measures], indent=1) + "\n")
    return measures


if __name__ == "__main__":
    main()
