"""Ternary kernels against float64, against each other where weights are equal, and for every split of the work."""

from __future__ import annotations

import numpy as np
import pytest

from prism_core.gguf.types import TensorType
from prism_core.kernels import ternary

from .lut_weights import activations, error, set_scales, splits_agree
from .weights import Matrix, random_blocks

SEED = 20261032
TOLERANCE = 8e-7
"""Of the sum of magnitudes: a float32 addition per 64 columns."""
Q2_0, PQ2_0, PTQ1_0, TQ1_0, TQ2_0 = (TensorType[name] for name in ("Q2_0", "PQ2_0", "PTQ1_0", "TQ1_0", "TQ2_0"))

kinds = pytest.mark.parametrize("kind", [Q2_0, PQ2_0, PTQ1_0, TQ1_0, TQ2_0], ids=lambda kind: kind.name)


def columns(kind: TensorType) -> tuple[int, ...]:
    return (kind.block_size, 5 * kind.block_size, 2048)


def matrix(kind: TensorType, rows: int, cols: int, seed: int = 0) -> Matrix:
    rng = np.random.default_rng(SEED + seed)
    return Matrix(kind, random_blocks(kind, rows, cols, rng), rows, cols)


# A slow, independent encoder of given codes and scales, from the definitions of the formats


def fields(codes: np.ndarray) -> np.ndarray:
    """Codes [.., 4 n] as 2-bit fields, the first lowest: uint8[.., n]."""
    four = codes.reshape(*codes.shape[:-1], -1, 4).astype(np.uint8)
    return four[..., 0] | four[..., 1] << 2 | four[..., 2] << 4 | four[..., 3] << 6


