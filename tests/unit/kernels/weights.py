"""Random matrices of any tensor type, and the float64 definition that kernels are measured against."""

from __future__ import annotations

import numpy as np

from prism_core.gguf.dequantize import dequantize
from prism_core.gguf.types import TensorType
from prism_core.kernels import coding
from prism_core.kernels.families import Family, family_for


def random_blocks(kind: TensorType, rows: int, cols: int, rng: np.random.Generator, scale: float = 0.05) -> np.ndarray:
    """Blocks with every bit random but the float scales, which are normal with this deviation."""
    count = rows * cols // kind.block_size
    blocks = rng.integers(0, 256, (count, kind.block_bytes), dtype=np.uint8)
    values = rng.standard_normal((count, max(1, len(kind.scales)))) * scale
    for index, at in enumerate(kind.scales):
        column = np.ascontiguousarray(values[:, index])
        if kind.scale_form == "e8m0":
            blocks[:, at] = rng.integers(120, 130, count)
        elif kind is TensorType.F32:
            blocks[:] = column.astype(np.float32)[:, None].view(np.uint8)
        elif kind is TensorType.BF16:
            blocks[:] = column.astype(np.float32)[:, None].view(np.uint8)[:, 2:]
        else:
            blocks[:, at : at + 2] = column.astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(-1)


def encoded(kind: coding.Coding, x: np.ndarray) -> np.ndarray:
    """uint8[tokens, coding_bytes]."""
    tokens, cols = x.shape
    out = np.zeros((tokens, kind.coding_bytes(cols)), np.uint8)
    kind.encode(x.ctypes.data, cols, tokens, x.strides[0], out.ctypes.data, out.strides[0])
    return out


def decoded(kind: coding.Coding, act: np.ndarray, cols: int) -> np.ndarray:
    """What the encoded activations stand for, float64[tokens, cols]."""
    if kind.name == "f32":
        return np.ascontiguousarray(act[:, : 4 * cols]).view(np.float32).astype(np.float64)
    parted = kind is coding.A8_PARTED
    size = coding.PARTED_RECORD if parted else coding.A8_RECORD
    records = np.ascontiguousarray(act[:, : cols // 32 * size]).reshape(len(act), -1, size)
    scale = np.ascontiguousarray(records[..., coding.A8_SCALE : coding.A8_SCALE + 4]).view(np.float32)
    q = records[..., :32].view(np.int8)
    if parted:
        q = np.where(records[..., coding.PARTED_SIGNS :].view(np.int8), -q, q)
    return (q * scale.astype(np.float64)).reshape(len(act), cols)


class Matrix:
    """A packed matrix with its exact values."""

    def __init__(self, kind: TensorType, raw: np.ndarray, rows: int, cols: int) -> None:
        self.family: Family = family_for(kind)
        self.rows, self.cols = rows, cols
        self.values = dequantize(kind, raw, rows * cols).reshape(rows, cols)
        self.packed = self.family.pack(kind, raw, rows, cols)
        assert self.packed.nbytes == self.family.packed_bytes(kind, rows, cols)

    def times(self, act: np.ndarray, tiles: tuple[int, int] | None = None, out: np.ndarray | None = None) -> np.ndarray:
        """float32[tokens, rows + 3]: products, and three guard values of -7 after each token's rows."""
        if out is None:
            out = np.full((len(act), self.rows + 3), -7.0, np.float32)
        begin, end = tiles or (0, self.family.tiles(self.rows))
        self.family.matmul(
            self.packed.ctypes.data, self.rows, self.cols, begin, end,
            act.ctypes.data, act.strides[0], len(act), out.ctypes.data, out.strides[0] // 4,
        )  # fmt: skip
        return out

    def row(self, index: int) -> np.ndarray:
        out = np.full(self.cols + 2, -7.0, np.float32)
        self.family.row(self.packed.ctypes.data, self.rows, self.cols, index, out.ctypes.data)
        assert (out[self.cols :] == -7).all()
        return out[: self.cols]

    def error(self, act: np.ndarray) -> float:
        """The largest error of a product, relative to the sum of the magnitudes that it adds."""
        x = decoded(self.family.coding, act, self.cols)
        w = self.values.astype(np.float64)
        exact, size = x @ w.T, np.abs(x) @ np.abs(w).T
        return float((np.abs(self.times(act)[:, : self.rows] - exact) / np.maximum(size, 1e-300)).max())
