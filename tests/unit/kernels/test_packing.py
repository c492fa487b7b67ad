"""Interleaving of rows against its definition, and its refusals."""

from __future__ import annotations

import numpy as np
import pytest

from prism_core.kernels.packing import TILE_ROWS, Field, interleave

SEED = 20261025


@pytest.mark.parametrize("tile_rows", [8, 16])
@pytest.mark.parametrize("rows", [1, 8, 9, 37])
def test_units_of_the_rows_of_a_tile_stand_side_by_side(rows: int, tile_rows: int) -> None:
    rng = np.random.default_rng(SEED)
    blocks, source_block = 3, 19
    source = rng.integers(0, 256, (rows, blocks, source_block), dtype=np.uint8)
    fields = [Field(1, 0, 4, 4), Field(17, 16 * tile_rows, 1, 2), Field(0, 18 * tile_rows, 1, 1)]
    out_block = 19 * tile_rows + 5
    tiles = -(-rows // tile_rows)
    out = np.zeros(tiles * blocks * out_block, np.uint8)
    interleave(source, rows, blocks, fields, out, out_block, tile_rows)
    packed = out.reshape(tiles, blocks, out_block)
    padded = np.zeros((tiles * tile_rows, blocks, source_block), np.uint8)
    padded[:rows] = source
    for field in fields:
        length = field.units * field.unit
        part = padded[:, :, field.source : field.source + length]
        part = part.reshape(tiles, tile_rows, blocks, field.units, field.unit).transpose(0, 2, 3, 1, 4)
        there = packed[:, :, field.to : field.to + length * tile_rows]
        assert (there == part.reshape(tiles, blocks, -1)).all()
    assert (packed[:, :, 19 * tile_rows :] == 0).all()


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    source, out = np.ones(4 * 20, np.uint8), np.zeros(160, np.uint8)
    good = Field(0, 0, 5, 4)
    interleave(source, 4, 1, [good], out, 160)
    for fields, size, block in (
        ([Field(4, 0, 5, 4)], 160, 160),
        ([Field(0, 4, 5, 4)], 160, 160),
        ([good], 159, 160),
        ([good], 160, 159),
    ):
        out = np.zeros(size, np.uint8)
        with pytest.raises(ValueError, match="fit"):
            interleave(source, 4, 1, fields, out, block)
        assert not out.any()
    with pytest.raises(ValueError, match="3 rows"):
        interleave(source[:-1], 3, 1, [good], np.zeros(160, np.uint8), 160)


def test_a_matrix_without_rows_is_nothing() -> None:
    interleave(np.zeros(0, np.uint8), 0, 4, [Field(0, 0, 1, 1)], np.zeros(0, np.uint8), TILE_ROWS)