def base3(digits: np.ndarray) -> np.ndarray:
    """Digits [.., 4 or 5], most significant first, as the byte that decodes to them."""
    weights = 3 ** np.arange(4, 4 - digits.shape[-1], -1)
    value = (digits * weights).sum(-1)
    return ((value * 256 + 242) // 243).astype(np.uint8)


def file_bytes(kind: TensorType, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """int codes [rows, cols] and scales [rows, cols / block] -> the bytes of a tensor."""
    block = codes.reshape(-1, kind.block_size)
    d = scales.astype(np.float16).reshape(-1, 1).view(np.uint8)
    if kind in (Q2_0, PQ2_0):
        return np.hstack([d, fields(block)]).ravel()
    if kind is TQ2_0:
        return np.hstack([fields(block.reshape(-1, 2, 4, 32).transpose(0, 1, 3, 2)).reshape(-1, 64), d]).ravel()
    if kind is PTQ1_0:
        runs = [(0, 5, 16), (80, 5, 8), (120, 4, 2)]
    else:
        runs = [(0, 5, 32), (160, 5, 16), (240, 4, 4)]
    parts = [base3(block[:, at : at + n * m].reshape(-1, n, m).transpose(0, 2, 1)) for at, n, m in runs]
    return np.hstack([*parts, d]).ravel()


@kinds
@pytest.mark.parametrize("rows", [1, 8, 63, 64, 65, 130])
def test_products_agree_with_the_definition(kind: TensorType, rows: int) -> None:
    print("seed", SEED)
    for cols in columns(kind):
        act = activations(7, cols, np.random.default_rng(SEED))
        assert error(matrix(kind, rows, cols, rows + cols), act) < TOLERANCE


@kinds
def test_rows_of_one_code_and_extreme_activations_stay_exact(kind: TensorType) -> None:
    rows, cols = 66, 1024
    codes = np.resize([[0], [1], [2], [3]] if kind in (Q2_0, PQ2_0, TQ2_0) else [[0], [1], [2]], (rows, 1))
    codes = np.repeat(codes, cols, 1)
    w = Matrix(kind, file_bytes(kind, codes, np.ones((rows, cols // kind.block_size))), rows, cols)
    assert (w.values == codes - 1).all()
    act = activations(6, cols, np.random.default_rng(SEED))
    assert error(w, act) < TOLERANCE
    assert (w.times(act)[1, :rows] == 127.0 * cols * (codes[:, 0] - 1)).all()


@kinds
def test_negative_subnormal_and_zero_scales_count(kind: TensorType) -> None:
    rows, cols = 70, 512
    raw = random_blocks(kind, rows, cols, np.random.default_rng(SEED))
    scales = np.resize([-0.5, 2.0**-24, -(2.0**-20), 0.0, -0.0, 60000.0, 3e-5], raw.size // kind.block_bytes)
    set_scales(kind, raw, scales)
    assert error(Matrix(kind, raw, rows, cols), activations(6, cols, np.random.default_rng(SEED))) < TOLERANCE


def test_equal_weights_give_equal_bits_in_all_five_types() -> None:
    rng = np.random.default_rng(SEED)
    rows, cols = 130, 2048
    codes, d = rng.integers(0, 3, (rows, cols)), rng.standard_normal((rows, cols // 256)) * 0.05
    act = activations(6, cols, rng)
    results = []
    for kind in (Q2_0, PQ2_0, PTQ1_0, TQ1_0, TQ2_0):
        raw = file_bytes(kind, codes, np.repeat(d, 256 // kind.block_size, 1))
        w = Matrix(kind, raw, rows, cols)
        assert (w.values == (codes - 1) * np.repeat(d.astype(np.float16).astype(np.float32), 256, 1)).all()
        results.append(w.times(act).view(np.uint32))
    assert all((result == results[0]).all() for result in results)


def test_scales_of_128_columns_give_equal_bits_in_three_types_code_3_included() -> None:
    rng = np.random.default_rng(SEED + 1)
    rows, cols = 65, 640
    d = rng.standard_normal((rows, cols // 128)) * 0.05
    for most, others in ((4, (Q2_0,)), (3, (Q2_0, PTQ1_0))):
        codes, act = rng.integers(0, most, (rows, cols)), activations(5, cols, rng)
        expected = Matrix(PQ2_0, file_bytes(PQ2_0, codes, d), rows, cols).times(act).view(np.uint32)
        for kind in others:
            raw = file_bytes(kind, codes, np.repeat(d, 128 // kind.block_size, 1))
            assert (Matrix(kind, raw, rows, cols).times(act).view(np.uint32) == expected).all()


@kinds
def test_any_split_of_tokens_and_tiles_gives_the_same_bits(kind: TensorType) -> None:
    splits_agree(matrix(kind, 330, 512), activations(11, 512, np.random.default_rng(SEED)))


def test_every_number_of_tokens_up_to_130_gives_the_same_bits() -> None:
    w = matrix(Q2_0, 65, 192)
    act = activations(130, 192, np.random.default_rng(SEED))
    whole = w.times(act)
    for tokens in range(1, 130):
        assert (w.times(act[:tokens]).view(np.uint32) == whole[:tokens].view(np.uint32)).all(), tokens


@kinds
def test_rows_come_back_bit_for_bit(kind: TensorType) -> None:
    w = matrix(kind, 131, columns(kind)[1])
    for index in range(w.rows):
        assert (w.row(index).view(np.uint32) == w.values[index].view(np.uint32)).all()


@kinds
def test_base_3_types_grow_by_a_fifth_and_the_others_not_at_all(kind: TensorType) -> None:
    ratio = ternary.packed_bytes(kind, 2048, 2048) / (2048 * 2048 // kind.block_size * kind.block_bytes)
    assert ratio < 1.23 if kind in (PTQ1_0, TQ1_0) else ratio == 1


@kinds
def test_packing_refuses_bytes_of_another_size(kind: TensorType) -> None:
    raw = random_blocks(kind, 4, 256, np.random.default_rng(SEED))
    for rows, cols in ((5, 256), (4, 512), (4, 255)):
        with pytest.raises(ValueError, match=f"{rows} x {cols} {kind.name} weights"):
            ternary.pack(kind, raw, rows, cols)
