"""The vector vocabulary of the kernels: generic LLVM vector code, with a processor's own instruction where one counts.

Types are named as in `vectors` (`i8x32`, `f32x8`, ...). Operations take vectors of any width and check their types when
a kernel is compiled. Only lookup16, lookup64, maddubs, maddwd, sign, dot_us, dot_ss, fma and the float16 conversions
depend on the processor; for arguments inside their stated range all forms of each give the same bits, but for `fma`,
which rounds once where there is hardware for it and twice elsewhere.

Loads and stores take int64 addresses and assume no alignment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types

from prism_core.kernels import forms
from prism_core.kernels.vectors import (
    I32,
    Vector,
    call,
    halves,
    intrinsic,
    joined,
    pointer,
    shuffled,
    splatted,
    vector,
)

i8x8, i8x16, i8x32, i8x64 = (vector("i8", lanes) for lanes in (8, 16, 32, 64))
i16x8, i16x16, i16x32 = (vector("i16", lanes) for lanes in (8, 16, 32))
i32x4, i32x8, i32x16 = (vector("i32", lanes) for lanes in (4, 8, 16))
f16x8, f16x16 = (vector("f16", lanes) for lanes in (8, 16))
f32x4, f32x8, f32x16 = (vector("f32", lanes) for lanes in (4, 8, 16))


# Loads, stores and constants


def _loader(kind: Vector) -> Any:
    @intrinsic
    def load(_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.load(pointer(builder, arguments[0], kind.llvm), typ=kind.llvm, align=1)

        return kind(types.int64), generate

    return load


load_i8x8, load_i8x16, load_i8x32, load_i8x64 = map(_loader, (i8x8, i8x16, i8x32, i8x64))
load_i16x8, load_i16x16, load_i16x32 = map(_loader, (i16x8, i16x16, i16x32))
load_i32x4, load_i32x8, load_i32x16 = map(_loader, (i32x4, i32x8, i32x16))
load_f32x4, load_f32x8, load_f32x16 = map(_loader, (f32x4, f32x8, f32x16))
load_f16x8, load_f16x16 = map(_loader, (f16x8, f16x16))
"""Raw halves; `to_f32` converts."""


@intrinsic
def store(_context: Any, address: Any, value: Any) -> Any:
    """Write a vector of any type at an address."""
    if not isinstance(value, Vector):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], pointer(builder, arguments[0], value.llvm), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, value), generate


@intrinsic
def store_first(_context: Any, address: Any, value: Any, count: Any) -> Any:
    """Write the first `count` lanes of a vector at an address (none if count <= 0), and touch nothing beyond."""
    if not isinstance(value, Vector):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        index = ir.VectorType(I32, value.lanes)
        lanes = ir.Constant(index, [ir.Constant(I32, lane) for lane in range(value.lanes)])
        limit = splatted(builder, builder.trunc(arguments[2], I32), value.lanes)
        where = pointer(builder, arguments[0], value.llvm)
        mask = builder.icmp_signed("<", lanes, limit)
        name = f"llvm.masked.store.v{value.lanes}{value.element}.p0"
        call(builder, name, ir.VoidType(), [arguments[1], where, ir.Constant(I32, 1), mask])
        return context.get_dummy_value()

    return types.void(types.int64, value, types.int64), generate


def _splatter(kind: Vector) -> Any:
    @intrinsic
    def splat(_context: Any, scalar: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = arguments[0]
            if not kind.is_float:
                value = builder.trunc(value, kind.scalar)
            return splatted(builder, value, kind.lanes)

        return kind(types.float32 if kind.is_float else types.int64), generate

    return splat


splat_i8x16, splat_i8x32, splat_i8x64 = map(_splatter, (i8x16, i8x32, i8x64))
splat_i16x8, splat_i16x16, splat_i16x32 = map(_splatter, (i16x8, i16x16, i16x32))
splat_i32x4, splat_i32x8, splat_i32x16 = map(_splatter, (i32x4, i32x8, i32x16))
splat_f32x4, splat_f32x8, splat_f32x16 = map(_splatter, (f32x4, f32x8, f32x16))


def constant(kind: Vector, values: Sequence[int] | Sequence[float]) -> Any:
    """Make a function of no arguments that yields these lanes: `table = constant(i8x16, range(16))`, then `table()`."""
    lanes = list(values)

    @intrinsic
    def fixed(_context: Any) -> Any:
        return kind(), lambda context, builder, signature, arguments: kind.constant(lanes)

    return fixed


def _dword_splatter(kind: Vector) -> Any:
    @intrinsic
    def broadcast(_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            word = builder.load(pointer(builder, arguments[0], I32), typ=I32, align=1)
            return builder.bitcast(splatted(builder, word, kind.bits // 32), kind.llvm)

        return kind(types.int64), generate

    return broadcast


broadcast4_i8x16, broadcast4_i8x32, broadcast4_i8x64 = map(_dword_splatter, (i8x16, i8x32, i8x64))
broadcast4_i32x8, broadcast4_i32x16, broadcast4_f32x8, broadcast4_f32x16 = map(
    _dword_splatter, (i32x8, i32x16, f32x8, f32x16)
)
"""The 4 bytes at an address, repeated over the vector."""


# Arithmetic and bits, lane by lane


def _lanewise(integer: str | None, floating: str | None) -> Any:
    @intrinsic
    def operation(_context: Any, a: Any, b: Any) -> Any:
        if not isinstance(a, Vector) or a is not b:
            return None
        name = floating if a.is_float else integer
        if name is None:
            return None
        return a(a, b), lambda context, builder, signature, arguments: getattr(builder, name)(*arguments)

    return operation


add, sub, mul = _lanewise("add", "fadd"), _lanewise("sub", "fsub"), _lanewise("mul", "fmul")
div = _lanewise(None, "fdiv")
and_, or_, xor = _lanewise("and_", None), _lanewise("or_", None), _lanewise("xor", None)


def _called(integer: str | None, floating: str | None, count: int) -> Any:
    """An LLVM intrinsic of `count` like vectors, by element kind."""

    def generator(a: Any, others: tuple[Any, ...]) -> Any:
        if not isinstance(a, Vector) or any(other is not a for other in others):
            return None
        name = floating if a.is_float else integer
        if name is None:
            return None
        full = f"{name}.v{a.lanes}{a.element}"

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            extra = [ir.Constant(ir.IntType(1), 0)] if name == "llvm.abs" else []
            return call(builder, full, a.llvm, [*arguments, *extra])

        return a(*([a] * count)), generate

    if count == 1:

        @intrinsic
        def unary(_context: Any, a: Any) -> Any:
            return generator(a, ())

        return unary

    @intrinsic
    def binary(_context: Any, a: Any, b: Any) -> Any:
        return generator(a, (b,))

    return binary


absolute = _called("llvm.abs", "llvm.fabs", 1)
"""|a|; the most negative integer stays itself."""
minimum = _called("llvm.smin", "llvm.minnum", 2)
maximum = _called("llvm.smax", "llvm.maxnum", 2)
sqrt = _called(None, "llvm.sqrt", 1)


def _shift(name: str) -> Any:
    @intrinsic
    def shift(_context: Any, a: Any, count: Any) -> Any:
        if not isinstance(a, Vector) or a.is_float:
            return None

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            amount = splatted(builder, builder.trunc(arguments[1], a.scalar), a.lanes)
            return getattr(builder, name)(arguments[0], amount)

        return a(a, types.int64), generate

    return shift


shl, shr, sar = _shift("shl"), _shift("lshr"), _shift("ashr")
"""Shifts of every lane by one count below its width: left, logical right, arithmetic right."""


@intrinsic
def fma(_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c for floats, rounded once where the processor can."""
    if not isinstance(a, Vector) or not a.is_float or a is not b or a is not c:
        return None
    return a(a, b, c), lambda context, builder, signature, arguments: forms.fma(builder, *arguments)


