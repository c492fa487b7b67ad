"""Run a model with every buffer ending at a page that cannot be touched: a script, run by test_guard_pages.py.

Kernels work on raw addresses, so a read or write past an end would go unnoticed in normal memory; here it ends the
process. What a kernel may read past an end is documented, and given: 64 bytes behind each packed tensor, and rows of
scratch that are rounded up to 16 floats.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from prism_core import engine, kv, open_model, weights
from prism_core.kernels import words
from prism_core.models import assembly

PAGE = mmap.PAGESIZE
SLACK = 64
libc = ctypes.CDLL(None, use_errno=True)
kept: list[Any] = []


def forbid(address: int) -> None:
    assert address % PAGE == 0
    assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), 0) == 0


def guarded(count: int) -> NDArray[np.uint8]:
    """`count` bytes of 0xFF (NaN, were they read as floats) that end at a forbidden page."""
    whole = -(-count // PAGE) * PAGE
    memory = mmap.mmap(-1, whole + PAGE)
    kept.append(memory)
    raw = np.frombuffer(memory, dtype=np.uint8)
    raw[:whole] = 0xFF
    forbid(raw.ctypes.data + whole)
    return raw[whole - count : whole]


class GuardedScratch(assembly.Scratch):
    """Each buffer ends at a page of its own."""

    def _place(self, key: object, size: int) -> None:
        end = -(-(self.nbytes + size) // PAGE) * PAGE
        self._at[key] = end - size
        self.nbytes = end + PAGE
        self.guards = [*getattr(self, "guards", []), end]


class GuardedProgram(assembly.Program):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for end in self._layout.guards:  # type: ignore[attr-defined]
            forbid(self._scratch.ctypes.data + end)


def guarded_address(self: weights.Weights, name: str) -> int:
    place = self.layout.places[name]
    copy = guarded(place.nbytes + SLACK)
    copy[: place.nbytes] = self._memory[place.offset : place.offset + place.nbytes]
    return int(copy.ctypes.data)


def guarded_decoder(model: Any) -> engine.ModelDecoder:
    decoder: engine.ModelDecoder = model.decoder()
    ids = guarded(decoder._ids.nbytes).view(np.int64)
    table = guarded(decoder._sequence.page_table.nbytes).view(np.int64)
    decoder._ids, decoder._sequence.page_table = ids, table
    decoder._crew.context[words.IDS], decoder._crew.context[words.PAGES] = ids.ctypes.data, table.ctypes.data
    return decoder


def put_up_guards(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(assembly, "Scratch", GuardedScratch)
    patch.setattr(assembly, "aligned", guarded)
    patch.setattr("prism_core.model.Program", GuardedProgram)
    patch.setattr(weights.Weights, "address", guarded_address)
    patch.setattr(kv, "aligned", guarded)
    patch.setattr(kv, "large", guarded)
    patch.setattr(kv, "SLAB_BYTES", 1)


def run(path: str, threads: int, *, exact: bool) -> None:
    """Compare a guarded decoder with a plain one."""
    with (
        open_model(path, threads=threads, exact=exact, context_tokens=320) as model,
        pytest.MonkeyPatch.context() as patch,
    ):
        plain = model.decoder()
        put_up_guards(patch)
        decoder = guarded_decoder(model)
        logits = guarded(4 * model.vocab_size).view(np.float32)
        wanted = np.empty(model.vocab_size, dtype=np.float32)
        tokens = [int(t) for t in np.random.default_rng(1).integers(0, model.tokenizer.vocab_size, 300)]
        for blocks in ([300], [1, 5, 129, 3]):
            for each in (plain, decoder):
                each.reset()
                at = 0
                for size in blocks:
                    each.ingest_block(tokens[at : at + size], lambda: None)
                    at += size
            saved = decoder.checkpoint()
            for _ in range(2):
                decoder.restore(saved)
                for token in (3, 7):
                    decoder.evaluate_into(token, logits)
            for token in (3, 7):
                plain.evaluate_into(token, wanted)
            assert np.array_equal(logits, wanted)


if __name__ == "__main__":
    for number, path in enumerate(sys.argv[2:]):
        print(path, file=sys.stderr, flush=True)  # the last name before a crash is the one that crashed
        run(path, 1 + number % 2, exact=sys.argv[1] == "exact")
        kept.clear()
    print("ok")
