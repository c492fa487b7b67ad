"""From the blocks of ternary files to the planes of `ternary`: two bits a code, whatever the file's coding.

Types with two-bit fields in order (Q2_0, PQ2_0) are split by shifting 32 codes at a time; the others go through a byte
per code. Codes keep their meaning: 0, 1, 2, 3 are -1, 0, +1, +2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from prism_core.gguf.types import TensorType
from prism_core.kernels import memory, simd
from prism_core.kernels.families import Bytes
from prism_core.kernels.jit import device, kernel
from prism_core.kernels.lut_tile import COLUMN, GROUP, SCALES_BYTES, TILE_ROWS, place_of

_LOW_BITS = 0x0101010101010101
_GATHER = 0x0102040810204080
"""Times 8 bytes of 0 or 1: the top byte has the first of them as bit 0, the last as bit 7."""


@device
def _even_bits(x: Any) -> Any:
    """Bits 0, 2, 4, ... of 64 as 32 bits."""
    x &= 0x5555555555555555
    x = (x | x >> 1) & 0x3333333333333333
    x = (x | x >> 2) & 0x0F0F0F0F0F0F0F0F
    x = (x | x >> 4) & 0x00FF00FF00FF00FF
    x = (x | x >> 8) & 0x0000FFFF0000FFFF
    return (x | x >> 16) & 0xFFFFFFFF


@device
def _store_group(columns: Any, low: Any, high: Any) -> None:
    """32 codes of a row, bits of the planes, into its place of 4 + 4 byte columns."""
    for i in range(4):
        memory.store_i8(columns + COLUMN * i, low >> 8 * i)
        memory.store_i8(columns + GROUP + COLUMN * i, high >> 8 * i)


@device
def _fields_in_order(source: Any, groups: Any, columns: Any) -> None:
    for group in range(groups):
        codes = memory.load_i64(source + 8 * group)
        _store_group(columns + 2 * GROUP * group, _even_bits(codes), _even_bits(codes >> 1))


@device
def _from_bytes(codes: Any, groups: Any, columns: Any) -> None:
    for group in range(groups):
        low, high = 0, 0
        for i in range(4):
            eight = memory.load_i64(codes + 32 * group + 8 * i)
            low |= ((eight & _LOW_BITS) * _GATHER >> 56 & 255) << 8 * i
            high |= ((eight >> 1 & _LOW_BITS) * _GATHER >> 56 & 255) << 8 * i
        _store_group(columns + 2 * GROUP * group, low, high)


# Base-3 digits, the most significant first: digit n of b is (b * 3^n mod 256) * 3 / 256


@device
def _digits16(source: Any, power: Any, codes: Any) -> None:
    low = simd.mul(simd.zext_i16x16(simd.load_i8x16(source)), simd.splat_i16x16(power))
    low = simd.and_(low, simd.splat_i16x16(255))
    simd.store(codes, simd.narrow_i8(simd.shr(simd.mul(low, simd.splat_i16x16(3)), 8)))


@device
def _digits8(source: Any, power: Any, codes: Any) -> None:
    low = simd.mul(simd.zext_i16x8(simd.load_i8x8(source)), simd.splat_i16x8(power))
    low = simd.and_(low, simd.splat_i16x8(255))
    simd.store(codes, simd.narrow_i8(simd.shr(simd.mul(low, simd.splat_i16x8(3)), 8)))


@device
def _digits(source: Any, count: Any, power: Any, codes: Any) -> None:
    for i in range(count):
        memory.store_i8(codes + i, ((memory.load_u8(source + i) * power & 255) * 3) >> 8)


# One block of a type -> its planes; `codes` is room for 256 bytes


@device
def _q2_0(block: Any, codes: Any, columns: Any) -> None:
    _fields_in_order(block + 2, 2, columns)


@device
def _pq2_0(block: Any, codes: Any, columns: Any) -> None:
    _fields_in_order(block + 2, 4, columns)


@device
def _ptq1_0(block: Any, codes: Any, columns: Any) -> None:
    power = 1
    for n in range(5):
        _digits16(block, power, codes + 16 * n)
        _digits8(block + 16, power, codes + 80 + 8 * n)
        if n < 4:
            _digits(block + 24, 2, power, codes + 120 + 2 * n)
        power *= 3
    _from_bytes(codes, 4, columns)


@device
def _tq1_0(block: Any, codes: Any, columns: Any) -> None:
    power = 1
    for n in range(5):
        _digits16(block, power, codes + 32 * n)
        _digits16(block + 16, power, codes + 32 * n + 16)
        _digits16(block + 32, power, codes + 160 + 16 * n)
        if n < 4:
            _digits(block + 48, 4, power, codes + 240 + 4 * n)
        power *= 3
    _from_bytes(codes, 8, columns)


@device
def _tq2_0(block: Any, codes: Any, columns: Any) -> None:
    for half in range(2):
        bytes_ = simd.load_i8x32(block + 32 * half)
        for field in range(4):
            code = simd.and_(simd.shr(bytes_, 2 * field), simd.splat_i8x32(3))
            simd.store(codes + 128 * half + 32 * field, code)
    _from_bytes(codes, 8, columns)


def _packer(tensor_type: TensorType, block_planes: Any) -> Any:
    """(raw, rows, blocks of a row, 256 bytes of room, out): every block of every row into its tile."""
    size, scale = tensor_type.block_bytes, tensor_type.scales[0]
    packed_size = SCALES_BYTES + COLUMN * tensor_type.block_size // 4

    def pack(raw: Any, rows: Any, blocks: Any, codes: Any, out: Any) -> None:
        for row in range(rows):
            tile, lane = out + row // TILE_ROWS * blocks * packed_size, row % TILE_ROWS
            columns = SCALES_BYTES + place_of(lane)
            for _block in range(blocks):
                memory.store_i16(tile + 2 * lane, memory.load_u16(raw + scale))
                block_planes(raw, codes, tile + columns)
                raw += size
                tile += packed_size

    return kernel("void(int64, int64, int64, int64, int64)", name=f"pack_{tensor_type.name.lower()}")(pack)


_PACKERS = {
    TensorType.Q2_0: _packer(TensorType.Q2_0, _q2_0),
    TensorType.PQ2_0: _packer(TensorType.PQ2_0, _pq2_0),
    TensorType.PTQ1_0: _packer(TensorType.PTQ1_0, _ptq1_0),
    TensorType.TQ1_0: _packer(TensorType.TQ1_0, _tq1_0),
    TensorType.TQ2_0: _packer(TensorType.TQ2_0, _tq2_0),
}


def pack_codes(tensor_type: TensorType, raw: Bytes, rows: int, blocks: int, packed: Bytes) -> None:
    """`rows` x `blocks` blocks of a type into the tiles `packed`; all sizes have been checked."""
    codes = np.empty(256, np.uint8)
    _PACKERS[tensor_type](raw.ctypes.data, rows, blocks, codes.ctypes.data, packed.ctypes.data)
