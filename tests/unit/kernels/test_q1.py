"""One-bit kernels against float64, and against themselves for every split of the work and every form."""

from __future__ import annotations

import numpy as np
import pytest

from prism_core.gguf.types import TensorType
from prism_core.kernels import q1

from .lut_weights import activations, error, set_scales, splits_agree
from .weights import Matrix, random_blocks

SEED = 20261031
KINDS = (TensorType.Q1_0, TensorType.Q1_0_V1)
TOLERANCE = 5e-7
"""Of the sum of magnitudes: a float32 addition per 128 (or 32) columns, all with errors of the sum so far."""

kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def columns(kind: TensorType) -> tuple[int, ...]:
    return (128, 640, 2048) if kind is TensorType.Q1_0 else (32, 96, 160, 1056)


def matrix(kind: TensorType, rows: int, cols: int, seed: int = 0) -> Matrix:
    rng = np.random.default_rng(SEED + seed)
    return Matrix(kind, random_blocks(kind, rows, cols, rng), rows, cols)


@kinds
@pytest.mark.parametrize("rows", [1, 8, 63, 64, 65, 130])
def test_products_agree_with_the_definition(kind: TensorType, rows: int) -> None:
    print("seed", SEED)
    for cols in columns(kind):
        act = activations(7, cols, np.random.default_rng(SEED))
        assert error(matrix(kind, rows, cols, rows + cols), act) < TOLERANCE


@kinds
def test_rows_of_one_sign_and_extreme_activations_stay_exact(kind: TensorType) -> None:
    rows, cols = 66, 1024
    raw = random_blocks(kind, rows, cols, np.random.default_rng(SEED))
    blocks = raw.reshape(rows, -1, kind.block_bytes)
    blocks[0::3, :, 2:], blocks[1::3, :, 2:] = 255, 0
    set_scales(kind, raw, np.ones(raw.size // kind.block_bytes))
    w = Matrix(kind, raw, rows, cols)
    x = np.full((3, cols), 127, np.float32)
    x[1], x[2] = -127, np.where(np.arange(cols) % 2, 127, -127)
    act = activations(6, cols, np.random.default_rng(SEED))
    assert error(w, act) < TOLERANCE
    assert w.times(act)[1, 0] == 127 * cols
    assert w.times(act)[1, 1] == -127 * cols


@kinds
def test_negative_subnormal_and_zero_scales_count(kind: TensorType) -> None:
    rows, cols = 70, 256
    raw = random_blocks(kind, rows, cols, np.random.default_rng(SEED))
    scales = np.resize([-0.5, 2.0**-24, -(2.0**-20), 0.0, -0.0, 60000.0, 3e-5], raw.size // kind.block_bytes)
    set_scales(kind, raw, scales)
    assert error(Matrix(kind, raw, rows, cols), activations(6, cols, np.random.default_rng(SEED))) < TOLERANCE


@kinds
def test_any_split_of_tokens_and_tiles_gives_the_same_bits(kind: TensorType) -> None:
    splits_agree(matrix(kind, 330, 384), activations(11, 384, np.random.default_rng(SEED)))


def test_every_number_of_tokens_up_to_130_gives_the_same_bits() -> None:
    w = matrix(TensorType.Q1_0, 65, 256)
    act = activations(130, 256, np.random.default_rng(SEED))
    whole = w.times(act)
    for tokens in range(1, 130):
        assert (w.times(act[:tokens]).view(np.uint32) == whole[:tokens].view(np.uint32)).all(), tokens


def test_both_forms_give_the_same_bits() -> None:
    w, act = matrix(TensorType.Q1_0, 150, 1152), activations(9, 1152, np.random.default_rng(SEED))
    results = []
    for entry in (q1.matmul_wide, q1.matmul_narrow):
        out = np.full((9, 150), -7, np.float32)
        entry(w.packed.ctypes.data, 150, 1152, 0, 3, act.ctypes.data, act.strides[0], 9, out.ctypes.data, 150)
        results.append(out.view(np.uint32))
    assert (results[0] == results[1]).all()


@kinds
def test_rows_come_back_bit_for_bit(kind: TensorType) -> None:
    w = matrix(kind, 131, columns(kind)[-1])
    for index in range(w.rows):
        assert (w.row(index).view(np.uint32) == w.values[index].view(np.uint32)).all()


@kinds
def test_packing_adds_only_rows_of_the_last_tile(kind: TensorType) -> None:
    for rows in (64, 65, 2048):
        size = q1.packed_bytes(kind, rows, 2048)
        assert size == -(-rows // 64) * 64 * 2048 // kind.block_size * kind.block_bytes


@kinds
def test_packing_refuses_bytes_of_another_size(kind: TensorType) -> None:
    raw = random_blocks(kind, 4, 256, np.random.default_rng(SEED))
    for rows, cols in ((5, 256), (4, 384), (4, 255)):
        with pytest.raises(ValueError, match=f"{rows} x {cols} {kind.name} weights"):
            q1.pack(kind, raw, rows, cols)
