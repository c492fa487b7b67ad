"""Draw with every buffer beside pages that cannot be touched: a script, run by test_guarded_draws.py.

The kernel works on raw addresses; what it read or wrote past an end, or before a beginning, ends the process here. Each
token is compared with that of the full order, in whatever form of the kernel the environment asks for.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import numpy as np
import pytest

from prism_core import temperature
from prism_core.penalties import Penalties

from . import exact
from .test_drawing import KINDS

PAGE = mmap.PAGESIZE
SIZES = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 1000, 1023, 1025, 4095, 4096, 4097, 4111, 4609, 9001, 20_001]
ASKED = [(0, 1.0, 0.0, 1.0), (0, 0.95, 0.0, 1.0), (20, 0.9, 0.0, 0.7), (700, 0.9, 1e-3, 1.0), (0, 0.5, 1e-6, 2.0)]
libc = ctypes.CDLL(None, use_errno=True)


class Guards:
    """Gives memory between two forbidden pages, at its end or at its beginning, and keeps it."""

    def __init__(self, *, at_end: bool) -> None:
        self._at_end = at_end
        self._kept: list[mmap.mmap] = []

    def memory(self, count: int, dtype: Any, fill: int = 0xFF) -> np.ndarray:
        size = count * np.dtype(dtype).itemsize
        whole = max(1, -(-size // PAGE)) * PAGE
        self._kept.append(mmap.mmap(-1, whole + 2 * PAGE))
        raw = np.frombuffer(self._kept[-1], dtype=np.uint8)
        raw[PAGE : PAGE + whole] = fill
        for address in (raw.ctypes.data, raw.ctypes.data + PAGE + whole):
            assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), 0) == 0
        begin = PAGE + whole - size if self._at_end else PAGE
        return raw[begin : begin + size].view(dtype)

    def zeros(self, count: int, dtype: Any) -> np.ndarray:
        return self.memory(count, dtype, 0)

    def plan(self, *arguments: Any) -> temperature.Plan:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(np, "empty", self.memory)
            patch.setattr(np, "zeros", self.zeros)
            return temperature.Plan(*arguments)


def check(size: int, kind: str, *, at_end: bool) -> None:
    rng, guards = np.random.default_rng(size), Guards(at_end=at_end)
    logits = guards.memory(size, np.float32)
    logits[:] = KINDS[kind](rng, size).astype(np.float32)
    ids = guards.memory(min(size, 2), np.int64)
    ids[:] = (size - 1, 0)[: ids.size]
    offsets = guards.memory(ids.size, np.float64)
    offsets[:] = 0.5
    lowered = np.array(logits)
    lowered[ids] = (lowered[ids].astype(np.float64) - 0.5).astype(np.float32)
    for top_k, top_p, min_p, degree in ASKED:
        uniform = float(rng.random())
        asked = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": degree}
        for drawn, seen in ((-1, logits), (ids.size, lowered)):
            plan = guards.plan(size, top_k, top_p, min_p, degree, Penalties(1.0, 0.5 if drawn > 0 else 0.0, 0.0))
            addresses = (logits.ctypes.data, size, drawn, ids.ctypes.data, offsets.ctypes.data)
            token = plan.draw(plan.address, *addresses, uniform)
            assert token == exact.draw(np.array(seen), uniform, **asked), (size, kind, asked, drawn)


if __name__ == "__main__":
    for size in SIZES:
        for kind in KINDS:
            print(size, kind, file=sys.stderr, flush=True)  # the last before a crash is the one that crashed
            for at_end in (True, False):
                check(size, kind, at_end=at_end)
    print("ok")
