"""The LUT coding: activations as tables of subset sums, for weights of one bit (or two, as two planes of bits).

The integers are those of the A8 coding. A token is a run of records, one per 128 values:

    header 64 bytes | 16 tables of 64 bytes, one per 8 values

A table serves the two nibbles of a weight byte: for each nibble value n it holds T(n) = the sum of |q| over the values
whose weight bit agrees with their sign (bit 1 and q > 0, or bit 0 and q < 0), so 0 <= T(n) <= 508. It is stored as
T & 31 and T >> 5, 16 bytes each: first both for the low nibble, then both for the high one. Over the 8 tables of 32
values the low parts sum to at most 248 and the high parts to at most 120: they can be added as bytes.

With S = sum of T over 32 values, A = sum |q|, N = sum of |q| over negative q:

    sum of +-q (bit 1: +)                = 2 S - A
    sum of (b0 + 2 b1 - 1) q, two planes = S0 + 2 S1 - (A + N)

The four scales d of a record become integers s = round(32767 d / D) of the largest, D, so that all the arithmetic of a
record is integer: sum of s (2 S - A), exact in int32. One float32, D / 32767, turns it back. The rounded scales are the
activation's scales by definition, in every kernel of this coding; they differ from d by 1.5e-5 of the largest, some 130
times less than the rounding of the activations to int8.

The vectors must be finite: other values give meaningless records, never an access out of bounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from prism_core.kernels import memory, simd
from prism_core.kernels.coding import A8_BLOCK, ENCODE, Coding, parted32, spread
from prism_core.kernels.jit import device, entry

RECORD_VALUES = 128
HEADER, TABLE = 64, 64
RECORD = HEADER + RECORD_VALUES // 8 * TABLE
SCALES, SCALE, BITS_OFFSET, BIT_OFFSETS, CODE_OFFSETS = 0, 8, 12, 16, 32
"""Header: s int16[4]; D / 32767 float32; -sum of s A; -s A int32[4]; -sum of s (A + N) over 64 values, int32[2]."""

LEVELS = 32767
_GROUPS = RECORD_VALUES // A8_BLOCK
_MAGNITUDES, _SUMS, _NEGATIVES = 16, 32, 48
"""Where the header keeps d, A and N of its groups while it is made."""
_SCRATCH = HEADER + 12 * TABLE
"""Where the 8 bytes |q| and 8 sign bytes of every column wait: under the last four tables, each made after its use."""


def _of_entries(pick: Any) -> list[int]:
    """A byte for each of 2 nibbles x 16 entries x 2 values."""
    return [pick(nibble, entry, value) for nibble in (0, 4) for entry in range(16) for value in (0, 1)]


_bits01 = simd.constant(simd.i8x64, _of_entries(lambda nibble, n, k: n >> k & 1))
_bits23 = simd.constant(simd.i8x64, _of_entries(lambda nibble, n, k: n >> k + 2 & 1))
_sizes01, _sizes23, _signs01, _signs23 = (
    simd.shuffle(_of_entries(lambda nibble, n, k, first=first: first + nibble + k)) for first in (0, 2, 8, 10)
)
_parts = simd.shuffle([16 * nibble + n + part for nibble in (0, 1) for part in (0, 32) for n in range(16)])
_by_column = simd.shuffle([part + column + i for column in range(0, 32, 8) for part in (0, 32) for i in range(8)])


@device
def _quantize(source: Any, scratch: Any) -> Any:
    """32 values -> |q| and signs (1: negative) at `scratch`; gives (d, A, N)."""
    size, signs, scale, negative = parted32(source)
    one = simd.splat_i8x32(1)
    simd.store(scratch, _by_column(size, simd.and_(signs, one)))
    total = simd.sum_lanes(simd.maddwd(simd.maddubs(size, one), simd.splat_i16x16(1)))
    return scale, total, negative


@device
def _level(scale: Any, largest: Any) -> Any:
    """The integer s of a scale."""
    if largest == np.float32(0.0):
        return 0
    return simd.extract(simd.round_i32(simd.splat_f32x8(scale / largest * np.float32(LEVELS))), 0)


@device
def _encode_header(source: Any, groups: Any, record: Any) -> None:
    largest = np.float32(0.0)
    for group in range(_GROUPS):
        scratch = record + _SCRATCH + 2 * A8_BLOCK * group
        scale, total, negative = np.float32(0.0), 0, 0
        if group < groups:
            scale, total, negative = _quantize(source + 4 * A8_BLOCK * group, scratch)
            largest = max(largest, scale)
        else:
            memory.fill(scratch, 0, 2 * A8_BLOCK)
        memory.store_f32(record + _MAGNITUDES + 4 * group, scale)
        memory.store_i32(record + _SUMS + 4 * group, total)
        memory.store_i32(record + _NEGATIVES + 4 * group, negative)
    bits, codes_first, codes_last = 0, 0, 0
    for group in range(_GROUPS):
        level = _level(memory.load_f32(record + _MAGNITUDES + 4 * group), largest)
        bit = level * memory.load_i32(record + _SUMS + 4 * group)
        code = bit + level * memory.load_i32(record + _NEGATIVES + 4 * group)
        memory.store_i16(record + SCALES + 2 * group, level)
        memory.store_i32(record + BIT_OFFSETS + 4 * group, -bit)
        bits += bit
        if group < _GROUPS // 2:
            codes_first += code
        else:
            codes_last += code
    memory.store_f32(record + SCALE, largest / np.float32(LEVELS))
    memory.store_i32(record + BITS_OFFSET, -bits)
    memory.store_i32(record + CODE_OFFSETS, -codes_first)
    memory.store_i32(record + CODE_OFFSETS + 4, -codes_last)


@device
def _store_table(values: Any, table: Any) -> None:
    """The table of 8 values whose |q| are at `values`, and their signs after them."""
    v = simd.load_i8x16(values)
    first = simd.maddubs(_sizes01(v, v), simd.xor(_bits01(), _signs01(v, v)))
    sums = simd.add(first, simd.maddubs(_sizes23(v, v), simd.xor(_bits23(), _signs23(v, v))))
    low = simd.narrow_i8(simd.and_(sums, simd.splat_i16x32(31)))
    simd.store(table, _parts(low, simd.narrow_i8(simd.shr(sums, 5))))


@entry(ENCODE)
def encode_lut(x: Any, cols: Any, n_tokens: Any, x_stride: Any, out: Any, out_stride: Any) -> None:
    for token in range(n_tokens):
        source, record = x + token * x_stride, out + token * out_stride
        for begin in range(0, cols, RECORD_VALUES):
            groups = min(_GROUPS, (cols - begin) // A8_BLOCK)
            _encode_header(source + 4 * begin, groups, record)
            for column in range(RECORD_VALUES // 8):
                _store_table(record + _SCRATCH + 16 * column, record + HEADER + TABLE * column)
            record += RECORD


def _lut_bytes(cols: int) -> int:
    return spread(-(-cols // RECORD_VALUES) * RECORD)


LUT = Coding("lut", A8_BLOCK, _lut_bytes, encode_lut)
