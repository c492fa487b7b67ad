"""Arithmetic on vectors, lane by lane, over lanes, and of bytes with bytes; part of `simd`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from prism_core.kernels import forms
from prism_core.kernels.loads import i8x64
from prism_core.kernels.vectors import (
    I32,
    Vector,
    call,
    halves,
    intrinsic,
    shuffled,
    splatted,
    vector,
)


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


# Sums over lanes, in one fixed order: halves are added until one lane is left


def _reduce(combine: Callable[[Any, Vector, Any, Any], Any]) -> Any:
    @intrinsic
    def reduction(_context: Any, a: Any) -> Any:
        if not isinstance(a, Vector) or a.element not in ("f64", "f32", "i32"):
            return None

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value, lanes = arguments[0], a.lanes
            while lanes > 1:
                lanes //= 2
                value = combine(builder, vector(a.element, lanes), *halves(builder, value))
            value = builder.extract_element(value, ir.Constant(I32, 0))
            return value if a.is_float else builder.sext(value, ir.IntType(64))

        return a.number(a), generate

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
        kind = vector(result, a.lanes // 2)
        return kind(a, b), lambda context, builder, signature, arguments: emit(builder, *arguments)

    return operation


maddubs = _byte_pairs("i16", forms.maddubs)
"""Unsigned bytes of a times signed bytes of b, neighbours added to int16; the sums must fit."""
maddwd = _byte_pairs("i32", forms.maddwd)
"""int16 times int16, neighbours added to int32."""


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
"""total + sums of 4 products per int32 lane, all bytes signed."""
