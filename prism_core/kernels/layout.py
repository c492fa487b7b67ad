"""What a weight layout says of itself; see `tiles` for the arithmetic that uses it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from prism_core.kernels.coding import A8, A8_PARTED, A8_RECORD, PARTED_RECORD, Coding
from prism_core.kernels.staging import Lanes, Place


class Layout(ABC):
    """How a block of a tile is laid out, and how codes, scales and minimums come out of it."""

    name: ClassVar[str]
    block: ClassVar[int] = 32
    """Columns of a block, a multiple of 32."""
    block_bytes: ClassVar[int]
    """Bytes of a block of a tile (8 rows)."""
    scales_per_32: ClassVar[int] = 1
    minimums_per_32: ClassVar[int] = 0
    largest: ClassVar[int]
    """The largest code; codes are unsigned bytes unless `signed`."""
    offset: ClassVar[int] = 0
    """What is subtracted from a code to get its value: 0 or a power of two."""
    signed: ClassVar[bool] = False
    coding: ClassVar[Coding] = A8
    """Of the activations: `A8`, or for signed codes `A8_PARTED`."""
    streams: ClassVar[int] = 2
    """Tiles decoded side by side for few tokens, from far apart in the weights: one sequential reader cannot keep as
    many lines of memory in flight as a core may have. What decodes a block with many instructions has the registers
    for two."""
    ahead: ClassVar[int] = 8192
    """How far ahead each stream's weights are asked for, in bytes; 0 leaves it to the processor, which finds the
    streams by itself where the arithmetic does not hold it up."""

    @property
    def parted(self) -> bool:
        """Whether sizes and signs of the activations are apart."""
        return self.coding is A8_PARTED

    @property
    def act_bytes(self) -> int:
        """Bytes of the activations' record of 32 columns."""
        return PARTED_RECORD if self.parted else A8_RECORD

    @abstractmethod
    def codes(self, place: Place, part: int) -> list[Lanes]:
        """Eight i8x32 for the `part`-th 32 columns: vector j has, row by row, the codes of columns 4j to 4j + 3."""

    @abstractmethod
    def scales(self, place: Place, part: int) -> list[Lanes]:
        """`scales_per_32` f32x8."""

    def minimums(self, place: Place, part: int) -> list[Lanes]:
        """`minimums_per_32` f32x8, to be added."""
        return []
