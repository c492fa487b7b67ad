"""The machine's read bandwidth now, as the ceiling of a decode step: each token reads all weights once."""

from __future__ import annotations

import threading
import time
from typing import Any

import numba
import numpy as np

BYTES = 256 << 20


@numba.njit("int64(int64[::1])", nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _read(words: Any) -> int:
    total = 0
    for i in range(words.size):
        total += words[i]
    return total


def read_bandwidth(threads: int, rounds: int = 5) -> float:
    """Median GB/s at which `threads` threads together read a buffer larger than the caches."""
    parts = np.array_split(np.ones(BYTES // 8, np.int64), threads)
    speeds = []
    for _ in range(rounds):
        workers = [threading.Thread(target=_read, args=(part,)) for part in parts]
        began = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        speeds.append(BYTES / (time.perf_counter() - began) / 1e9)
    return float(np.median(speeds))
