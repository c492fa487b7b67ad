"""How activations are encoded before a matrix product: once per vector, shared by all matrices that read it.

A8: int8 per 32 values, by the rule of llama.cpp on x86: d = amax / 127 and q = round-half-even(x * (127 / amax)),
with d kept as float32. A block whose largest magnitude is below 2^-118 counts as zero (127 / amax would overflow).
A token is a run of 48-byte records, one per 32 values:

    q int8[32] | d float32 | d * sum float32 | -sum int32 | -(sum of the last 16) int32

A8_PARTED: the same q and d with sizes and signs apart, for codes with a sign where a processor multiplies only unsigned
by signed bytes. Records of 72 bytes, in which s is -1 where q is negative, else 0, and N is the sum of |q| there:

    |q| uint8[32] | d float32 | LIFT + N int32 | s int8[32]

For any code c, c ^ s is c or -c - 1, so sum(c * q) = sum((c ^ s) * |q|) + N: no code has to be negated, which could
overflow and which only some of a processor's units can do. LIFT is the integer whose bits are those of the float32
1.5 * 2^23: sums of magnitude below 2^22 that start there are the bits of float32 values, and need no conversion.

F32: the vector itself; a kernel of this coding may be given the plain activations with their own stride.

The vectors must be finite: other values give meaningless records, never an access out of bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from prism_core.kernels import memory, simd
from prism_core.kernels.jit import Entry, device, entry

A8_BLOCK = 32
A8_RECORD = 48
A8_SCALE, A8_SCALED_SUM, A8_NEGATED_SUM, A8_NEGATED_HIGH_SUM = 32, 36, 40, 44
"""Bytes of a record, and where its numbers stand."""

PARTED_RECORD = 72
PARTED_START, PARTED_SIGNS = 36, 40
"""Bytes of a parted record, and where its own fields stand; the scale is at `A8_SCALE`."""
LIFT, LIFTED = 0x4B400000, 1.5 * 2.0**23
"""The same 32 bits as an integer and as a float32."""

ENCODE = "void(int64, int64, int64, int64, int64, int64)"
_TINY = np.float32(2.0**-118)
_RANGE = np.float32(127.0)


@dataclass(frozen=True)
class Coding:
    """One encoding. `encode(x, cols, n_tokens, x_stride, out, out_stride)`: addresses, and strides in bytes."""

    name: str
    block: int
    """`cols` must be a multiple of this."""
    coding_bytes: Callable[[int], int]
    """Bytes of one encoded vector of `cols` values; also a good `out_stride`."""
    encode: Entry


def spread(size: int) -> int:
    """`size` rounded up to an odd number of cache lines, so that rows at this stride do not share cache sets."""
    return (size + 63) // 64 * 64 + (64 if (size + 63) // 64 % 2 == 0 else 0)


@device
def quantize32(x: Any) -> Any:
    """32 float32 at `x` -> (four i32x8 of integers in -127..127, their scale float32)."""
    a, b, c, d = simd.load_f32x8(x), simd.load_f32x8(x + 32), simd.load_f32x8(x + 64), simd.load_f32x8(x + 96)
    ab = simd.maximum(simd.absolute(a), simd.absolute(b))
    cd = simd.maximum(simd.absolute(c), simd.absolute(d))
    largest = simd.max_lanes(simd.maximum(ab, cd))
    inverse = np.float32(0.0)
    if largest >= _TINY:
        inverse = _RANGE / largest
    factor = simd.splat_f32x8(inverse)
    qa, qb = simd.round_i32(simd.mul(a, factor)), simd.round_i32(simd.mul(b, factor))
    qc, qd = simd.round_i32(simd.mul(c, factor)), simd.round_i32(simd.mul(d, factor))
    return qa, qb, qc, qd, largest / _RANGE


@entry(ENCODE)
def encode_a8(x: Any, cols: Any, n_tokens: Any, x_stride: Any, out: Any, out_stride: Any) -> None:
    for token in range(n_tokens):
        source, record = x + token * x_stride, out + token * out_stride
        for _ in range(cols // A8_BLOCK):
            a, b, c, d, scale = quantize32(source)
            simd.store(record, simd.narrow_i8(a))
            simd.store(record + 8, simd.narrow_i8(b))
            simd.store(record + 16, simd.narrow_i8(c))
            simd.store(record + 24, simd.narrow_i8(d))
            high = simd.sum_lanes(simd.add(c, d))
            total = simd.sum_lanes(simd.add(a, b)) + high
            memory.store_f32(record + A8_SCALE, scale)
            memory.store_f32(record + A8_SCALED_SUM, scale * np.float32(total))
            memory.store_i32(record + A8_NEGATED_SUM, -total)
            memory.store_i32(record + A8_NEGATED_HIGH_SUM, -high)
            source += 4 * A8_BLOCK
            record += A8_RECORD


@device
def parted32(x: Any) -> Any:
    """32 float32 at `x` -> (|q| i8x32, i8x32 of -1 where q is negative, else 0, d, the sum of |q| where it is)."""
    a, b, c, d, scale = quantize32(x)
    q = simd.narrow_i8(simd.concat(simd.concat(a, b), simd.concat(c, d)))
    size, signs = simd.absolute(q), simd.less(q, simd.splat_i8x32(0))
    negated = simd.sum_lanes(simd.maddwd(simd.maddubs(size, signs), simd.splat_i16x16(1)))
    return size, signs, scale, -negated


@entry(ENCODE)
def encode_a8_parted(x: Any, cols: Any, n_tokens: Any, x_stride: Any, out: Any, out_stride: Any) -> None:
    for token in range(n_tokens):
        source, record = x + token * x_stride, out + token * out_stride
        for _ in range(cols // A8_BLOCK):
            size, signs, scale, negative = parted32(source)
            simd.store(record, size)
            memory.store_f32(record + A8_SCALE, scale)
            memory.store_i32(record + PARTED_START, LIFT + negative)
            simd.store(record + PARTED_SIGNS, signs)
            source += 4 * A8_BLOCK
            record += PARTED_RECORD


@entry(ENCODE)
def encode_f32(x: Any, cols: Any, n_tokens: Any, x_stride: Any, out: Any, out_stride: Any) -> None:
    for token in range(n_tokens):
        memory.copy(out + token * out_stride, x + token * x_stride, 4 * cols)


def _a8_bytes(cols: int) -> int:
    return spread(cols // A8_BLOCK * A8_RECORD)


def _parted_bytes(cols: int) -> int:
    return spread(cols // A8_BLOCK * PARTED_RECORD)


def _f32_bytes(cols: int) -> int:
    return spread(4 * cols)


A8 = Coding("a8", A8_BLOCK, _a8_bytes, encode_a8)
A8_PARTED = Coding("a8_parted", A8_BLOCK, _parted_bytes, encode_a8_parted)
F32 = Coding("f32", 1, _f32_bytes, encode_f32)
