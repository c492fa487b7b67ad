"""Every weight family against its definition in float64, and against itself for any split of the work."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from prism_core.gguf.types import TensorType
from prism_core.kernels.families import family_for
from prism_core.kernels.tiles import APART

from .weights import Matrix, encoded, random_blocks

SEED = 20261022
FLOATS = ("F32", "F16", "BF16")
BLOCKS_32 = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
NAMES = (*FLOATS, *BLOCKS_32, *K_QUANTS)
INTEGERS = (*BLOCKS_32, *K_QUANTS)

TOLERANCE = 1e-6
"""Of the sum of magnitudes: float32 additions of a few dozen blocks."""


def matrix(name: str, rows: int, cols: int, seed: int = 0, scale: float = 0.05) -> Matrix:
    kind = TensorType[name]
    rng = np.random.default_rng(SEED + seed)
    return Matrix(kind, random_blocks(kind, rows, cols, rng, scale), rows, cols)


def activations(w: Matrix, tokens: int, seed: int = 1) -> np.ndarray:
    x = np.random.default_rng(SEED + seed).standard_normal((tokens, w.cols)).astype(np.float32)
    return encoded(w.family.coding, x)


def columns(name: str) -> list[int]:
    """One block, several, more than are decoded at a time; for plain floats any number."""
    if name in FLOATS:
        return [1, 7, 64, 1027]
    return [256, 1280, 2304] if name in K_QUANTS else [32, 96, 992, 2080]


@pytest.mark.parametrize("name", NAMES)
def test_products_agree_with_the_definition(name: str) -> None:
    print("seed", SEED)
    for rows in (8, 37):
        for cols in columns(name):
            w = matrix(name, rows, cols, seed=cols)
            for tokens in (1, 2, 19):
                assert w.error(activations(w, tokens)) < TOLERANCE, (rows, cols, tokens)


@pytest.mark.parametrize("name", NAMES)
def test_rows_come_back_bit_for_bit(name: str) -> None:
    w = matrix(name, 19, columns(name)[-1])
    for index in range(w.rows):
        assert (w.row(index).view(np.uint32) == w.values[index].view(np.uint32)).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_token_alone_equals_the_same_token_among_any_number(name: str) -> None:
    w = matrix(name, 29, columns(name)[-1])
    act = activations(w, 130)
    together = w.times(act)
    assert (together[:, w.rows :] == -7).all()
    for tokens in (1, 2, 3, 4, 5, 8, 9, 15, 127, 128, 129):
        some = w.times(act[:tokens])
        assert (some == together[:tokens]).all(), tokens
        assert (some[:, w.rows :] == -7).all()
    for token in (0, 1, 77, 129):
        assert (w.times(act[token : token + 1])[0] == together[token]).all()


@pytest.mark.parametrize("name", NAMES)
def test_any_split_of_the_tiles_gives_the_same_bits(name: str) -> None:
    w = matrix(name, 59, columns(name)[2])
    tiles = w.family.tiles(w.rows)
    for tokens in (1, 21):
        act = activations(w, tokens)
        whole = w.times(act)
        for cuts in ([0, 1, tiles], [0, 3, 4, tiles], list(range(tiles + 1))):
            out = np.full_like(whole, -7.0)
            for begin, end in itertools.pairwise(cuts):
                w.times(act, (begin, end), out)
            assert (out == whole).all(), cuts


@pytest.mark.parametrize("name", NAMES)
def test_a_matrix_read_in_several_streams_equals_its_tiles_alone(name: str) -> None:
    cols = columns(name)[-1]
    size = family_for(TensorType[name]).tile_rows
    enough = -(-APART // (size * TensorType[name].nbytes(cols)))
    for tiles in (2 * enough - 1, 2 * enough, 3 * enough, 3 * enough + 2):
        w = matrix(name, size * tiles - 3, cols)
        for tokens in (1, 2):
            act = activations(w, tokens)
            out = np.full((tokens, w.rows + 3), -7.0, np.float32)
            for tile in range(w.family.tiles(w.rows)):
                w.times(act, (tile, tile + 1), out)
            assert (w.times(act) == out).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_range_of_tiles_writes_its_own_rows_only(name: str) -> None:
    w = matrix(name, 59, columns(name)[1])
    for tokens in (1, 21):
        act = activations(w, tokens)
        size = w.family.tile_rows
        out = w.times(act, (2, 5))
        assert (out[:, : 2 * size] == -7).all()
        assert (out[:, 5 * size :] == -7).all()
        assert (out[:, 2 * size : 5 * size] == w.times(act)[:, 2 * size : 5 * size]).all()
        assert (w.times(act, (3, 3)) == -7).all()


@pytest.mark.parametrize("name", INTEGERS)
def test_extreme_codes_and_activations_stay_exact(name: str) -> None:
    kind = TensorType[name]
    cols = columns(name)[1]
    rng = np.random.default_rng(SEED)
    ramp = np.where(np.arange(cols) % 3 == 0, 127.0, -127.0)
    x = np.stack([np.full(cols, 127.0), np.full(cols, -127.0), ramp, -ramp, np.zeros(cols)]).astype(np.float32)
    for byte in (0x00, 0xFF, 0x7F, 0x80, 0x88):
        raw = random_blocks(kind, 16, cols, rng).reshape(-1, kind.block_bytes)
        fixed = [at + more for at in kind.scales for more in range(1 if kind.scale_form == "e8m0" else 2)]
        raw[:, [index for index in range(kind.block_bytes) if index not in fixed]] = byte
        w = Matrix(kind, raw.reshape(-1), 16, cols)
        act = encoded(w.family.coding, x)
        assert w.error(act) < TOLERANCE, hex(byte)
        assert (w.times(act)[4, : w.rows] == 0).all()


@pytest.mark.parametrize("name", INTEGERS)
def test_zero_and_subnormal_scales_are_as_good_as_others(name: str) -> None:
    kind = TensorType[name]
    cols = columns(name)[1]
    rng = np.random.default_rng(SEED)
    for scale in (0.0, 3e-7):
        raw = random_blocks(kind, 9, cols, rng, scale)
        if kind.scale_form == "e8m0":
            raw.reshape(-1, kind.block_bytes)[:, 0] = [0, 1, 2][: 1 if scale == 0.0 else 3][-1]
        w = Matrix(kind, raw, 9, cols)
        act = activations(w, 6)
        assert np.isfinite(w.times(act)).all()
        if kind.scale_form != "e8m0":
            assert w.error(act) < TOLERANCE
        if scale == 0.0 and kind.scale_form != "e8m0":
            assert (w.times(act)[:, : w.rows] == 0).all()
        for index in range(9):
            assert (w.row(index).view(np.uint32) == w.values[index].view(np.uint32)).all()


@pytest.mark.parametrize("name", NAMES)
def test_packing_costs_at_most_five_percent(name: str) -> None:
    kind = TensorType[name]
    rows, cols = 1024, 2048
    assert family_for(kind).packed_bytes(kind, rows, cols) <= 1.05 * kind.nbytes(rows * cols)


@pytest.mark.parametrize("name", NAMES)
def test_packing_refuses_bytes_that_are_no_such_matrix(name: str) -> None:
    kind = TensorType[name]
    cols = columns(name)[1]
    raw = random_blocks(kind, 4, cols, np.random.default_rng(SEED))
    for bad in (raw[:-1], raw[: raw.size // 2]):
        with pytest.raises(ValueError, match=f"{bad.size} bytes are not 4 x {cols}"):
            family_for(kind).pack(kind, bad, 4, cols)


def test_a_type_without_kernels_is_named() -> None:
    with pytest.raises(ValueError, match="IQ1_S"):
        family_for(TensorType.IQ1_S)
