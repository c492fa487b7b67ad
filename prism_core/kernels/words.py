"""The words of the tables that `program` interprets, and the little that operations need to read them.

An operation is `OPERATION_WORDS` int64: the address of its entry, its units, the span of a unit in tokens, then its
arguments. Units x ceil(tokens / span) units of work are numbered from 0; a span below 0 takes the number of blocks from
the context word -span instead. A float argument is the bits of a float32.

Every entry has the signature `OPERATION`: (operation, context, begin, end, thread). It does the units [begin, end) and
may use `thread` to find its own part of a workspace.

The context is what differs from call to call: the tokens, where they stand, and the memory of the sequence.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from prism_core.kernels.vectors import F32, I64, call, intrinsic, pointer

OPERATION = "void(int64, int64, int64, int64, int64)"

OPERATION_WORDS = 24
ENTRY, UNITS, SPAN, ARGUMENTS = range(4)

PHASE_WORDS = 4
FIRST_OPERATION, OPERATION_COUNT, IS_SPLIT, GRAIN = range(PHASE_WORDS)
"""GRAIN: how many units are done together where there are several tokens, a power of two: other numbers waste work."""

CONTEXT_WORDS = 16
TOKENS, POSITION, IDS, PAGES, STATE_BEFORE, STATE_AFTER, LOGITS, BLOCKS, FAULT = range(9)
"""Tokens of this call; position of the first; their ids (int64); page addresses by position / 32; the recurrent state
to start from and the one to leave (may be the same memory); where the logits go (float32); blocks of attention: of
queries, or for a single token the segments of its keys. FAULT, on a cache line of its own, is written by operations:
see `faults`."""

PAGE_TOKENS = 32
SEGMENT_TOKENS = 256
"""Keys of one softmax of attention; see `attention`."""


_F64 = ir.DoubleType()


def _reader(element: Any, result: Any, first: int) -> Any:
    """A function (table, index) -> element number first + index, of 8 bytes each, read in one instruction."""

    @intrinsic
    def read(_context: Any, table: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            number = builder.add(arguments[1], ir.Constant(I64, first))
            address = builder.add(arguments[0], builder.shl(number, ir.Constant(I64, 3)))
            return builder.load(pointer(builder, address, element), typ=element, align=1)

        return result(types.int64, types.int64), generate

    return read


word = _reader(I64, types.int64, 0)
"""(table, index): int64 number `index` of a table."""
argument = _reader(I64, types.int64, ARGUMENTS)
"""(operation, index): its integer argument number `index`."""
real = _reader(F32, types.float32, ARGUMENTS)
"""(operation, index): its float argument number `index`."""


@intrinsic
def load_f64(_context: Any, address: Any) -> Any:
    """The float64 at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(pointer(builder, arguments[0], _F64), typ=_F64, align=1)

    return types.float64(types.int64), generate


@intrinsic
def monotonic_ns(_context: Any) -> Any:
    """Nanoseconds of the C library's monotonic clock (POSIX); 0 elsewhere."""
    import os

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if os.name != "posix":
            return ir.Constant(I64, 0)
        with builder.goto_entry_block():
            span = builder.alloca(ir.ArrayType(I64, 2))
        clock = ir.Constant(ir.IntType(32), _CLOCK_MONOTONIC)
        call(builder, "clock_gettime", ir.IntType(32), [clock, span])
        at = [builder.gep(span, [ir.Constant(ir.IntType(32), 0), ir.Constant(ir.IntType(32), i)]) for i in (0, 1)]
        seconds, nanoseconds = (builder.load(place) for place in at)
        return builder.add(builder.mul(seconds, ir.Constant(I64, 1_000_000_000)), nanoseconds)

    return types.int64(), generate


def _monotonic_number() -> int:
    import time

    return int(getattr(time, "CLOCK_MONOTONIC", 1))


_CLOCK_MONOTONIC = _monotonic_number()