def _compare(operator: str) -> Any:
    @intrinsic
    def comparison(_context: Any, a: Any, b: Any) -> Any:
        if not isinstance(a, Vector) or a is not b:
            return None
        mask = vector(f"i{a.width}", a.lanes)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            compare = builder.fcmp_ordered if a.is_float else builder.icmp_signed
            return builder.sext(compare(operator, *arguments), mask.llvm)

        return mask(a, b), generate

    return comparison


less, equal = _compare("<"), _compare("==")
"""-1 in the lanes where it holds, else 0, as integers of the same width (signed comparison)."""


@intrinsic
def select(_context: Any, mask: Any, a: Any, b: Any) -> Any:
    """Lanes of `a` where the mask (of `less`, `equal`) is -1, of `b` where it is 0."""
    if not isinstance(a, Vector) or a is not b or not isinstance(mask, Vector) or mask.lanes != a.lanes:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        chosen = builder.icmp_signed("!=", arguments[0], mask.constant(0))
        return builder.select(chosen, arguments[1], arguments[2])

    return a(mask, a, b), generate


# Conversions


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
    """One lane as a scalar (float32, or int64 with the sign)."""
    if not isinstance(a, Vector) or a.element == "f16":
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = builder.extract_element(arguments[0], builder.trunc(arguments[1], I32))
        return value if a.is_float or a.width == 64 else builder.sext(value, ir.IntType(64))

    return (types.float32 if a.is_float else types.int64)(a, types.int64), generate


