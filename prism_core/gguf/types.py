"""Tensor types of GGUF files: ids, block sizes, and where the scales stand in a block.

Invariant: a `TensorType` is resolved. The ids 40 and 42 mean different blocks in different eras of the format; which
one a file means is decided by `spans.py`, and from there on nobody needs the id. Types with `supported` false are
known by size only, so that a file which holds them can be described and refused by name.
"""

from __future__ import annotations

from enum import Enum

F16_SCALE, F32_VALUES, F16_VALUES, BF16_VALUES, E8M0_SCALE = "f16", "F32", "F16", "BF16", "e8m0"


class TensorType(Enum):
    """One block layout.

    `id` is the number a current writer uses, `block_size` the elements of a block along ne[0], `block_bytes` its bytes,
    `scales` the byte offsets of its float scales inside the block, and `supported` says whether Prism can decode it.
    """

    F32 = (0, 1, 4, (0,))
    F16 = (1, 1, 2, (0,))
    Q4_0 = (2, 32, 18, (0,))
    Q4_1 = (3, 32, 20, (0, 2))
    Q5_0 = (6, 32, 22, (0,))
    Q5_1 = (7, 32, 24, (0, 2))
    Q8_0 = (8, 32, 34, (0,))
    Q8_1 = (9, 32, 36, None)
    Q2_K = (10, 256, 84, (80, 82))
    Q3_K = (11, 256, 110, (108,))
    Q4_K = (12, 256, 144, (0, 2))
    Q5_K = (13, 256, 176, (0, 2))
    Q6_K = (14, 256, 210, (208,))
    Q8_K = (15, 256, 292, None)
    IQ2_XXS = (16, 256, 66, None)
    IQ2_XS = (17, 256, 74, None)
    IQ3_XXS = (18, 256, 98, None)
    IQ1_S = (19, 256, 50, None)
    IQ4_NL = (20, 32, 18, (0,))
    IQ3_S = (21, 256, 110, None)
    IQ2_S = (22, 256, 82, None)
    IQ4_XS = (23, 256, 136, None)
    I8 = (24, 1, 1, None)
    I16 = (25, 1, 2, None)
    I32 = (26, 1, 4, None)
    I64 = (27, 1, 8, None)
    F64 = (28, 1, 8, None)
    IQ1_M = (29, 256, 56, None)
    BF16 = (30, 1, 2, (0,))
    TQ1_0 = (34, 256, 54, (52,))
    TQ2_0 = (35, 256, 66, (64,))
    MXFP4 = (39, 32, 17, (0,))
    NVFP4 = (40, 64, 36, None)
    Q1_0_V1 = (40, 32, 6, (0,))
    Q1_0 = (41, 128, 18, (0,))
    Q2_0 = (42, 64, 18, (0,))
    PQ2_0 = (142, 128, 34, (0,))
    PTQ1_0 = (143, 128, 28, (26,))

    id: int
    block_size: int
    block_bytes: int
    scales: tuple[int, ...]
    supported: bool

    def __init__(self, id: int, block_size: int, block_bytes: int, scales: tuple[int, ...] | None) -> None:
        self.id = id
        self.block_size = block_size
        self.block_bytes = block_bytes
        self.scales = scales or ()
        self.supported = scales is not None

    def __repr__(self) -> str:
        return f"TensorType.{self.name}"

    @property
    def scale_form(self) -> str:
        """How a number at `scales` is stored: plain values for F32, F16 and BF16, else an f16 or e8m0 scale."""
        plain = {TensorType.F32: F32_VALUES, TensorType.F16: F16_VALUES, TensorType.BF16: BF16_VALUES}
        return plain.get(self, E8M0_SCALE if self is TensorType.MXFP4 else F16_SCALE)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.block_bytes / self.block_size

    def nbytes(self, elements: int) -> int:
        """Bytes of `elements` values, which must be a multiple of the block size."""
        if elements % self.block_size:
            raise ValueError(f"{elements} elements are not a multiple of the {self.name} block of {self.block_size}")
        return elements // self.block_size * self.block_bytes


AMBIGUOUS: dict[int, tuple[TensorType, TensorType]] = {
    40: (TensorType.NVFP4, TensorType.Q1_0_V1),
    42: (TensorType.Q2_0, TensorType.PQ2_0),
}
"""Ids with two meanings, today's first. A legacy id-42 block of 128 weights is byte for byte a PQ2_0 block."""

BY_ID: dict[int, TensorType] = {t.id: t for t in TensorType if t.id not in AMBIGUOUS}
"""The type of every id with one meaning."""

REMOVED_IDS = frozenset({4, 5, 31, 32, 33, 36, 37, 38})
"""Ids that older files used and that no current reader accepts."""

SUPPORTED: tuple[TensorType, ...] = tuple(t for t in TensorType if t.supported)
"""Every type that `dequantize` decodes."""
