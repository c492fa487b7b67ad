"""The activation encodings against their definition in numpy."""

from __future__ import annotations

import numpy as np
import pytest

from prism_core.kernels import coding

SEED = 20261021


def encode(kind: coding.Coding, x: np.ndarray) -> np.ndarray:
    tokens, cols = x.shape
    size = kind.coding_bytes(cols)
    out = np.full((tokens, size), 0xEE, np.uint8)
    kind.encode(x.ctypes.data, cols, tokens, x.strides[0], out.ctypes.data, size)
    return out


def records(x: np.ndarray) -> np.ndarray:
    fields = [("q", "i1", 32), ("d", "f4"), ("scaled", "f4"), ("sum", "i4"), ("high", "i4")]
    cols = x.shape[1]
    size = cols // 32 * coding.A8_RECORD
    return np.ascontiguousarray(encode(coding.A8, x)[:, :size]).view(np.dtype(fields))


@pytest.mark.parametrize("cols", [32, 96, 2048])
def test_a8_follows_the_rounding_rule_exactly(cols: int) -> None:
    print("seed", SEED)
    rng = np.random.default_rng(SEED + cols)
    x = (rng.standard_normal((5, cols)) * rng.choice([1e-30, 1e-3, 1.0, 1e4, 1e30], (5, 1))).astype(np.float32)
    x[1, :32] = 0
    x[2, :32] = np.arange(32) * np.float32(0.5)
    got = records(x)
    blocks = x.reshape(5, -1, 32)
    largest = np.abs(blocks).max(-1)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    q = np.rint(blocks * inverse[..., None])
    assert (got["q"] == q).all()
    assert (got["d"] == largest / np.float32(127)).all()
    assert (got["sum"] == -q.sum(-1)).all()
    assert (got["high"] == -q[..., 16:].sum(-1)).all()
    assert (got["scaled"] == got["d"] * -got["sum"].astype(np.float32)).all()


def test_a8_takes_the_whole_range_of_finite_magnitudes() -> None:
    x = np.zeros((1, 128), np.float32)
    x[0, 3], x[0, 35], x[0, 64], x[0, 100] = np.float32(1e-44), np.float32(2.0**-118), -np.finfo(np.float32).max, 1.0
    got = records(x)[0]
    assert (got["q"][0] == 0).all()
    assert got["sum"][0] == 0
    assert got["q"][1].tolist() == [0] * 3 + [127] + [0] * 28
    assert got["q"][2].tolist() == [-127] + [0] * 31
    assert got["sum"][2] == 127
    assert (np.abs(records(np.full((1, 32), np.nan, np.float32))["q"].astype(int)) <= 128).all()


def test_parted_records_say_the_same_as_plain_ones() -> None:
    print("seed", SEED)
    rng = np.random.default_rng(SEED)
    x = (rng.standard_normal((7, 320)) * rng.choice([1e-30, 1.0, 1e30], (7, 1))).astype(np.float32)
    x[1, :32], x[2, :32], x[3, :32] = 0, -1, np.arange(32)
    plain = records(x)
    fields = [("size", "u1", 32), ("d", "f4"), ("start", "i4"), ("signs", "i1", 32)]
    parted = encode(coding.A8_PARTED, x)[:, : 10 * coding.PARTED_RECORD]
    parted = np.ascontiguousarray(parted).view(np.dtype(fields))
    assert (parted["d"] == plain["d"]).all()
    assert (parted["size"] == np.abs(plain["q"])).all()
    assert (parted["signs"] == -(plain["q"] < 0).astype(np.int8)).all()
    negative = parted["start"] - coding.LIFT
    assert (negative == np.where(plain["q"] < 0, -plain["q"].astype(int), 0).sum(-1)).all()
    assert np.int32(coding.LIFT).view(np.float32) == coding.LIFTED
    # What they are for: products with signed codes of the whole range.
    codes = rng.integers(-128, 128, 32)
    flipped = (codes ^ parted["signs"]) * parted["size"].astype(int)
    assert np.abs(flipped[..., ::2] + flipped[..., 1::2]).max() < 2**15
    assert (flipped.sum(-1) + negative == (codes * plain["q"].astype(int)).sum(-1)).all()


def test_encoding_many_tokens_equals_encoding_each() -> None:
    rng = np.random.default_rng(SEED)
    x = rng.standard_normal((9, 160)).astype(np.float32)
    for kind in (coding.A8, coding.A8_PARTED, coding.F32):
        together = encode(kind, x)
        for token in range(9):
            assert (encode(kind, x[token : token + 1])[0] == together[token]).all()


def test_f32_is_the_vector_itself() -> None:
    x = np.arange(15, dtype=np.float32).reshape(3, 5)
    assert (encode(coding.F32, x)[:, :20].copy().view(np.float32) == x).all()


def test_nothing_is_written_past_the_records() -> None:
    x = np.ones((2, 64), np.float32)
    assert (encode(coding.A8, x)[:, 96:] == 0xEE).all()
    assert (encode(coding.A8_PARTED, x)[:, 144:] == 0xEE).all()
    assert coding.A8.coding_bytes(2048) % 128 == 64
