"""Digests of what the look-up kernels give for the types named as arguments, compiled for any processor.

Every buffer ends where a page without access begins: a read or write past it ends the process.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import sys

import numpy as np

from prism_core.gguf.types import TensorType
from prism_core.kernels.families import family_for
from prism_core.kernels.lut import LUT
from prism_core.kernels.target import target

SEED = 20261033
SHAPES = {"Q1_0": (150, 640), "Q1_0_V1": (70, 160), "Q2_0": (70, 448), "PQ2_0": (100, 384), "PTQ1_0": (9, 256)}
SHAPES |= {"TQ1_0": (64, 512), "TQ2_0": (65, 256)}
TOKENS = 6

_libc = ctypes.CDLL(None, use_errno=True)
_held: list[mmap.mmap] = []


def guarded(size: int) -> np.ndarray:
    """`size` bytes that end at a page without access."""
    pages = -(-size // mmap.PAGESIZE)
    area = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    _held.append(area)
    whole = np.frombuffer(area, np.uint8)
    guard = ctypes.c_void_p(whole.ctypes.data + pages * mmap.PAGESIZE)
    assert _libc.mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return whole[pages * mmap.PAGESIZE - size : pages * mmap.PAGESIZE]


def copied(array: np.ndarray) -> np.ndarray:
    room = guarded(array.nbytes)
    room[:] = array.reshape(-1).view(np.uint8)
    return room


def check(name: str) -> str:
    kind, (rows, cols) = TensorType[name], SHAPES[name]
    rng = np.random.default_rng(SEED)
    blocks = rng.integers(0, 256, (rows * cols // kind.block_size, kind.block_bytes), dtype=np.uint8)
    d = (rng.standard_normal((len(blocks), 1)) * 0.05).astype(np.float16)
    blocks[:, kind.scales[0] : kind.scales[0] + 2] = d.view(np.uint8)
    family = family_for(kind)
    packed = copied(family.pack(kind, copied(blocks), rows, cols))
    x = rng.standard_normal((TOKENS, cols)).astype(np.float32)
    values, stride = copied(x), -(-cols // 128) * 1088
    act = guarded(TOKENS * stride)
    LUT.encode(values.ctypes.data, cols, TOKENS, 4 * cols, act.ctypes.data, stride)
    out = guarded(4 * rows * TOKENS)
    family.matmul(
        packed.ctypes.data, rows, cols, 0, family.tiles(rows), act.ctypes.data, stride, TOKENS, out.ctypes.data, rows
    )  # fmt: skip
    row = guarded(4 * cols)
    family.row(packed.ctypes.data, rows, cols, rows - 1, row.ctypes.data)
    return hashlib.sha256(act.tobytes() + out.tobytes() + row.tobytes()).hexdigest()


if __name__ == "__main__":
    print("seed", SEED, target())
    for name in sys.argv[1:]:
        print(name, check(name))