# Sums over lanes, in one fixed order: halves are added until one lane is left


def _reduce(combine: Callable[[Any, Vector, Any, Any], Any]) -> Any:
    @intrinsic
    def reduction(_context: Any, a: Any) -> Any:
        if not isinstance(a, Vector) or a.element not in ("f32", "i32"):
            return None

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value, lanes = arguments[0], a.lanes
            while lanes > 1:
                lanes //= 2
                value = combine(builder, vector(a.element, lanes), *halves(builder, value))
            value = builder.extract_element(value, ir.Constant(I32, 0))
            return value if a.is_float else builder.sext(value, ir.IntType(64))

        return (types.float32 if a.is_float else types.int64)(a), generate

    return reduction


def _added(builder: Any, kind: Vector, a: Any, b: Any) -> Any:
    return builder.fadd(a, b) if kind.is_float else builder.add(a, b)


def _larger(builder: Any, kind: Vector, a: Any, b: Any) -> Any:
    name = "llvm.maxnum" if kind.is_float else "llvm.smax"
    return call(builder, f"{name}.v{kind.lanes}{kind.element}", kind.llvm, [a, b])


sum_lanes, max_lanes = _reduce(_added), _reduce(_larger)


# Bytes against bytes


def _byte_pairs(result: str, emit: Any) -> Any:
    @intrinsic
    def operation(_context: Any, a: Any, b: Any) -> Any:
        if not isinstance(a, Vector) or a is not b or a.element != ("i16" if result == "i32" else "i8"):
            return None
        kind = vector(result, a.lanes if result == a.element else a.lanes // 2)
        return kind(a, b), lambda context, builder, signature, arguments: emit(builder, *arguments)

    return operation


maddubs = _byte_pairs("i16", forms.maddubs)
"""Unsigned bytes of a times signed bytes of b, neighbours added to int16; the sums must fit."""
maddwd = _byte_pairs("i32", forms.maddwd)
"""int16 times int16, neighbours added to int32."""
sign = _byte_pairs("i8", forms.sign)
"""Bytes of a, negated where b is negative and 0 where b is 0."""


@intrinsic
def lookup16(_context: Any, table: Any, indices: Any) -> Any:
    """Bytes of a 16-byte table (i8x16) by index bytes 0..15, any width."""
    if table is not vector("i8", 16) or not isinstance(indices, Vector) or indices.element != "i8":
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        mask = [lane % 16 for lane in range(indices.lanes)]
        wide = shuffled(builder, arguments[0], arguments[0], mask)
        return forms.lookup16(builder, wide, arguments[1])

    return indices(table, indices), generate


@intrinsic
def lookup64(_context: Any, table: Any, indices: Any) -> Any:
    """Bytes of a 64-byte table by the low 6 bits of 64 index bytes (both i8x64)."""
    if table is not i8x64 or indices is not i8x64:
        return None
    return i8x64(table, indices), lambda context, builder, signature, arguments: forms.lookup64(builder, *arguments)


def _dot(emit: Any) -> Any:
    @intrinsic
    def dot(_context: Any, total: Any, a: Any, b: Any) -> Any:
        if not isinstance(a, Vector) or a is not b or a.element != "i8" or total is not vector("i32", a.lanes // 4):
            return None
        return total(total, a, b), lambda context, builder, signature, arguments: emit(builder, *arguments)

    return dot


dot_us = _dot(forms.dot_us)
"""total + sums of 4 products per int32 lane, bytes of a unsigned, of b signed."""
dot_ss = _dot(forms.dot_ss)
"""total + sums of 4 products per int32 lane, all bytes signed, those of b above -128."""
