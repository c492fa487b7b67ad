"""Layouts of the K-quants: 256 weights with small integer scales per 16 or 32 under one or two float16 scales.

A block of a tile is the block's fields, each interleaved over the 8 rows, and the codes of Q3_K, Q5_K and Q6_K made
dense (see `dense`). The 6-bit scales of Q3_K, Q4_K and Q5_K are unpacked to bytes, which adds 4 bytes to 110, 144 and
176. As in the blocks' definition, the float16 scale is multiplied with the integer one first, rounded to float32, and
so is the minimum.
"""

from __future__ import annotations

import functools
from abc import abstractmethod

import numpy as np

from prism_core.gguf.kquants import q3_k_scales, scales_and_minimums
from prism_core.gguf.types import TensorType
from prism_core.kernels.dense import Dense
from prism_core.kernels.families import Bytes, Family
from prism_core.kernels.layout import Layout
from prism_core.kernels.packing import TILE_ROWS, Field, interleave
from prism_core.kernels.simd import i8x8, i8x32, i32x8
from prism_core.kernels.staging import Lanes, Place
from prism_core.kernels.tiles import family_of

BLOCK = 256


class KQuant(Layout):
    """Parts are numbered 0 to 7; part p is group p % 4 of half p // 4."""

    block = BLOCK

    @abstractmethod
    def pack(self, blocks: Bytes, rows: int, per_row: int, out: Bytes) -> None:
        """Fill `out` from uint8[rows * per_row, bytes of a block]."""

    def _small(self, place: Place, at: int, index: int, *, signed: bool = False) -> Lanes:
        """Integer scale number `index` of the 8 rows, as float32; unsigned bytes unless told."""
        return place.load(i8x8, at + 8 * index).widened(i32x8, signed=signed).floats()

    def _vectors(self, place: Place, at: int) -> list[Lanes]:
        """32 bytes of each row, in 8 vectors of 4 bytes a row."""
        return [place.load(i8x32, at + 32 * j) for j in range(8)]

    def _move(self, source: Bytes, rows: int, per_row: int, fields: list[Field], out: Bytes) -> None:
        interleave(source, rows, per_row, fields, out, self.block_bytes)


