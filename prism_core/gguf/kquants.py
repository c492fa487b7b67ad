"""The K-quants: 256 values to a block, small integer scales per 16 or 32 values under one or two f16 scales.

Each function takes uint8[n, block_bytes] and returns float32[n, 256]. A block is two halves of 128 values, a half four
groups of 32. Scales are multiplied first (d * scale, rounded), then the quantum, then the minimum is subtracted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_PAIRS = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)


def _f16(blocks: Bytes, at: int) -> Floats:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def two_bit_groups(qs: Bytes) -> Bytes:
    """uint8[n, 64] to uint8[n, 2, 4, 32]: two-bit quanta by half, group and place."""
    return (qs.reshape(-1, 2, 1, 32) >> _PAIRS) & np.uint8(3)


def scales_and_minimums(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The eight 6-bit scales and the eight 6-bit minimums of uint8[n, 12], each uint8[n, 8]."""
    first, second, tops = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (tops & 15) | ((first >> 6) << 4)], axis=1)
    minimums = np.concatenate([second & 63, (tops >> 4) | ((second >> 6) << 4)], axis=1)
    return scales, minimums


def q3_k_scales(packed: Bytes) -> NDArray[np.int8]:
    """The sixteen 6-bit scales of uint8[n, 12], less 32, as int8[n, 16]."""
    low = np.concatenate([packed[:, 0:8] & 15, packed[:, 0:8] >> 4], axis=1)
    high = (packed[:, None, 8:12] >> np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 4, 1)) & 3
    scales: NDArray[np.int8] = (low | (high.reshape(-1, 16) << 4)).astype(np.int8) - np.int8(32)
    return scales


def q2_k(blocks: Bytes) -> Floats:
    scale = _f16(blocks, 80) * (blocks[:, :16] & 15).astype(np.float32)
    least = _f16(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32)
    q = two_bit_groups(blocks[:, 16:80]).reshape(-1, 16, 16).astype(np.float32)
    return (scale[:, :, None] * q - least[:, :, None]).reshape(-1, 256)


def q3_k(blocks: Bytes) -> Floats:
    low = two_bit_groups(blocks[:, 32:96]).astype(np.int8)
    bit = np.arange(8, dtype=np.uint8).reshape(1, 2, 4, 1)
    kept = (blocks[:, :32].reshape(-1, 1, 1, 32) >> bit) & 1
    q = (low - np.where(kept, np.int8(0), np.int8(4))).reshape(-1, 16, 16).astype(np.float32)
    scale = _f16(blocks, 108) * q3_k_scales(blocks[:, 96:108]).astype(np.float32)
    return (scale[:, :, None] * q).reshape(-1, 256)


def _affine(blocks: Bytes, quanta: Bytes) -> Floats:
    """d * sc * q - dmin * mn for uint8[n, 8, 32] quanta; d, dmin and the packed scales lead the block."""
    scales, minimums = scales_and_minimums(blocks[:, 4:16])
    scale = _f16(blocks, 0) * scales.astype(np.float32)
    least = _f16(blocks, 2) * minimums.astype(np.float32)
    return (scale[:, :, None] * quanta.astype(np.float32) - least[:, :, None]).reshape(-1, 256)


def _nibble_runs(qs: Bytes) -> Bytes:
    """uint8[n, 128] to uint8[n, 8, 32]: run r of 32 bytes holds sub-block 2r in low nibbles, 2r + 1 in high ones."""
    runs = qs.reshape(-1, 4, 1, 32)
    return ((runs >> np.array([0, 4], dtype=np.uint8).reshape(1, 1, 2, 1)) & np.uint8(15)).reshape(-1, 8, 32)


def q4_k(blocks: Bytes) -> Floats:
    return _affine(blocks, _nibble_runs(blocks[:, 16:144]))


def q5_k(blocks: Bytes) -> Floats:
    fifth = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)) & np.uint8(1)
    return _affine(blocks, _nibble_runs(blocks[:, 48:176]) | (fifth << np.uint8(4)))


def q6_k(blocks: Bytes) -> Floats:
    low = blocks[:, :128].reshape(-1, 2, 1, 2, 32) >> np.array([0, 4], dtype=np.uint8).reshape(1, 1, 2, 1, 1)
    q = (low & 15).reshape(-1, 2, 4, 32) | (two_bit_groups(blocks[:, 128:192]) << 4)
    signed = (q.astype(np.int8) - np.int8(32)).reshape(-1, 16, 16).astype(np.float32)
    scale = _f16(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (scale[:, :, None] * signed).reshape(-1, 256)
