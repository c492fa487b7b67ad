"""The LUT coding: its tables and numbers against their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from prism_core.kernels.coding import A8, A8_RECORD
from prism_core.kernels.lut import LEVELS, LUT, RECORD

from .lut_weights import Records
from .weights import decoded, encoded

SEED = 20261030
COLUMNS = (32, 64, 96, 128, 160, 1024, 2080)


def vectors(cols: int, tokens: int = 7) -> np.ndarray:
    """Normal, zero, tiny, huge, extreme and uneven vectors."""
    rng = np.random.default_rng(SEED + cols)
    x = rng.standard_normal((tokens, cols)).astype(np.float32)
    x[1] = 0
    x[2] *= np.float32(1e-37)
    x[3] *= np.float32(1e37)
    x[4] = rng.choice([-127, 127, 0, 1, -1], cols)
    x[5] *= (10.0 ** rng.uniform(-6, 6, cols)).astype(np.float32)
    x[6, : cols // 2] = 0
    return x


@pytest.mark.parametrize("cols", COLUMNS)
def test_integers_are_those_of_the_a8_coding(cols: int) -> None:
    x = vectors(cols)
    records = Records(encoded(LUT, x), cols)
    a8 = encoded(A8, x)[:, : cols // 32 * A8_RECORD].reshape(len(x), -1, A8_RECORD)
    q = records.q.reshape(len(x), -1)
    assert (q[:, :cols] == a8[..., :32].view(np.int8).reshape(len(x), cols)).all()
    assert (q[:, cols:] == 0).all()


@pytest.mark.parametrize("cols", COLUMNS)
def test_tables_hold_the_magnitudes_whose_bits_agree_with_the_sign(cols: int) -> None:
    records = Records(encoded(LUT, vectors(cols)), cols)
    q = records.q.reshape(*records.q.shape[:2], 32, 1, 4)
    bits = np.arange(16)[:, None] >> np.arange(4) & 1
    agree = np.where(bits == 1, q > 0, q < 0)
    assert (records.tables == (np.abs(q) * agree).sum(-1)).all()


def test_parts_of_32_values_add_up_in_bytes() -> None:
    x = np.full((2, 128), 127, np.float32)
    x[1] = np.random.default_rng(SEED).choice([-127.0, 127.0], 128)
    parts = encoded(LUT, x)[:, 64:RECORD].reshape(2, 4, 8, 2, 16).astype(np.int64).max(-1).sum(2)
    assert parts.max() <= 255
    assert (parts[..., 0].max(), parts[..., 1].max()) <= (248, 120)


@pytest.mark.parametrize("cols", COLUMNS)
def test_offsets_are_sums_over_the_integers(cols: int) -> None:
    records = Records(encoded(LUT, vectors(cols)), cols)
    q = records.q.reshape(*records.q.shape[:2], 4, 32)
    total, negative = np.abs(q).sum(-1), np.where(q < 0, -q, 0).sum(-1)
    levels = records.levels.astype(np.int64)
    assert (records.bit == -levels * total).all()
    assert (records.bits == -(levels * total).sum(-1)).all()
    codes = levels * (total + negative)
    assert (records.code == -codes.reshape(*codes.shape[:2], 2, 2).sum(-1)).all()


@pytest.mark.parametrize("cols", COLUMNS)
def test_rounded_scales_differ_little_from_those_of_a8(cols: int) -> None:
    x = vectors(cols)
    records, plain = Records(encoded(LUT, x), cols), decoded(A8, encoded(A8, x), cols)
    assert records.levels.min() >= 0
    largest = np.abs(plain).max(1, keepdims=True)
    assert (np.abs(records.values() - plain) <= 0.51 / LEVELS * largest + 1e-45).all()


def test_the_scale_error_is_far_below_the_rounding_of_activations() -> None:
    x = vectors(2080)[[0]]
    plain = decoded(A8, encoded(A8, x), 2080)
    rounding = np.sqrt(((plain - x) ** 2).mean())
    assert np.sqrt(((Records(encoded(LUT, x), 2080).values() - plain) ** 2).mean()) < rounding / 100


@pytest.mark.parametrize("cols", COLUMNS)
def test_tokens_are_encoded_alone_and_nothing_else_is_written(cols: int) -> None:
    x = vectors(cols)
    size = -(-cols // 128) * RECORD
    assert size <= LUT.coding_bytes(cols)
    together = encoded(LUT, x)
    wide = np.full((len(x), cols + 5), np.nan, np.float32)
    wide[:, :cols] = x
    room = np.full((len(x), size + 96), 0xA5, np.uint8)
    LUT.encode(wide.ctypes.data, cols, len(x), wide.strides[0], room.ctypes.data, room.strides[0])
    assert (room[:, :size] == together[:, :size]).all()
    assert (room[:, size:] == 0xA5).all()
