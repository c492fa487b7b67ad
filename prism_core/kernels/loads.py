"""Vectors from memory and back, and constants; part of `simd`. Addresses are int64, of any alignment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types

from prism_core.kernels.vectors import (
    I32,
    Vector,
    call,
    intrinsic,
    pointer,
    splatted,
    vector,
)

i8x8, i8x16, i8x32, i8x64 = (vector("i8", lanes) for lanes in (8, 16, 32, 64))
i16x8, i16x16, i16x32 = (vector("i16", lanes) for lanes in (8, 16, 32))
i32x4, i32x8, i32x16 = (vector("i32", lanes) for lanes in (4, 8, 16))
f16x8, f16x16 = (vector("f16", lanes) for lanes in (8, 16))
f32x4, f32x8, f32x16 = (vector("f32", lanes) for lanes in (4, 8, 16))


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


@intrinsic
def store_apart(_context: Any, address: Any, value: Any, step: Any) -> Any:
    """Write lane i of a vector `i * step` bytes behind an address."""
    if not isinstance(value, Vector):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at, lanes, distance = arguments
        for lane in range(value.lanes):
            element = builder.extract_element(lanes, ir.Constant(I32, lane))
            builder.store(element, pointer(builder, at, value.scalar), align=1)
            at = builder.add(at, distance)
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

        return kind(kind.number), generate

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
