"""Raw memory for kernels: scalars at an address, atomics, calls through an address, waiting and waking.

Addresses are int64. Integer loads give int64; stores keep the low bits. Nothing is checked: whoever starts a kernel has
checked the bounds. Atomics need natural alignment and are sequentially consistent unless their name says otherwise.
"""

from __future__ import annotations

import sys
from typing import Any

from llvmlite import ir
from numba import types

from prism_core.kernels import forms
from prism_core.kernels.target import target
from prism_core.kernels.vectors import F16, F32, I1, I8, I16, I32, I64, call, intrinsic, pointer

# Scalars


def _load_integer(kind: Any, signed: bool) -> Any:
    @intrinsic
    def load(_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = builder.load(pointer(builder, arguments[0], kind), typ=kind, align=1)
            if kind is I64:
                return value
            return builder.sext(value, I64) if signed else builder.zext(value, I64)

        return types.int64(types.int64), generate

    return load


load_u8, load_i8, load_u16, load_i16 = (_load_integer(kind, sign) for kind in (I8, I16) for sign in (False, True))
load_u32, load_i32, load_i64 = _load_integer(I32, False), _load_integer(I32, True), _load_integer(I64, True)


def _store_integer(kind: Any) -> Any:
    @intrinsic
    def store(_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            low = arguments[1] if kind is I64 else builder.trunc(arguments[1], kind)
            builder.store(low, pointer(builder, arguments[0], kind), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return store


store_i8, store_i16, store_i32, store_i64 = map(_store_integer, (I8, I16, I32, I64))


@intrinsic
def load_f32(_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(pointer(builder, arguments[0], F32), typ=F32, align=1)

    return types.float32(types.int64), generate


@intrinsic
def store_f32(_context: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], pointer(builder, arguments[0], F32), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), generate


_HALF1, _FLOAT1 = ir.VectorType(F16, 1), ir.VectorType(F32, 1)


@intrinsic
def load_f16(_context: Any, address: Any) -> Any:
    """The float16 at an address, as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        halves = builder.load(pointer(builder, arguments[0], _HALF1), typ=_HALF1, align=1)
        return builder.extract_element(forms.half_to_float(builder, halves), ir.Constant(I32, 0))

    return types.float32(types.int64), generate


@intrinsic
def store_f16(_context: Any, address: Any, value: Any) -> Any:
    """A float32 rounded to float16 (nearest even) at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        single = builder.insert_element(ir.Constant(_FLOAT1, ir.Undefined), arguments[1], ir.Constant(I32, 0))
        halves = forms.float_to_half(builder, single)
        builder.store(halves, pointer(builder, arguments[0], _HALF1), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), generate


@intrinsic
def f32_bits(_context: Any, value: Any) -> Any:
    """The bits of a float32 as a non-negative int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.zext(builder.bitcast(arguments[0], I32), I64)

    return types.int64(types.float32), generate


@intrinsic
def bits_f32(_context: Any, bits: Any) -> Any:
    """The float32 whose bits are the low half of an int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.trunc(arguments[0], I32), F32)

    return types.float32(types.int64), generate


# Blocks of memory


@intrinsic
def copy(_context: Any, to: Any, source: Any, count: Any) -> Any:
    """Copy `count` bytes between ranges that do not overlap."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to_, from_ = pointer(builder, arguments[0]), pointer(builder, arguments[1])
        call(builder, "llvm.memcpy.p0.p0.i64", ir.VoidType(), [to_, from_, arguments[2], ir.Constant(I1, 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def fill(_context: Any, address: Any, byte: Any, count: Any) -> Any:
    """Set `count` bytes to `byte`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = [pointer(builder, arguments[0]), builder.trunc(arguments[1], I8), arguments[2], ir.Constant(I1, 0)]
        call(builder, "llvm.memset.p0.i64", ir.VoidType(), values)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _prefetcher(locality: int) -> Any:
    @intrinsic
    def prefetch(_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            hints = [ir.Constant(I32, value) for value in (0, locality, 1)]
            call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer(builder, arguments[0]), *hints])
            return context.get_dummy_value()

        return types.void(types.int64), generate

    return prefetch


prefetch_t0, prefetch_t1, prefetch_t2 = map(_prefetcher, (3, 2, 1))
"""Ask for a cache line near (t0) or farther (t1, t2); harmless at any address."""


@intrinsic
def keep_order(_context: Any) -> Any:
    """No memory access or prefetch is moved across this by the compiler; the processor is not told anything.

    Without it LLVM gathers the prefetches of a whole loop body at its head, where they fill the miss buffers at once.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst", "singlethread")
        return context.get_dummy_value()

    return types.void(), generate


# Atomics


def _atomic_load(kind: Any, ordering: str) -> Any:
    @intrinsic
    def load(_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            where = pointer(builder, arguments[0], kind)
            value = builder.load_atomic(where, ordering, kind.width // 8, typ=kind)
            return value if kind is I64 else builder.sext(value, I64)

        return types.int64(types.int64), generate

    return load


def _atomic_store(kind: Any, ordering: str) -> Any:
    @intrinsic
    def store(_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            low = arguments[1] if kind is I64 else builder.trunc(arguments[1], kind)
            builder.store_atomic(low, pointer(builder, arguments[0], kind), ordering, kind.width // 8)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return store


def _atomic_update(kind: Any, operation: str, ordering: str) -> Any:
    @intrinsic
    def update(_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            low = arguments[1] if kind is I64 else builder.trunc(arguments[1], kind)
            before = builder.atomic_rmw(operation, pointer(builder, arguments[0], kind), low, ordering)
            return before if kind is I64 else builder.sext(before, I64)

        return types.int64(types.int64, types.int64), generate

    return update


def _atomic_swap(kind: Any) -> Any:
    @intrinsic
    def swap(_context: Any, address: Any, expected: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            low = arguments[1:] if kind is I64 else [builder.trunc(value, kind) for value in arguments[1:]]
            pair = builder.cmpxchg(pointer(builder, arguments[0], kind), *low, "seq_cst")
            before = builder.extract_value(pair, 0)
            return before if kind is I64 else builder.sext(before, I64)

        return types.int64(types.int64, types.int64, types.int64), generate

    return swap


atomic_load_i64, atomic_load_i32 = _atomic_load(I64, "seq_cst"), _atomic_load(I32, "seq_cst")
acquire_i64, acquire_i32 = _atomic_load(I64, "acquire"), _atomic_load(I32, "acquire")
atomic_store_i64, atomic_store_i32 = _atomic_store(I64, "seq_cst"), _atomic_store(I32, "seq_cst")
release_i64, release_i32 = _atomic_store(I64, "release"), _atomic_store(I32, "release")
atomic_add_i64, atomic_add_i32 = _atomic_update(I64, "add", "seq_cst"), _atomic_update(I32, "add", "seq_cst")
add_release_i64, add_relaxed_i64 = _atomic_update(I64, "add", "acq_rel"), _atomic_update(I64, "add", "monotonic")
exchange_i64, exchange_i32 = _atomic_update(I64, "xchg", "seq_cst"), _atomic_update(I32, "xchg", "seq_cst")
"""Updates give the value before. `add_release` also acquires."""
compare_exchange_i64, compare_exchange_i32 = _atomic_swap(I64), _atomic_swap(I32)
"""Write `value` if `expected` is there; give what was there."""


# Calls through an address


@intrinsic
def call_entry(_context: Any, function: Any, arguments: Any) -> Any:
    """Call a void `entry` at an address with a tuple of int64 arguments: `call_entry(address, (a, b, c))`."""
    if not isinstance(arguments, types.BaseTuple):
        return None
    wanted = types.UniTuple(types.int64, len(arguments))

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64] * len(wanted))
        each = [builder.extract_value(values[1], index) for index in range(len(wanted))]
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), each)
        return context.get_dummy_value()

    return types.void(types.int64, wanted), generate


# Waiting and waking. The C functions used: sched_yield, usleep, syscall (Linux); SwitchToThread, Sleep (Windows).

_LINUX = sys.platform == "linux"
_WINDOWS = sys.platform == "win32"
_FUTEX_NUMBER = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}.get(target().arch)
HAS_FUTEX = _LINUX and _FUTEX_NUMBER is not None
"""Whether `futex_wait` sleeps until woken; elsewhere it sleeps for `POLL_US` and lets the caller look again."""
POLL_US = 50
_WAIT_PRIVATE, _WAKE_PRIVATE = 128, 129


@intrinsic
def yield_thread(_context: Any) -> Any:
    """Let another thread of this core run."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        call(builder, "SwitchToThread" if _WINDOWS else "sched_yield", I32, [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def spin_hint(_context: Any) -> Any:
    """Tell the core that this is a waiting loop."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if target().x86:
            call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        elif target().arch == "aarch64":
            call(builder, "llvm.aarch64.hint", ir.VoidType(), [ir.Constant(I32, 1)])
        return context.get_dummy_value()

    return types.void(), generate


def _sleep(builder: Any, microseconds: Any) -> None:
    if _WINDOWS:
        milliseconds = builder.udiv(builder.add(microseconds, ir.Constant(I64, 999)), ir.Constant(I64, 1000))
        call(builder, "Sleep", ir.VoidType(), [builder.trunc(milliseconds, I32)])
    else:
        call(builder, "usleep", I32, [builder.trunc(microseconds, I32)])


@intrinsic
def sleep_us(_context: Any, microseconds: Any) -> Any:
    """Sleep for at least this many microseconds (below a second)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _sleep(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _futex(builder: Any, address: Any, operation: int, value: Any, timeout: Any) -> Any:
    kind = ir.FunctionType(I64, [I64], var_arg=True)
    known = builder.module.globals.get("syscall")
    function = known if known is not None else ir.Function(builder.module, kind, "syscall")
    zero = ir.Constant(I64, 0)
    number, code = ir.Constant(I64, _FUTEX_NUMBER), ir.Constant(I64, operation)
    return builder.call(function, [number, address, code, value, timeout, zero, zero])


@intrinsic
def futex_wait(_context: Any, address: Any, expected: Any, timeout_us: Any) -> Any:
    """Sleep while the int32 at an address is `expected`, until woken or timed out; may return early: look again."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, expected, timeout_us = arguments
        if not HAS_FUTEX:
            _sleep(builder, ir.Constant(I64, POLL_US))
            return context.get_dummy_value()
        million = ir.Constant(I64, 1_000_000)
        with builder.goto_entry_block():
            span = builder.alloca(ir.ArrayType(I64, 2))
        seconds = builder.sdiv(timeout_us, million)
        nanoseconds = builder.mul(builder.srem(timeout_us, million), ir.Constant(I64, 1000))
        builder.store(seconds, builder.gep(span, [ir.Constant(I32, 0), ir.Constant(I32, 0)], inbounds=True))
        builder.store(nanoseconds, builder.gep(span, [ir.Constant(I32, 0), ir.Constant(I32, 1)], inbounds=True))
        _futex(builder, address, _WAIT_PRIVATE, expected, builder.ptrtoint(span, I64))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def futex_wake(_context: Any, address: Any, count: Any) -> Any:
    """Wake up to `count` threads that wait on the int32 at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if HAS_FUTEX:
            _futex(builder, arguments[0], _WAKE_PRIVATE, arguments[1], ir.Constant(I64, 0))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate
