"""The symbolic parts of a graph: what an operation may name before anything has an address."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from prism_core.kernels.coding import Coding

BLOCKS = -1
"""A span that stands for the number of blocks of attention in a call."""
PAGE_TOKENS = 32
"""Positions of one page of the KV cache, and keys of one tile of attention."""


def round_up(count: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-count // step) * step


@dataclass(frozen=True)
class Buffer:
    """float32 [tokens, width] in the scratch arena. Buffers of one name share their memory."""

    name: str
    width: int

    @property
    def pitch(self) -> int:
        """Floats from one token to the next: rows are whole vectors of 16."""
        return round_up(self.width, 16)


@dataclass(frozen=True)
class Encoded:
    """`buffer` in an activation coding."""

    buffer: Buffer
    coding: Coding


@dataclass(frozen=True)
class Stride:
    """Bytes from one token to the next of an encoded buffer."""

    of: Encoded


@dataclass(frozen=True)
class Encoder:
    """The address of the entry that makes `coding`."""

    coding: Coding


@dataclass(frozen=True)
class Weight:
    """A tensor of the file: the address of its packed form (matrix) or of its float32 values (vector)."""

    name: str


@dataclass(frozen=True)
class FamilyEntry:
    """The address of the `matmul` or `row` entry of the family that serves tensor `name`."""

    name: str
    entry: str


@dataclass(frozen=True)
class Workspace:
    """The address of the scratch of thread 0; that of the others follows. Its content does not outlive an operation."""


@dataclass(frozen=True)
class Partials:
    """The address of what the segments of one token's attention leave for joining."""


@dataclass(frozen=True)
class PageOffset:
    """Bytes from the start of a page to the first key of the layer that has `elements` elements before it."""

    elements: int


Argument = (
    int
    | float
    | Buffer
    | Encoded
    | Stride
    | Encoder
    | Weight
    | FamilyEntry
    | Workspace
    | Partials
    | PageOffset
    | np.ndarray[Any, Any]
)


@dataclass(frozen=True)
class Operation:
    """A kernel of `kernels/operations.py` with its arguments, and units x ceil(tokens / span) units of work, or units x
    the blocks of attention where the span is `BLOCKS`."""

    kernel: str
    arguments: tuple[Argument, ...]
    units: int = 1
    span: int = 1
    tiles_of: str = ""
    """When set, the units are the row tiles of this tensor."""


@dataclass
class Phase:
    """Operations between two barriers. A split concatenates the units of its operations, a chain shares them."""

    operations: list[Operation]
    split: bool


@dataclass(frozen=True)
class TensorUse:
    """How a graph reads a tensor: as a packed matrix of rows x cols, or as `cols` float32 values within [low, high]."""

    rows: int
    cols: int
    matrix: bool
    low: float = -math.inf
    high: float = math.inf


@dataclass(frozen=True)
class CacheLayer:
    """One attention layer of a page: for each head K [head_dim][32], then V [32][value_row]."""

    heads: int
    head_dim: int

    @property
    def value_row(self) -> int:
        """Elements from one position's V to the next."""
        return round_up(self.head_dim, 32)

    @property
    def elements(self) -> int:
        """Of one page."""
        return self.heads * PAGE_TOKENS * (self.head_dim + self.value_row)