class _Affine(KQuant):
    """Q4_K and Q5_K: d, dmin, 8 scales, 8 minimums, then the codes."""

    minimums_per_32 = 1
    _SCALES, _MINIMUMS, _CODES = 32, 96, 160

    def scales(self, place: Place, part: int) -> list[Lanes]:
        return [place.scale(0) * self._small(place, self._SCALES, part)]

    def minimums(self, place: Place, part: int) -> list[Lanes]:
        return [(place.scale(16) * self._small(place, self._MINIMUMS, part)).negated()]

    def _nibbles(self, place: Place, at: int, part: int) -> list[Lanes]:
        """Run r of 32 bytes has part 2r in its low halves and part 2r + 1 in its high ones."""
        packed = self._vectors(place, at + 256 * (part // 2))
        return [bytes_ >> 4 for bytes_ in packed] if part % 2 else [bytes_ & 15 for bytes_ in packed]

    def pack(self, blocks: Bytes, rows: int, per_row: int, out: Bytes) -> None:
        fields = [Field(0, 0, 2, 2), Field(16, self._CODES, (blocks.shape[1] - 16) // 4, 4)]
        self._move(blocks, rows, per_row, fields, out)
        # Interleaved first, so that the bits of 8 rows are unpacked side by side.
        tiled = np.zeros((out.size // self.block_bytes, 12, TILE_ROWS), dtype=np.uint8)
        interleave(blocks, rows, per_row, [Field(4, 0, 12, 1)], tiled.reshape(-1), 12 * TILE_ROWS)
        small = np.concatenate(scales_and_minimums(tiled), axis=1)
        out.reshape(len(tiled), -1)[:, self._SCALES : self._CODES] = small.reshape(len(tiled), -1)


class Q4K(_Affine):
    name = "q4_k"
    block_bytes = 8 * (144 + 4)
    largest = 15

    def codes(self, place: Place, part: int) -> list[Lanes]:
        return self._nibbles(place, self._CODES, part)


class Q5K(Dense, _Affine):
    name = "q5_k"
    block_bytes = 8 * (176 + 4)
    largest = 31
    bits, codes_at = 5, _Affine._CODES

    def file_codes(self, place: Place, part: int) -> list[Lanes]:
        """The fifth bit of a weight of part p is bit p of its byte in the first 32 bytes."""
        high = self._vectors(place, self._CODES)
        shifted = [(bits << (4 - part)) if part < 4 else (bits >> (part - 4)) for bits in high]
        nibbles = self._nibbles(place, self._CODES + 256, part)
        return [low | (bits & 16) for low, bits in zip(nibbles, shifted, strict=True)]


class Q6K(Dense, KQuant):
    """ql 128 bytes, qh 64, 16 signed scales, d."""

    name = "q6_k"
    block_bytes = 8 * 210
    scales_per_32 = 2
    largest, offset = 63, 32
    bits, codes_at = 6, 0
    _HIGH, _SCALES, _D = 8 * 128, 8 * 192, 8 * 208

    def file_codes(self, place: Place, part: int) -> list[Lanes]:
        half, group = divmod(part, 4)
        low = self._vectors(place, 512 * half + 256 * (group % 2))
        high = self._vectors(place, self._HIGH + 256 * half)
        low = [bytes_ >> 4 if group >= 2 else bytes_ & 15 for bytes_ in low]
        return [a | (((b >> (2 * group)) & 3) << 4) for a, b in zip(low, high, strict=True)]

    def scales(self, place: Place, part: int) -> list[Lanes]:
        d = place.scale(self._D)
        return [d * self._small(place, self._SCALES, 2 * part + index, signed=True) for index in range(2)]

    def pack(self, blocks: Bytes, rows: int, per_row: int, out: Bytes) -> None:
        fields = [Field(0, 0, 48, 4), Field(192, self._SCALES, 16, 1), Field(208, self._D, 1, 2)]
        self._move(blocks, rows, per_row, fields, out)


class _TwoBits(KQuant):
    """Q2_K and Q3_K: weight l of group g in half h is two bits of byte 32h + l, from bit 2g on."""

    scales_per_32 = 2

    def _two_bits(self, place: Place, at: int, part: int) -> list[Lanes]:
        half, group = divmod(part, 4)
        return [(bytes_ >> (2 * group)) & 3 for bytes_ in self._vectors(place, at + 256 * half)]


class Q2K(_TwoBits):
    """16 bytes of a 4-bit scale and a 4-bit minimum each, 64 bytes of codes, d, dmin."""

    name = "q2_k"
    block_bytes = 8 * 84
    minimums_per_32 = 2
    largest = 3
    _CODES, _D, _DMIN = 8 * 16, 8 * 80, 8 * 82

    def codes(self, place: Place, part: int) -> list[Lanes]:
        return self._two_bits(place, self._CODES, part)

    def scales(self, place: Place, part: int) -> list[Lanes]:
        d = place.scale(self._D)
        small = [place.load(i8x8, 8 * (2 * part + index)) & 15 for index in range(2)]
        return [d * each.widened(i32x8, signed=False).floats() for each in small]

    def minimums(self, place: Place, part: int) -> list[Lanes]:
        dmin = place.scale(self._DMIN)
        small = [place.load(i8x8, 8 * (2 * part + index)) >> 4 for index in range(2)]
        return [(dmin * each.widened(i32x8, signed=False).floats()).negated() for each in small]

    def pack(self, blocks: Bytes, rows: int, per_row: int, out: Bytes) -> None:
        fields = [Field(0, 0, 16, 1), Field(16, self._CODES, 16, 4), Field(80, self._D, 2, 2)]
        self._move(blocks, rows, per_row, fields, out)


class Q3K(Dense, _TwoBits):
    """32 bytes of third bits, 64 bytes of codes, 16 signed scales, d."""

    name = "q3_k"
    block_bytes = 8 * (110 + 4)
    largest, offset = 7, 4
    bits, codes_at = 3, 0
    _CODES, _SCALES, _D = 8 * 32, 8 * 96, 8 * 112

    def file_codes(self, place: Place, part: int) -> list[Lanes]:
        """The third bit of a weight of part p is bit p of its byte in the first 32 bytes."""
        third = self._vectors(place, 0)
        shifted = [(bits << (2 - part)) if part < 2 else (bits >> (part - 2)) for bits in third]
        low = self._two_bits(place, self._CODES, part)
        return [a | (bits & 4) for a, bits in zip(low, shifted, strict=True)]

    def scales(self, place: Place, part: int) -> list[Lanes]:
        d = place.scale(self._D)
        return [d * self._small(place, self._SCALES, 2 * part + index, signed=True) for index in range(2)]

    def pack(self, blocks: Bytes, rows: int, per_row: int, out: Bytes) -> None:
        fields = [Field(0, 0, 24, 4), Field(108, self._D, 1, 2)]
        self._move(blocks, rows, per_row, fields, out)
        small = q3_k_scales(blocks[:, 96:108]).view(np.uint8)
        self._move(small, rows, per_row, [Field(0, self._SCALES, 16, 1)], out)


_LAYOUTS: dict[str, type[KQuant]] = {"Q2_K": Q2K, "Q3_K": Q3K, "Q4_K": Q4K, "Q5_K": Q5K, "Q6_K": Q6K}


@functools.cache
def family(tensor_type: TensorType) -> Family:
    """The family of one of these types."""
    layout = _LAYOUTS[tensor_type.name]()

    def pack(kind: TensorType, raw: Bytes, rows: int, cols: int, out: Bytes) -> None:
        layout.pack(raw.reshape(-1, kind.block_bytes), rows, cols // BLOCK, out)
        if isinstance(layout, Dense):
            layout.condense(out)

    return family_of(layout, pack)
