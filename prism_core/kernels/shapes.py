"""Conversions between vector types, and lanes moved about; part of `simd`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types

from prism_core.kernels import forms
from prism_core.kernels.loads import (
    f32x4,
    f32x8,
    f32x16,
    i8x16,
    i8x32,
    i8x64,
    i16x8,
    i16x16,
    i16x32,
    i32x4,
    i32x8,
    i32x16,
)
from prism_core.kernels.vectors import (
    I32,
    Vector,
    halves,
    intrinsic,
    joined,
    shuffled,
    vector,
)


def _bit_cast(kind: Vector) -> Any:
    @intrinsic
    def view(_context: Any, a: Any) -> Any:
        if not isinstance(a, Vector) or a.bits != kind.bits:
            return None
        return kind(a), lambda context, builder, signature, arguments: builder.bitcast(arguments[0], kind.llvm)

    return view


as_i8x16, as_i8x32, as_i8x64, as_i16x8, as_i16x16, as_i16x32 = map(
    _bit_cast, (i8x16, i8x32, i8x64, i16x8, i16x16, i16x32)
)
as_i32x4, as_i32x8, as_i32x16, as_f32x4, as_f32x8, as_f32x16 = map(
    _bit_cast, (i32x4, i32x8, i32x16, f32x4, f32x8, f32x16)
)
"""The same bits as another type."""


def _widen(kind: Vector, name: str) -> Any:
    @intrinsic
    def widen(_context: Any, a: Any) -> Any:
        if not isinstance(a, Vector) or a.is_float or a.lanes != kind.lanes or a.width >= kind.width:
            return None
        return kind(a), lambda context, builder, signature, arguments: getattr(builder, name)(arguments[0], kind.llvm)

    return widen


zext_i16x8, zext_i16x16, zext_i16x32, zext_i32x4, zext_i32x8, zext_i32x16 = (
    _widen(kind, "zext") for kind in (i16x8, i16x16, i16x32, i32x4, i32x8, i32x16)
)
sext_i16x8, sext_i16x16, sext_i16x32, sext_i32x4, sext_i32x8, sext_i32x16 = (
    _widen(kind, "sext") for kind in (i16x8, i16x16, i16x32, i32x4, i32x8, i32x16)
)
"""Wider integers of the same count, without and with sign."""


@intrinsic
def narrow_i8(_context: Any, a: Any) -> Any:
    """The low byte of every lane."""
    if not isinstance(a, Vector) or a.is_float or a.width == 8:
        return None
    kind = vector("i8", a.lanes)
    return kind(a), lambda context, builder, signature, arguments: builder.trunc(arguments[0], kind.llvm)


@intrinsic
def to_f32(_context: Any, a: Any) -> Any:
    """int32 lanes (rounded to nearest even) or float16 lanes (exact) as float32."""
    if not isinstance(a, Vector) or a.element not in ("i32", "f16"):
        return None
    kind = vector("f32", a.lanes)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if a.element == "f16":
            return forms.half_to_float(builder, arguments[0])
        return builder.sitofp(arguments[0], kind.llvm)

    return kind(a), generate


@intrinsic
def to_f64(_context: Any, a: Any) -> Any:
    """float32 lanes as float64, exact."""
    if not isinstance(a, Vector) or a.element != "f32":
        return None
    kind = vector("f64", a.lanes)
    return kind(a), lambda context, builder, signature, arguments: builder.fpext(arguments[0], kind.llvm)


@intrinsic
def to_f16(_context: Any, a: Any) -> Any:
    """float32 lanes as float16, to nearest even."""
    if not isinstance(a, Vector) or a.element != "f32":
        return None
    kind = vector("f16", a.lanes)
    return kind(a), lambda context, builder, signature, arguments: forms.float_to_half(builder, arguments[0])


@intrinsic
def round_i32(_context: Any, a: Any) -> Any:
    """float32 lanes of magnitude below 2^22 as int32, to nearest even."""
    if not isinstance(a, Vector) or a.element != "f32":
        return None
    kind = vector("i32", a.lanes)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # Adding 1.5 * 2^23 leaves the rounded integer in the low bits of the mantissa, on every processor alike.
        moved = builder.fadd(arguments[0], a.constant(12582912.0))
        return builder.sub(builder.bitcast(moved, kind.llvm), kind.constant(0x4B400000))

    return kind(a), generate


# Moving lanes


def shuffle(mask: Sequence[int]) -> Any:
    """Make a function (a, b) -> lanes picked from a then b by a constant mask."""
    lanes = list(mask)

    @intrinsic
    def picked(_context: Any, a: Any, b: Any) -> Any:
        if not isinstance(a, Vector) or a is not b:
            return None
        kind = vector(a.element, len(lanes))
        return kind(a, b), lambda context, builder, signature, arguments: shuffled(
            builder, arguments[0], arguments[1], lanes
        )

    return picked


def _unpack(high: bool) -> Any:
    @intrinsic
    def unpack(_context: Any, a: Any, b: Any) -> Any:
        if not isinstance(a, Vector) or a is not b or a.bits % 128:
            return None
        each = 128 // a.width
        first = each // 2 if high else 0
        mask = [
            start + lane + offset
            for start in range(0, a.lanes, each)
            for lane in range(first, first + each // 2)
            for offset in (0, a.lanes)
        ]
        return a(a, b), lambda context, builder, signature, arguments: shuffled(
            builder, arguments[0], arguments[1], mask
        )

    return unpack


unpack_low, unpack_high = _unpack(False), _unpack(True)
"""Lanes of a and b alternating, from the low (high) half of every 128 bits."""


@intrinsic
def concat(_context: Any, a: Any, b: Any) -> Any:
    """a then b as one vector of twice the lanes."""
    if not isinstance(a, Vector) or a is not b:
        return None
    kind = vector(a.element, 2 * a.lanes)
    return kind(a, b), lambda context, builder, signature, arguments: joined(builder, *arguments)


def _half(index: int) -> Any:
    @intrinsic
    def half(_context: Any, a: Any) -> Any:
        if not isinstance(a, Vector):
            return None
        kind = vector(a.element, a.lanes // 2)
        return kind(a), lambda context, builder, signature, arguments: halves(builder, arguments[0])[index]

    return half


low_half, high_half = _half(0), _half(1)


@intrinsic
def extract(_context: Any, a: Any, lane: Any) -> Any:
    """One lane as a scalar (float32 or float64, or int64 with the sign)."""
    if not isinstance(a, Vector) or a.element == "f16":
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = builder.extract_element(arguments[0], builder.trunc(arguments[1], I32))
        return value if a.is_float or a.width == 64 else builder.sext(value, ir.IntType(64))

    return a.number(a, types.int64), generate
