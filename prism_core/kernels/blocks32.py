"""Layouts of the types with one scale for 32 weights: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4.

A block of a tile is the block's fields one after the other, each interleaved over the 8 rows: the scales (and minimums)
of 8 rows, then the codes 4 bytes a row, those of 5 bits made dense (see `dense`). Packed matrices have the size of the
file's.
"""

from __future__ import annotations

import functools
from typing import ClassVar

from prism_core.gguf.types import TensorType
from prism_core.kernels.coding import A8, A8_PARTED
from prism_core.kernels.dense import Dense
from prism_core.kernels.families import Bytes, Family
from prism_core.kernels.layout import Layout
from prism_core.kernels.packing import Field, interleave
from prism_core.kernels.simd import f16x8, f32x8, i8x8, i8x32, i32x8
from prism_core.kernels.staging import Lanes, Place
from prism_core.kernels.target import target
from prism_core.kernels.tiles import family_of

_UNSIGNED_FULL = target().vnni
"""Whether codes of 8 bits are best kept unsigned (vpdpbusd), or signed (every other form)."""

_FULL_CODING = A8_PARTED if target().ssse3 and not _UNSIGNED_FULL else A8

_WIDE = target().avx512
"""Streams and prefetches below were chosen on AVX2; what was not measured with AVX-512 stays as it is elsewhere."""


class Block32(Layout):
    """Fields in the order of the file: `(bytes, unit)`, the last one being the codes."""

    fields: ClassVar[tuple[tuple[int, int], ...]]
    streams = 2 if _WIDE else 3
    ahead = 8192 if _WIDE else 2048

    def __init__(self) -> None:
        at = 0
        self.moves: list[Field] = []
        for size, unit in self.fields:
            self.moves.append(Field(at, 8 * at, size // unit, unit))
            at += size

    def _at(self, index: int) -> int:
        return self.moves[index].to

    def scales(self, place: Place, part: int) -> list[Lanes]:
        return [place.load(f16x8, 0).floats()]

    def _nibbles(self, place: Place) -> list[Lanes]:
        """Columns 0-15 are the low halves of 16 bytes, columns 16-31 the high ones."""
        packed = [place.load(i8x32, self._at(-1) + 32 * j) for j in range(4)]
        return [bytes_ & 15 for bytes_ in packed] + [bytes_ >> 4 for bytes_ in packed]

    def codes(self, place: Place, part: int) -> list[Lanes]:
        return self._nibbles(place)


class Q40(Block32):
    name = "q4_0"
    block_bytes = 8 * 18
    fields = ((2, 2), (16, 4))
    largest, offset = 15, 8


class Q41(Block32):
    name = "q4_1"
    block_bytes = 8 * 20
    fields = ((2, 2), (2, 2), (16, 4))
    largest = 15
    minimums_per_32 = 1

    def minimums(self, place: Place, part: int) -> list[Lanes]:
        return [place.load(f16x8, self._at(1)).floats()]


class _Q5(Dense, Block32):
    largest = 31
    bits = 5

    def file_codes(self, place: Place, part: int) -> list[Lanes]:
        """Bit c of a row's 32-bit word is the fifth bit of column c."""
        words = place.load(i32x8, self._at(-2))
        fifth = []
        for j in range(8):
            # Four bits of each row's word are spread to its four bytes: shift, keep one bit in each byte's place 4.
            four = (words >> (4 * j)) & 15
            spread = (four << 4) | (four << 11) | (four << 18) | (four << 25)
            fifth.append((spread & 0x10101010).viewed(i8x32))
        return [low | high for low, high in zip(self._nibbles(place), fifth, strict=True)]


class Q50(_Q5):
    name = "q5_0"
    block_bytes = 8 * 22
    fields = ((2, 2), (4, 4), (16, 4))
    codes_at = 8 * 2
    offset = 16


class Q51(_Q5):
    name = "q5_1"
    block_bytes = 8 * 24
    fields = ((2, 2), (2, 2), (4, 4), (16, 4))
    codes_at = 8 * 4
    minimums_per_32 = 1

    def minimums(self, place: Place, part: int) -> list[Lanes]:
        return [place.load(f16x8, self._at(1)).floats()]


class Q80(Block32):
    name = "q8_0"
    ahead = 8192 if _WIDE else 0
    block_bytes = 8 * 34
    fields = ((2, 2), (32, 4))
    largest = 255
    signed, coding = not _UNSIGNED_FULL, _FULL_CODING
    offset = 128 if _UNSIGNED_FULL else 0

    def codes(self, place: Place, part: int) -> list[Lanes]:
        packed = [place.load(i8x32, self._at(-1) + 32 * j) for j in range(8)]
        return packed if self.signed else [bytes_ ^ -128 for bytes_ in packed]


class IQ4NL(Block32):
    name = "iq4_nl"
    block_bytes = 8 * 18
    fields = ((2, 2), (16, 4))
    largest = 255
    signed, coding = not _UNSIGNED_FULL, _FULL_CODING
    offset = 128 if _UNSIGNED_FULL else 0
    _levels: ClassVar = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]

    def codes(self, place: Place, part: int) -> list[Lanes]:
        table = [level + self.offset for level in self._levels]
        return [nibbles.looked_up(table) for nibbles in self._nibbles(place)]


class MXFP4(Block32):
    """Values are doubled to be integers (as in the block's definition), and lifted by 16 to be unsigned."""

    name = "mxfp4"
    block_bytes = 8 * 17
    fields = ((1, 1), (16, 4))
    largest, offset = 28, 16
    _levels: ClassVar = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]

    def codes(self, place: Place, part: int) -> list[Lanes]:
        table = [level + self.offset for level in self._levels]
        return [nibbles.looked_up(table) for nibbles in self._nibbles(place)]

    def scales(self, place: Place, part: int) -> list[Lanes]:
        """2^(e - 128): a float32 with exponent field e - 1, or subnormal for e below 2."""
        e = place.load(i8x8, 0).widened(i32x8, signed=False)
        subnormal = (e + 1) << 21
        return [e.chosen_below(2, subnormal, (e - 1) << 23).viewed(f32x8)]


_LAYOUTS: dict[str, type[Block32]] = {
    "Q4_0": Q40,
    "Q4_1": Q41,
    "Q5_0": Q50,
    "Q5_1": Q51,
    "Q8_0": Q80,
    "IQ4_NL": IQ4NL,
    "MXFP4": MXFP4,
}


@functools.cache
def family(tensor_type: TensorType) -> Family:
    """The family of one of these types."""
    layout = _LAYOUTS[tensor_type.name]()

    def pack(_type: TensorType, raw: Bytes, rows: int, cols: int, out: Bytes) -> None:
        interleave(raw, rows, cols // 32, layout.moves, out, layout.block_bytes)
        if isinstance(layout, Dense):
            layout.condense(out)

    return family_of(layout, pack)
