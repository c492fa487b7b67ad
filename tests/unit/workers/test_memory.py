"""A worker with a stated budget: what it allocates stays within it, however many conversations it has seen."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ops.bench.synthetic import qwen3
from prism_core.runtime import Generation, Prefill, Runtime
from workers.budget import plan
from workers.main import DEFAULT_OPENER, resolve

MIB = 1 << 20
CONTEXT = 2048
PREFIXES = 32


@pytest.fixture
def model(tmp_path: Path) -> Any:
    path = qwen3(tmp_path / "tiny.gguf", layers=3, kv_heads=4, context=CONTEXT)
    return resolve(DEFAULT_OPENER)(str(path), threads=1, context_tokens=CONTEXT)


def held() -> int:
    """Bytes of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return sum(int(status.partition(name)[2].split()[0]) for name in ("RssAnon:", "RssShmem:")) * 1024


def turns(seed: int, count: int) -> Iterator[list[int]]:
    """Prompts of all lengths; some go on from an earlier one, as a conversation's next turn does."""
    dice, seen = random.Random(seed), [[1]]
    for _ in range(count):
        head = dice.choice(seen) if dice.random() < 0.5 else []
        prompt = [*head, *(dice.randrange(4, 900) for _ in range(dice.randint(1, CONTEXT - 64 - len(head))))]
        if len(prompt) < CONTEXT - 100:
            seen.append(prompt)
        yield prompt


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_worker_never_exceeds_its_budget(model: Any):
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    decoder = model.decoder()
    budget = plan(model, decoder, memory_bytes=None, saved_prefixes=PREFIXES).memory_bytes + 24 * MIB
    made = plan(model, decoder, memory_bytes=budget, saved_prefixes=PREFIXES)
    assert made.memory_bytes == budget == made.stats()["memory_bytes"]
    runtime = Runtime(decoder, made.limits, retention="lru", checkpoint_ceiling=64)
    runtime.generate([1, 2, 3], Generation(2), prefill=Prefill(128))
    before, peaks, saved = held(), [0], 0
    for prompt in turns(seed, 60):
        runtime.generate(
            prompt,
            Generation(4),
            prefill=Prefill(128),
            emit=lambda _: peaks.append(held()),
            save_at=tuple({len(prompt) // 2} - {0}),
        )
        saved = max(saved, runtime.checkpoint_count)
    grown = max(peaks) - before
    print(f"budget {budget / MIB:.1f} MiB, grown by {grown / MIB:.1f} MiB, {saved} prefixes saved at once")
    assert saved > 4
    assert grown > 8 * MIB, "the test measures nothing"
    assert grown <= budget
