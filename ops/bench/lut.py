"""`python -m ops.bench.lut`: the table look-up kernels against the memory and the arithmetic of this machine.

Cold: weights of a few hundred MB, read once, as a decoder step does; given as GB/s of weights and as a share of plainly
reading the same bytes, measured in the same round. Warm: many tokens over a few tiles, in 10^9 multiply-adds a second.
Every round measures all cases once; the table gives medians and, for shares, the range.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from prism_core.gguf.types import TensorType
from prism_core.kernels import simd
from prism_core.kernels.families import Family, family_for
from prism_core.kernels.jit import kernel
from prism_core.kernels.lut import LUT
from prism_core.kernels.lut_tile import SCALES_BYTES, TILE_ROWS

KINDS = ("Q1_0", "PQ2_0", "Q2_0", "TQ2_0", "Q1_0_V1")
WARM_TILES = 32
SEED = 20261101


@kernel("void(int64, int64, int64)")
def read(address: Any, count: Any, out: Any) -> None:
    """Add up `count` bytes (a multiple of 256) as fast as they come."""
    a = b = c = d = simd.splat_i32x16(0)
    for at in range(address, address + count, 256):
        a = simd.add(a, simd.as_i32x16(simd.load_i8x64(at)))
        b = simd.add(b, simd.as_i32x16(simd.load_i8x64(at + 64)))
        c = simd.add(c, simd.as_i32x16(simd.load_i8x64(at + 128)))
        d = simd.add(d, simd.as_i32x16(simd.load_i8x64(at + 192)))
    simd.store(out, simd.add(simd.add(a, b), simd.add(c, d)))


def aligned(size: int) -> np.ndarray:
    """`size` bytes of zeros on a cache line."""
    room = np.zeros(size + 64, np.uint8)
    begin = -room.ctypes.data % 64
    return room[begin : begin + size]


def seconds(parts: list[Callable[[], Any]]) -> float:
    """How long the parts take together, each on a thread of its own but the first."""
    others = [threading.Thread(target=part) for part in parts[1:]]
    began = time.perf_counter()
    for other in others:
        other.start()
    parts[0]()
    for other in others:
        other.join()
    return time.perf_counter() - began


@dataclass
class Case:
    """One type and width: random weights, encoded activations, and what was measured of them."""

    kind: TensorType
    cols: int
    megabytes: int
    tokens: int

    def __post_init__(self) -> None:
        self.family: Family = family_for(self.kind)
        tile = self.family.packed_bytes(self.kind, TILE_ROWS, self.cols)
        self.tiles = (self.megabytes << 20) // tile
        self.rows, self.size = self.tiles * TILE_ROWS, self.tiles * tile
        rng = np.random.default_rng(SEED)
        self.weights = aligned(self.size)
        self.weights[:] = np.frombuffer(rng.bytes(self.size), np.uint8)
        blocks = self.weights.reshape(-1, tile // (self.cols // self.kind.block_size))
        blocks[:, 1:SCALES_BYTES:2] = 0x28 | (blocks[:, 1:SCALES_BYTES:2] & 0x83)  # d of 0.03 .. 0.06, either sign
        x = rng.standard_normal((self.tokens, self.cols)).astype(np.float32)
        self.stride = LUT.coding_bytes(self.cols)
        self.act = aligned(self.stride * self.tokens)
        LUT.encode(x.ctypes.data, self.cols, self.tokens, x.strides[0], self.act.ctypes.data, self.stride)
        self.out = aligned(4 * max(self.rows, self.tokens * WARM_TILES * TILE_ROWS))
        self.cold: list[float] = []
        self.stream: list[float] = []
        self.warm: list[float] = []

    def _product(self, begin: int, end: int, rows: int, tokens: int) -> Callable[[], Any]:
        w, act, out = self.weights.ctypes.data, self.act.ctypes.data, self.out.ctypes.data
        return lambda: self.family.matmul(w, rows, self.cols, begin, end, act, self.stride, tokens, out, rows)

    def measure(self, threads: int) -> None:
        """One round."""
        ends = [self.tiles * i // threads for i in range(threads + 1)]
        tile = self.size // self.tiles
        sinks = [aligned(64) for _ in range(threads)]

        def reader(i: int) -> Callable[[], Any]:
            begin, count = ends[i] * tile, (ends[i + 1] - ends[i]) * tile // 256 * 256
            return lambda: read(self.weights.ctypes.data + begin, count, sinks[i].ctypes.data)

        self.stream.append(self.size / seconds([reader(i) for i in range(threads)]) / 1e9)
        products = [self._product(ends[i], ends[i + 1], self.rows, 1) for i in range(threads)]
        self.cold.append(self.size / seconds(products) / 1e9)
        cuts = [WARM_TILES * i // threads for i in range(threads + 1)]
        rows = WARM_TILES * TILE_ROWS
        products = [self._product(cuts[i], cuts[i + 1], rows, self.tokens) for i in range(threads)]
        self.warm.append(rows * self.cols * self.tokens / seconds(products) / 1e9)

    def line(self) -> str:
        share = sorted(a / b for a, b in zip(self.cold, self.stream, strict=True))
        return (
            f"{self.kind.name:8} {self.cols:6}  {median(self.stream):6.1f} {median(self.cold):6.1f}   "
            f"{median(share):5.0%} ({share[0]:4.0%} .. {share[-1]:4.0%})  "
            f"{median(self.warm):7.0f} (best {max(self.warm):.0f})"
        )


def encoding_us(cols: int, rounds: int) -> float:
    """Median microseconds to encode one vector, of 64 at a time."""
    x = np.random.default_rng(SEED).standard_normal((64, cols)).astype(np.float32)
    stride = LUT.coding_bytes(cols)
    out = aligned(64 * stride)
    times = []
    for _ in range(5 * rounds):
        began = time.perf_counter()
        LUT.encode(x.ctypes.data, cols, 64, x.strides[0], out.ctypes.data, stride)
        times.append((time.perf_counter() - began) / 64 * 1e6)
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=[*KINDS, "PTQ1_0", "TQ1_0"])
    parser.add_argument("--cols", nargs="+", type=int, default=[2048, 6144])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    cases = [
        Case(TensorType[kind], cols, options.megabytes, options.tokens)
        for cols in options.cols
        for kind in options.kinds
    ]
    for case in cases:
        case.measure(options.threads)
        for times in (case.cold, case.stream, case.warm):
            times.clear()
    for _ in range(options.rounds):
        for case in cases:
            case.measure(options.threads)
    print(
        f"{options.threads} thread(s), {options.rounds} rounds; GB/s of weights read once, "
        f"GMAC/s of {options.tokens} tokens"
    )
    print("type       cols    read product   share of reading      GMAC/s")
    for case in cases:
        print(case.line())
    for cols in options.cols:
        print(f"encoding {cols} values: {encoding_us(cols, options.rounds):.2f} us")


if __name__ == "__main__":
    main()
