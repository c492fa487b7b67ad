"""Codes of 3, 5 and 6 bits without gaps: 8 vectors of 4 columns each in as many vectors as a code has bits.

Types that keep some bits of their codes apart from the others cost more to put together than to multiply. Their packed
form is this one: most codes are the low bits of a byte, and the rest are made of the high bits of several.
"""

from __future__ import annotations

import functools
import operator
from abc import abstractmethod
from typing import Any, ClassVar

from numba import types

from prism_core.kernels import memory
from prism_core.kernels.families import Bytes
from prism_core.kernels.jit import kernel
from prism_core.kernels.layout import Layout
from prism_core.kernels.simd import i8x32
from prism_core.kernels.staging import Lanes, Place
from prism_core.kernels.tiles import stack
from prism_core.kernels.vectors import intrinsic

_PIECES: dict[int, list[list[tuple[int, int, int, int]]]] = {
    3: [
        *([(vector, bit, 3, 0)] for vector in range(3) for bit in (0, 3)),
        [(0, 6, 2, 0), (1, 6, 1, 2)],
        [(2, 6, 2, 0), (1, 7, 1, 2)],
    ],
    5: [
        *([(vector, 0, 5, 0)] for vector in range(5)),
        [(0, 5, 3, 0), (3, 5, 2, 3)],
        [(1, 5, 3, 0), (4, 5, 2, 3)],
        [(2, 5, 3, 0), (3, 7, 1, 3), (4, 7, 1, 4)],
    ],
    6: [
        piece
        for first in (0, 3)
        for piece in (
            *([(first + vector, 0, 6, 0)] for vector in range(3)),
            [(first, 6, 2, 4), (first + 1, 6, 2, 2), (first + 2, 6, 2, 0)],
        )
    ],
}
"""By the bits of a code: for each of 8 codes its pieces, (vector, from which bit on, how many bits, to which bit)."""


def take(place: Place, at: int, bits: int) -> list[Lanes]:
    """The 8 vectors of codes whose dense form stands at an offset."""
    vectors = [place.load(i8x32, at + 32 * number) for number in range(bits)]

    def piece(vector: int, bit: int, width: int, to: int) -> Lanes:
        moved = vectors[vector] >> (bit - to) if bit >= to else vectors[vector] << (to - bit)
        return moved & (((1 << width) - 1) << to)

    return [functools.reduce(operator.or_, [piece(*each) for each in pieces]) for pieces in _PIECES[bits]]


def put(codes: list[Lanes], place: Place, at: int, bits: int) -> None:
    """Store 8 vectors of codes so that `take` gives them back."""
    vectors: list[list[Lanes]] = [[] for _ in range(bits)]
    for code, pieces in zip(codes, _PIECES[bits], strict=True):
        for vector, bit, width, to in pieces:
            vectors[vector].append(((code >> to) & ((1 << width) - 1)) << bit)
    for number, parts in enumerate(vectors):
        place.store(functools.reduce(operator.or_, parts), at + 32 * number)


class Dense(Layout):
    """A layout whose codes are kept densely in place of a file's, which take as many bytes but stand otherwise."""

    bits: ClassVar[int]
    codes_at: ClassVar[int]
    """Where the codes stand in a block of a tile."""

    @abstractmethod
    def file_codes(self, place: Place, part: int) -> list[Lanes]:
        """As `codes`, of the file's fields interleaved over the rows."""

    def codes(self, place: Place, part: int) -> list[Lanes]:
        return take(place, self.codes_at + 32 * self.bits * part, self.bits)

    def condense(self, packed: Bytes) -> None:
        """Rewrite the codes of all blocks, uint8[n * block_bytes], from the file's form."""
        self._condense(packed.ctypes.data, packed.size // self.block_bytes)

    @functools.cached_property
    def _condense(self) -> Any:
        size, space = self.block_bytes, stack(self.block_bytes)

        @intrinsic
        def rewrite(_context: Any, source: Any, block: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                source, block = (Place(builder, address) for address in arguments)
                for part in range(self.block // 32):
                    source.keep_order()
                    put(self.file_codes(source, part), block, self.codes_at + 32 * self.bits * part, self.bits)
                return context.get_dummy_value()

            return types.void(types.int64, types.int64), generate

        @kernel("void(int64, int64)", name=f"condense_{self.name}")
        def condense(block: Any, count: Any) -> None:
            copy = space()
            for _ in range(count):
                memory.copy(copy, block, size)
                rewrite(copy, block)
                block += size

        return condense
