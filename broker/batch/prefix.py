"""Which lines begin alike, found without keeping their texts.

Of each line four checksums stay: of its first 256, 1,024, 4,096 and 16,384 characters. Lines are put in the order of a
walk through the tree of these beginnings, in which a branch comes where its first line stands in the file; lines that
share at least the first beginning are a family. Kept: the order is a permutation, and the same at every run.
Not promised: families of lines that share less than 256 characters, or that a collision of checksums never joins two.
"""

from __future__ import annotations

import zlib
from array import array

__all__ = ["ALONE", "LONGEST", "Prefixes"]

LEVELS = (256, 1024, 4096, 16384)
LONGEST = LEVELS[-1]
ALONE = 0xFFFFFFFF
"""The family of a line that has none."""


class Prefixes:
    """Fed with the beginning of each line, in their order in the file."""

    def __init__(self) -> None:
        self._sums = [array("I") for _ in LEVELS]

    def add(self, text: str) -> None:
        """`text`: the line's first `LONGEST` characters, or all."""
        total, begin = 0, 0
        for level, end in zip(self._sums, LEVELS, strict=True):
            total = zlib.crc32(text[begin:end].encode(errors="surrogatepass"), total)
            level.append(total)
            begin = end

    def order(self) -> tuple[array[int], array[int]]:
        """Line indices in the order of the walk, and the family of each line (by index), or `ALONE`."""
        count = len(self._sums[0])
        keys = [0] * count
        families = array("I", [ALONE]) * count
        for depth, sums in enumerate(self._sums):
            first: dict[int, int] = {}
            for index, value in enumerate(sums):
                branch = first.setdefault(value, index)
                keys[index] = keys[index] << 32 | branch
                if depth == 0 and branch != index:
                    families[branch] = families[index] = branch
        return array("I", sorted(range(count), key=keys.__getitem__)), families
