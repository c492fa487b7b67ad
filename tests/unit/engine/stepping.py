"""Driving a decoder in tests: token by token, or in any split of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism_core import Model, open_model
from prism_core.home import prism_home

Logits = NDArray[np.float32]
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3", "qwen35")


def tiny(data: Path, name: str, **options: Any) -> Model:
    """The fixture `tiny-<name>`."""
    return open_model(data / f"tiny-{name}" / f"tiny-{name}.gguf", **options)


def home_with_shared_caches(home: Path) -> Path:
    """A new PRISM_HOME that shares compiled kernels and models with the present one, but not packed weights."""
    home.mkdir()
    for name in ("numba", "models", "identity"):
        shared = prism_home() / name
        shared.mkdir(parents=True, exist_ok=True)
        (home / name).symlink_to(shared.resolve())
    return home


def no_check() -> None:
    """A `check` that never objects."""


def evaluate(decoder: Any, token: int) -> Logits:
    """Logits after one more token."""
    logits = np.full(decoder.vocab_size, np.nan, dtype=np.float32)
    decoder.evaluate_into(token, logits)
    return logits


def each(decoder: Any, ids: Sequence[int]) -> Logits:
    """Logits after each token, fed one at a time: float32 [len(ids), vocab]."""
    return np.stack([evaluate(decoder, token) for token in ids])


def after(decoder: Any, ids: Sequence[int], blocks: Sequence[int] = ()) -> Logits:
    """Logits after all of `ids`: all but the last are ingested, in blocks of the given sizes and then of 512."""
    at, body = 0, list(ids[:-1])
    for size in [*blocks, *[512] * (1 + len(body) // 512)]:
        block = body[at : at + size]
        if block:
            decoder.ingest_block(block, no_check)
        at += size
    return evaluate(decoder, ids[-1])


def random_ids(seed: int, count: int, vocab: int = 1000) -> list[int]:
    """Seeded token ids."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, count)]
