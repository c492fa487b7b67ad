"""Exact decoding of every supported tensor type to float32, in numpy.

Invariant: each value is computed by the float32 operations of the type's definition in their order (a product of two
scales is rounded before it meets the quantum, a minimum is subtracted last, nothing is fused), so results are equal to
the reference decoder bit for bit. Work goes in pieces of a bounded number of blocks, so that temporaries stay small
beside the output. This is the definition that kernels are tested against; it is not meant to be fast.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from . import kquants
from .types import TensorType

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

PIECE_ELEMENTS = 1 << 18

IQ4_NL_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
"""The sixteen levels of IQ4_NL."""

MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)
"""The sixteen levels of MXFP4, doubled so that they are whole; the scale is halved to match."""


def dequantize(kind: TensorType, data: Bytes, count: int) -> Floats:
    """The first `count` values of `data` (uint8, 1-D) as float32[count].

    `count` must be a multiple of the type's block size. Raises ValueError where it is not, where `data` is too short,
    or where the type is not supported.
    """
    decode = _DECODERS.get(kind)
    if decode is None:
        raise ValueError(f"{kind.name} tensors cannot be decoded")
    nbytes = kind.nbytes(count)
    if count < 0 or data.size < nbytes:
        raise ValueError(f"{count} {kind.name} values need {nbytes} bytes, not {data.size}")
    blocks = np.ascontiguousarray(data[:nbytes], dtype=np.uint8).reshape(-1, kind.block_bytes)
    out = np.empty((len(blocks), kind.block_size), dtype=np.float32)
    step = max(1, PIECE_ELEMENTS // kind.block_size)
    with np.errstate(over="ignore", invalid="ignore"):  # a NaN or infinite scale is decoded as it is
        for begin in range(0, len(blocks), step):
            out[begin : begin + step] = decode(blocks[begin : begin + step])
    return out.reshape(count)


def _f16(blocks: Bytes, at: int) -> Floats:
    """The f16 at byte `at` of every block, as float32[n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(qs: Bytes) -> Bytes:
    """uint8[n, 16] to uint8[n, 32]: all low nibbles, then all high ones."""
    return np.concatenate([qs & 15, qs >> 4], axis=1)


def _f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4").astype(np.float32)


def _half(blocks: Bytes) -> Floats:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    return (_nibbles(blocks[:, 2:]).astype(np.int8) - np.int8(8)).astype(np.float32) * _f16(blocks, 0)


def _q4_1(blocks: Bytes) -> Floats:
    return _nibbles(blocks[:, 4:]).astype(np.float32) * _f16(blocks, 0) + _f16(blocks, 2)


def _q5(qh: Bytes, qs: Bytes) -> Bytes:
    """Five-bit quanta: nibbles and the 32 fifth bits, least significant first."""
    return _nibbles(qs) | (np.unpackbits(qh, axis=1, bitorder="little") << np.uint8(4))


def _q5_0(blocks: Bytes) -> Floats:
    q = _q5(blocks[:, 2:6], blocks[:, 6:]).astype(np.int8) - np.int8(16)
    return q.astype(np.float32) * _f16(blocks, 0)


def _q5_1(blocks: Bytes) -> Floats:
    return _q5(blocks[:, 4:8], blocks[:, 8:]).astype(np.float32) * _f16(blocks, 0) + _f16(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _f16(blocks, 0)


def _iq4_nl(blocks: Bytes) -> Floats:
    return IQ4_NL_VALUES[_nibbles(blocks[:, 2:])] * _f16(blocks, 0)


def _mxfp4(blocks: Bytes) -> Floats:
    e = blocks[:, :1].astype(np.uint32)
    # 2^(e-128): below the normal range (e < 2) the bit is shifted inside the mantissa.
    bits = np.where(e < 2, np.uint32(0x00200000) << e, (np.maximum(e, 1) - 1) << 23)
    return MXFP4_VALUES[_nibbles(blocks[:, 1:])] * bits.astype(np.uint32).view(np.float32)


def _q1_0(blocks: Bytes) -> Floats:
    """Bit 1 is +d and bit 0 is -d, least significant bit first."""
    d = _f16(blocks, 0)
    return np.where(np.unpackbits(blocks[:, 2:], axis=1, bitorder="little"), d, -d)


def _two_bits(qs: Bytes) -> NDArray[np.int8]:
    """uint8[n, b] to int8[n, 4b]: codes 0 to 3 less one, lowest bits first."""
    codes = (qs[:, :, None] >> np.array([0, 2, 4, 6], dtype=np.uint8)) & 3
    return codes.reshape(len(qs), -1).astype(np.int8) - np.int8(1)


def _q2_0(blocks: Bytes) -> Floats:
    return _two_bits(blocks[:, 2:]).astype(np.float32) * _f16(blocks, 0)


def _base3(qs: Bytes, digits: int) -> NDArray[np.int8]:
    """uint8[n, m] to int8[n, digits * m]: the first (top) digit of every byte, then the second..."""
    powers = np.array([1, 3, 9, 27, 81], dtype=np.uint8)[:digits]
    shifted = qs[:, None, :] * powers[None, :, None]
    digit = (shifted.astype(np.uint16) * 3) >> 8
    return digit.reshape(len(qs), -1).astype(np.int8) - np.int8(1)


def _ptq1_0(blocks: Bytes) -> Floats:
    parts = [_base3(blocks[:, :16], 5), _base3(blocks[:, 16:24], 5), _base3(blocks[:, 24:26], 4)]
    return np.concatenate(parts, axis=1).astype(np.float32) * _f16(blocks, 26)


def _tq1_0(blocks: Bytes) -> Floats:
    parts = [_base3(blocks[:, :32], 5), _base3(blocks[:, 32:48], 5), _base3(blocks[:, 48:52], 4)]
    return np.concatenate(parts, axis=1).astype(np.float32) * _f16(blocks, 52)


def _tq2_0(blocks: Bytes) -> Floats:
    qs = blocks[:, :64].reshape(-1, 2, 1, 32)
    codes = (qs >> np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)) & 3
    return (codes.reshape(-1, 256).astype(np.int8) - np.int8(1)).astype(np.float32) * _f16(blocks, 64)


_DECODERS: dict[TensorType, Callable[[Bytes], Floats]] = {
    TensorType.F32: _f32,
    TensorType.F16: _half,
    TensorType.BF16: _bf16,
    TensorType.Q4_0: _q4_0,
    TensorType.Q4_1: _q4_1,
    TensorType.Q5_0: _q5_0,
    TensorType.Q5_1: _q5_1,
    TensorType.Q8_0: _q8_0,
    TensorType.Q2_K: kquants.q2_k,
    TensorType.Q3_K: kquants.q3_k,
    TensorType.Q4_K: kquants.q4_k,
    TensorType.Q5_K: kquants.q5_k,
    TensorType.Q6_K: kquants.q6_k,
    TensorType.IQ4_NL: _iq4_nl,
    TensorType.MXFP4: _mxfp4,
    TensorType.TQ1_0: _tq1_0,
    TensorType.TQ2_0: _tq2_0,
    TensorType.Q1_0_V1: _q1_0,
    TensorType.Q1_0: _q1_0,
    TensorType.Q2_0: _q2_0,
    TensorType.PQ2_0: _q2_0,
    TensorType.PTQ1_0: _ptq1_0,
}
