"""What the tests of the look-up kernels share: the LUT coding read back, and matrices checked against float64."""

from __future__ import annotations

import numpy as np

from prism_core.gguf.types import TensorType
from prism_core.kernels.lut import BIT_OFFSETS, BITS_OFFSET, CODE_OFFSETS, HEADER, LUT, RECORD, SCALE, SCALES

from .weights import Matrix, encoded


class Records:
    """Encoded activations as numbers: `q` int64[tokens, records, 128], `levels` [.., 4], `scale` [..], `offsets`."""

    def __init__(self, act: np.ndarray, cols: int) -> None:
        count = -(-cols // 128)
        self.raw = np.ascontiguousarray(act[:, : count * RECORD]).reshape(len(act), count, RECORD)
        self.tables = self.raw[:, :, HEADER:].reshape(len(act), count, 32, 2, 16).astype(np.int64) * [[1], [32]]
        self.tables = self.tables.sum(3)
        """T(n) of every 4 values: int64[tokens, records, 32, 16]."""
        self.q = np.stack([self.tables[..., 1 << k] - self.tables[..., 0] for k in range(4)], -1)
        self.q = self.q.reshape(len(act), count, 128)
        self.levels = self._field(SCALES, 8, np.int16)
        self.scale = self._field(SCALE, 4, np.float32)[..., 0]
        self.bits = self._field(BITS_OFFSET, 4, np.int32)[..., 0]
        self.bit = self._field(BIT_OFFSETS, 16, np.int32)
        self.code = self._field(CODE_OFFSETS, 8, np.int32)
        self.cols = cols

    def _field(self, at: int, size: int, kind: type) -> np.ndarray:
        return np.ascontiguousarray(self.raw[:, :, at : at + size]).view(kind)

    def values(self) -> np.ndarray:
        """What the records stand for: float64[tokens, cols]."""
        scales = self.levels * self.scale.astype(np.float64)[..., None]
        return (self.q * np.repeat(scales, 32, -1)).reshape(len(self.raw), -1)[:, : self.cols]


def error(matrix: Matrix, act: np.ndarray) -> float:
    """The largest error of a product, relative to the sum of the magnitudes that it adds."""
    x, w = Records(act, matrix.cols).values(), matrix.values.astype(np.float64)
    exact, size = x @ w.T, np.abs(x) @ np.abs(w).T
    found = matrix.times(act)
    assert (found[:, matrix.rows :] == -7).all()
    return float((np.abs(found[:, : matrix.rows] - exact) / np.maximum(size, 1e-300)).max())


def activations(tokens: int, cols: int, rng: np.random.Generator) -> np.ndarray:
    """Encoded: normal values; then, where there are so many tokens, all-equal, zero, signed extremes and outliers."""
    x = rng.standard_normal((tokens, cols)).astype(np.float32)
    for token, special in enumerate(
        [127.0, -1.0, 0.0, rng.choice([-127.0, 127.0], cols), 10.0 ** rng.uniform(-4, 4, cols)], start=1
    ):
        if token < tokens:
            x[token] = special
    return encoded(LUT, x)


def set_scales(kind: TensorType, raw: np.ndarray, scales: np.ndarray) -> None:
    """Write the float16 scales of all blocks, in order."""
    blocks, at = raw.reshape(-1, kind.block_bytes), kind.scales[0]
    blocks[:, at : at + 2] = scales.astype(np.float16).reshape(-1, 1).view(np.uint8)


def splits_agree(matrix: Matrix, act: np.ndarray) -> None:
    """Whole, token by token, tile by tile, and in uneven runs of both: the same bits."""
    whole = matrix.times(act)
    tiles, tokens = matrix.family.tiles(matrix.rows), len(act)
    for tile_step, token_step in ((tiles, 1), (1, tokens), (2, 3), (3, 6)):
        parts = np.full_like(whole, -7)
        for token in range(0, tokens, token_step):
            for tile in range(0, tiles, tile_step):
                some = slice(token, min(token + token_step, tokens))
                matrix.times(act[some], (tile, min(tile + tile_step, tiles)), parts[some])
        assert (parts.view(np.uint32) == whole.view(np.uint32)).all(), (tile_step, token_step)
