"""The weight of a logit in a draw, as a whole number of units, so that sums are exact in whatever order they are made.

    weight(logit) = 2^40 * e^((logit - best) / temperature), rounded to nearest even

The best weighs 2^40, and what is some 28 temperatures below it weighs nothing. Everything is computed in float32, with
no fused operations, so that every processor gives the same bits: the difference, held to float32's range; its product
with the inverse temperature; the exponential, by the polynomial below. Up to 2^20 weights add up to less than 2^63.

Over many logits the exponential is made in stages, a block of the L1 cache at a time: each stage has many short chains
of operations for the processor to overlap, where the whole polynomial is one long chain that it cannot see past.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from prism_core.kernels.jit import device
from prism_core.kernels.memory import load_f32, load_i64, store_f32
from prism_core.kernels.simd import (
    add,
    as_f32x16,
    as_i32x16,
    load_f32x16,
    maximum,
    mul,
    shl,
    splat_f32x16,
    store,
    sub,
)
from prism_core.kernels.vectors import I64, Vector, intrinsic, vector

UNIT_BITS = 40
UNIT = 1 << UNIT_BITS
"""What the best logit weighs, in units."""
LANES = 16
NO_WEIGHT = 30.0
"""So many temperatures below the best nothing is left."""

_LOWEST = np.float32(-np.finfo(np.float32).max)
_FAR = np.float32(-NO_WEIGHT)
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693145751953125), np.float32(1.428606765330187e-06)
_ONE = np.float32(1.0)
_C2, _C3, _C4, _C5, _C6, _C7 = (np.float32(c) for c in (1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720, 1 / 5040))
_TURN = np.float32(1.5 * 2.0**23)  # added to a number of magnitude below 2^22 it leaves the rounded one in the low bits
_F64 = ir.DoubleType()
_SHIFT = 1.5 * 2.0 ** (52 - UNIT_BITS)  # the same for float64 and units
_SHIFT_BITS: int = struct.unpack("<q", struct.pack("<d", _SHIFT))[0]
BLOCK = 1024
"""So many weights are made together."""


@device
def _factors(inverse: Any) -> tuple[Any, Any]:
    """Two float32 whose product is `inverse`, or as far from 1 as makes no difference any more."""
    if inverse == 0 or 2.0**-100 <= inverse <= 2.0**100:
        return np.float32(inverse), _ONE
    root = np.float32(math.sqrt(min(max(inverse, 1e-76), 1e76)))
    return root, root


@intrinsic
def raw_units(_context: Any, a: Any) -> Any:
    """float32 lanes from 0 to 2^10 as int64 units, each `_SHIFT_BITS` too large: see `sum_raw`."""
    if not isinstance(a, Vector) or a.element != "f32":
        return None
    kind = vector("i64", a.lanes)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        doubles = ir.VectorType(_F64, a.lanes)
        shift = ir.Constant(doubles, [ir.Constant(_F64, _SHIFT)] * a.lanes)
        return builder.bitcast(builder.fadd(builder.fpext(arguments[0], doubles), shift), kind.llvm)

    return kind(a), generate


@intrinsic
def only(_context: Any, a: Any, mask: Any) -> Any:
    """int64 lanes where the mask (of `less`, int32) is -1, elsewhere 0."""
    if not isinstance(a, Vector) or a.element != "i64" or mask is not vector("i32", a.lanes):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.and_(arguments[0], builder.sext(arguments[1], a.llvm))

    return a(a, mask), generate


@intrinsic
def no_units(_context: Any) -> Any:
    """Sixteen int64 zeros."""
    kind = vector("i64", LANES)
    return kind(), lambda context, builder, signature, arguments: kind.constant(0)


@intrinsic
def sum_units(_context: Any, a: Any) -> Any:
    """The sum of int64 lanes."""
    if not isinstance(a, Vector) or a.element != "i64":
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        total = ir.Constant(I64, 0)
        for lane in range(a.lanes):
            total = builder.add(total, builder.extract_element(arguments[0], ir.Constant(ir.IntType(32), lane)))
        return total

    return types.int64(a), generate


@intrinsic
def _shift_bits(_context: Any) -> Any:
    kind = vector("i64", LANES)
    return kind(), lambda context, builder, signature, arguments: kind.constant(_SHIFT_BITS)


@device
def sum_raw(total: Any, count: Any) -> Any:
    """The units in lanes that are sums of `count` raw units all together."""
    return sum_units(total) - count * _SHIFT_BITS


@device
def _reduced(values: Any, best: Any, inverse: Any) -> tuple[Any, Any]:
    """Sixteen differences, by temperatures, as (a remainder of at most log(2) / 2, the power of 2 as an exponent)."""
    x = sub(values, splat_f32x16(best))
    if inverse != 1.0:
        first, second = _factors(inverse)
        x = mul(maximum(x, splat_f32x16(_LOWEST)), splat_f32x16(first))
        if second != 1.0:
            x = mul(x, splat_f32x16(second))
    x = maximum(x, splat_f32x16(_FAR))
    moved = add(mul(x, splat_f32x16(_LOG2_E)), splat_f32x16(_TURN))
    turns = sub(moved, splat_f32x16(_TURN))
    r = sub(sub(x, mul(turns, splat_f32x16(_LN2_HIGH))), mul(turns, splat_f32x16(_LN2_LOW)))
    return r, shl(as_i32x16(moved), 23)


@device
def _raised(r: Any, exponent: Any) -> Any:
    """e^r times the power of 2."""
    square, one = mul(r, r), splat_f32x16(_ONE)
    p01, p23 = add(one, r), add(splat_f32x16(_C2), mul(splat_f32x16(_C3), r))
    p45 = add(splat_f32x16(_C4), mul(splat_f32x16(_C5), r))
    p67 = add(splat_f32x16(_C6), mul(splat_f32x16(_C7), r))
    p = add(add(p01, mul(square, p23)), mul(mul(square, square), add(p45, mul(square, p67))))
    return as_f32x16(add(as_i32x16(p), exponent))


@device
def units(values: Any, best: Any, inverse: Any) -> Any:
    """The weights of sixteen logits; `inverse` is 1 / temperature, or 0, which makes all of them weigh the same."""
    r, exponent = _reduced(values, best, inverse)
    return sub(raw_units(_raised(r, exponent)), _shift_bits())


@device
def weigh(values: Any, count: Any, best: Any, inverse: Any, room: Any) -> None:
    """Write `count` weights as float32, 1 for the best, to `room`, which has twice `BLOCK` of them; `count` is a whole
    multiple of sixteen, at most `BLOCK`."""
    for at in range(0, 4 * count, 4 * LANES):
        r, exponent = _reduced(load_f32x16(values + at), best, inverse)
        store(room + at, r)
        store(room + 4 * BLOCK + at, exponent)
    for at in range(0, 4 * count, 4 * LANES):
        r, exponent = load_f32x16(room + at), as_i32x16(load_f32x16(room + 4 * BLOCK + at))
        store(room + at, _raised(r, exponent))


@device
def sixteen(logits: Any, at: Any, size: Any, padded: Any) -> Any:
    """Logits from `at` on; where fewer than sixteen are left, by way of the 64 bytes `padded`; what follows
    them says nothing."""
    if at + LANES <= size:
        return load_f32x16(logits + 4 * at)
    for lane in range(size - at):
        store_f32(padded + 4 * lane, load_f32(logits + 4 * (at + lane)))
    return load_f32x16(padded)


@device
def write_units(values: Any, count: Any, best: Any, inverse: Any, out: Any) -> None:
    """Write the weights of `count` values; both memories are whole multiples of sixteen long."""
    for at in range(0, count, LANES):
        store(out + 8 * at, units(load_f32x16(values + 4 * at), best, inverse))


@device
def mass(logits: Any, size: Any, best: Any, inverse: Any, room: Any, padded: Any, spare: Any) -> Any:
    """The sum of all weights. `room`: see `weigh`; `padded`: 64 bytes; `spare`: 128."""
    total, whole, rest = no_units(), size - size % LANES, 0
    for begin in range(0, whole, BLOCK):
        count = min(BLOCK, whole - begin)
        weigh(logits + 4 * begin, count, best, inverse, room)
        for at in range(0, 4 * count, 4 * LANES):
            total = add(total, raw_units(load_f32x16(room + at)))
    if whole < size:
        store(spare, units(sixteen(logits, whole, size, padded), best, inverse))
        for lane in range(size - whole):
            rest += load_i64(spare + 8 * lane)
    return sum_raw(total, whole) + rest
