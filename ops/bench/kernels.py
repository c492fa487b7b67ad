"""Matrix kernels by family: bytes per second against reading memory, products per second, packing, compilation.

    python -m ops.bench.kernels [--types Q4_1,Q8_0] [--cols 2048] [--rounds 5] [--threads 1,2] [--json FILE]

In each round memory is read once and every family measured once, so that the shares of the bandwidth are of one moment
of the machine; medians over the rounds are printed, the best in brackets. "decode" streams `--mib` of packed weights
that no cache holds, "prefill" multiplies a matrix of 2048 rows by 128 tokens. Weights are random bits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ops.bench.stream import read_bandwidth
from prism_core.gguf.types import TensorType
from prism_core.kernels import jit
from prism_core.kernels.families import family_for

TYPES = "F32 F16 Q8_0 Q5_0 Q4_0 Q4_1 IQ4_NL MXFP4 Q6_K Q5_K Q4_K Q3_K Q2_K Q1_0 Q2_0 PQ2_0 PTQ1_0"
PREFILL_TOKENS, PREFILL_ROWS = 128, 2048
SEED = 20261024


def aligned(size: int) -> np.ndarray:
    """uint8[size] of zeros at a multiple of 64."""
    space = np.zeros(size + 64, np.uint8)
    start = -space.ctypes.data % 64
    return space[start : start + size]


class Subject:
    """One family with a matrix too large for the caches, and what was measured of it."""

    def __init__(self, kind: TensorType, cols: int, mib: int) -> None:
        self.kind, self.cols = kind, cols
        self.family = family_for(kind)
        self.rows = int((mib << 20) / kind.nbytes(cols)) // 64 * 64
        began = len(jit.compiled)
        self.family.matmul_address()
        self.family.row_address()
        self.family.coding.encode.warm()
        self.compile_s = sum(seconds for _, seconds in jit.compiled[began:])
        rng = np.random.default_rng(SEED)
        piece = rng.integers(0, 100, (64, kind.nbytes(cols)), dtype=np.uint8)
        raw = np.tile(piece, (self.rows // 64, 1)).reshape(-1)
        start = time.perf_counter()
        packed = self.family.pack(kind, raw, self.rows, cols)
        self.pack_gb_s = raw.size / (time.perf_counter() - start) / 1e9
        self.extra = packed.size / raw.size - 1
        self.weights = aligned(packed.size)
        self.weights[:] = packed
        size = self.family.coding.coding_bytes(cols)
        self.act = aligned(size * PREFILL_TOKENS).reshape(PREFILL_TOKENS, size)
        x = rng.standard_normal((PREFILL_TOKENS, cols)).astype(np.float32)
        self.family.coding.encode(x.ctypes.data, cols, PREFILL_TOKENS, 4 * cols, self.act.ctypes.data, size)
        self.out = np.zeros((PREFILL_TOKENS, self.rows), np.float32)
        self.decode: dict[int, list[float]] = {}
        self.prefill: dict[int, list[float]] = {}

    def _run(self, rows: int, tokens: int, threads: int) -> float:
        """Seconds for `threads` threads that share the tiles of the first `rows` rows."""
        tiles = self.family.tiles(rows)
        cuts = [tiles * part // threads // 4 * 4 for part in range(threads)] + [tiles]
        address, out_stride = self.weights.ctypes.data, self.rows

        def part(begin: int, end: int) -> None:
            self.family.matmul(
                address, rows, self.cols, begin, end,
                self.act.ctypes.data, self.act.strides[0], tokens, self.out.ctypes.data, out_stride,
            )  # fmt: skip

        began = time.perf_counter()
        together([lambda begin=begin, end=end: part(begin, end) for begin, end in itertools.pairwise(cuts)])
        return time.perf_counter() - began

    def measure(self, threads: int) -> None:
        seconds = self._run(self.rows, 1, threads)
        self.decode.setdefault(threads, []).append(self.weights.size / seconds / 1e9)
        rows = min(PREFILL_ROWS, self.rows)
        seconds = self._run(rows, PREFILL_TOKENS, threads)
        self.prefill.setdefault(threads, []).append(rows * self.cols * PREFILL_TOKENS / seconds / 1e9)


def together(work: Sequence[Callable[[], None]]) -> None:
    """Run all at once, the first on this thread."""
    others = [threading.Thread(target=each) for each in work[1:]]
    for other in others:
        other.start()
    work[0]()
    for other in others:
        other.join()


def table(subjects: list[Subject], streams: dict[int, list[float]]) -> str:
    """A Markdown table of medians, with the best in brackets."""
    head = ["type", "extra", "pack GB/s", "compile s"]
    for threads in streams:
        head += [f"decode GB/s, {threads} thr", "of read", f"prefill GMAC/s, {threads} thr"]
    lines = [head, ["---"] * len(head)]
    for each in subjects:
        cells = [each.kind.name, f"{each.extra:.1%}", f"{each.pack_gb_s:.2f}", f"{each.compile_s:.2f}"]
        for threads, reads in streams.items():
            decode, prefill = each.decode[threads], each.prefill[threads]
            share = median(ours / read for ours, read in zip(decode, reads, strict=True))
            cells += [f"{median(decode):.1f} ({max(decode):.1f})", f"{share:.0%}"]
            cells.append(f"{median(prefill):.0f} ({max(prefill):.0f})")
        lines.append(cells)
    rows = ["| " + " | ".join(line) + " |" for line in lines]
    for threads, reads in streams.items():
        rows.append(f"\nreading memory, {threads} thr: {median(reads):.1f} GB/s (best {max(reads):.1f})")
    return "\n".join(rows)


def as_json(subjects: list[Subject], streams: dict[int, list[float]]) -> dict[str, Any]:
    families = {
        each.kind.name: {
            "extra": each.extra,
            "pack_gb_s": each.pack_gb_s,
            "compile_s": each.compile_s,
            "decode_gb_s": each.decode,
            "prefill_gmac_s": each.prefill,
        }
        for each in subjects
    }
    return {"read_gb_s": streams, "families": families}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the matrix kernels of every family")
    parser.add_argument("--types", default=TYPES.replace(" ", ","), help="comma-separated tensor types")
    parser.add_argument("--cols", type=int, default=2048, help="columns, a multiple of 256")
    parser.add_argument("--mib", type=int, default=128, help="size of the matrix that is streamed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", default="1,2", help="comma-separated numbers of threads")
    parser.add_argument("--json", type=Path, help="write every measurement here as well")
    chosen = parser.parse_args(arguments)
    subjects = []
    for name in chosen.types.split(","):
        subjects.append(Subject(TensorType[name], chosen.cols, chosen.mib))
    threads = [int(number) for number in chosen.threads.split(",")]
    streams: dict[int, list[float]] = {number: [] for number in threads}
    for _ in range(chosen.rounds):
        for number in threads:
            streams[number].append(read_bandwidth(number, rounds=1))
            for each in subjects:
                each.measure(number)
    print(table(subjects, streams))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(as_json(subjects, streams), indent=1))


if __name__ == "__main__":
    main()
