"""Rearranging the blocks of a GGUF matrix into tiles of some rows, 8 unless told.

Where a block of a row has a field of u units, the packed block of a tile has, unit by unit, that unit of each of its
rows: unit k of row r stands at `to + (k * tile_rows + r) * unit`. Rows beyond the matrix stay zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism_core.kernels import memory
from prism_core.kernels.jit import kernel

TILE_ROWS = 8


@dataclass(frozen=True)
class Field:
    """Where one field stands in a block of a row, and in the block of a tile."""

    source: int
    to: int
    units: int
    unit: int
    """Bytes of a unit: 1, 2 or 4."""


@kernel("void(int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def _interleave(
    source: Any,
    source_block: Any,
    rows: Any,
    blocks: Any,
    out: Any,
    out_block: Any,
    fields: Any,
    n_fields: Any,
    tile_rows: Any,
) -> None:
    for tile in range((rows + tile_rows - 1) // tile_rows):
        here = min(tile_rows, rows - tile * tile_rows)
        for block in range(blocks):
            to_block = out + (tile * blocks + block) * out_block
            for field in range(n_fields):
                record = fields + field * 32
                offset, to = memory.load_i64(record), to_block + memory.load_i64(record + 8)
                units, unit = memory.load_i64(record + 16), memory.load_i64(record + 24)
                for r in range(here):
                    come = source + ((tile * tile_rows + r) * blocks + block) * source_block + offset
                    go = to + r * unit
                    if unit == 4:
                        for k in range(units):
                            memory.store_i32(go + k * 4 * tile_rows, memory.load_i32(come + k * 4))
                    elif unit == 2:
                        for k in range(units):
                            memory.store_i16(go + k * 2 * tile_rows, memory.load_i16(come + k * 2))
                    else:
                        for k in range(units):
                            memory.store_i8(go + k * tile_rows, memory.load_u8(come + k))


def interleave(
    source: NDArray[np.uint8],
    rows: int,
    blocks: int,
    fields: Sequence[Field],
    out: NDArray[np.uint8],
    out_block: int,
    tile_rows: int = TILE_ROWS,
) -> None:
    """Move fields of `source` (uint8, rows x blocks x bytes of a block) into `out` (tiles x blocks x `out_block`)."""
    source = np.ascontiguousarray(source).reshape(-1)
    if rows == 0 or blocks == 0:
        return
    source_block = source.size // (rows * blocks)
    table = np.array([(field.source, field.to, field.units, field.unit) for field in fields], dtype=np.int64)
    _check(source_block, source.size, rows, blocks, fields, out.size, out_block, tile_rows)
    _interleave(
        source.ctypes.data,
        source_block,
        rows,
        blocks,
        out.ctypes.data,
        out_block,
        table.ctypes.data,
        len(fields),
        tile_rows,
    )


def _check(
    source_block: int,
    size: int,
    rows: int,
    blocks: int,
    fields: Sequence[Field],
    out_size: int,
    out_block: int,
    tile_rows: int,
) -> None:
    tiles = -(-rows // tile_rows)
    if size != rows * blocks * source_block or out_size < tiles * blocks * out_block:
        raise ValueError(f"{rows} rows of {blocks} blocks do not fit {size} bytes, or not into {out_size} bytes")
    for field in fields:
        length = field.units * field.unit
        if field.source + length > source_block or field.to + tile_rows * length > out_block:
            raise ValueError(f"{field} does not fit a block of {source_block} bytes, or not one of {out_block}")
