"""The machine's read bandwidth now, as the ceiling of a decode step: each token reads all weights once.

One sequential reader does not fill a core's path to memory: a few that are far apart read up to a third more. So a
thread's part is read as one, two, three and four streams, and the best of them counts.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from prism_core.kernels import simd
from prism_core.kernels.jit import kernel

BYTES = 256 << 20


def _reader(streams: int) -> Any:
    @kernel("void(int64, int64, int64)", name=f"read_{streams}")
    def read(start: Any, size: Any, out: Any) -> None:
        """Read `size` bytes, a line from each of as many equal parts in turn; what is there goes into 32 bytes."""
        apart = size // streams // 64 * 64
        low, high = simd.splat_i32x8(0), simd.splat_i32x8(0)
        for line in range(start, start + apart, 64):
            for stream in range(streams):
                low = simd.add(low, simd.load_i32x8(line + stream * apart))
                high = simd.add(high, simd.load_i32x8(line + stream * apart + 32))
        simd.store(out, simd.add(low, high))

    return read


_READERS = [_reader(streams) for streams in (1, 2, 3, 4)]


def _seconds(parts: list[Any], reader: Any) -> float:
    def work(part: Any) -> None:
        out = np.empty(32, np.uint8)
        reader(part.ctypes.data, part.nbytes, out.ctypes.data)

    workers = [threading.Thread(target=work, args=(part,)) for part in parts]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - began


def read_bandwidth(threads: int, rounds: int = 5) -> float:
    """Median GB/s at which `threads` threads together read a buffer larger than the caches."""
    for reader in _READERS:
        reader.warm()
    parts = np.array_split(np.ones(BYTES // 8, np.int64), threads)
    speeds = [BYTES / min(_seconds(parts, reader) for reader in _READERS) / 1e9 for _ in range(rounds)]
    return float(np.median(speeds))
