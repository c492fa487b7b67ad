"""The look-ups of four vectors of 32 rows at a time, for AVX2: a table is loaded once for 128 rows or planes of rows.

Eight running sums, the indices and two tables are all that sixteen registers hold. LLVM would start the look-ups of
many columns before it ends any, and spill; so after every half column the sums pass through an empty instruction that
nothing is moved across. Sums are those of `lut_tile.group_narrow`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types

from prism_core.kernels import forms
from prism_core.kernels.lut import TABLE
from prism_core.kernels.simd import i8x16, i8x32, i16x16
from prism_core.kernels.staging import Place, filled
from prism_core.kernels.vectors import I32, call, intrinsic, pointer, shuffled

AHEAD = 3072
"""How far before their use weights are asked for: two streams need half of what one does."""
_COLUMN = 64
_UNPACK = [
    [16 * part + lane + other for part in (0, 1) for lane in range(first, first + 8) for other in (0, 32)]
    for first in (0, 8)
]
"""Low and high parts of 8 rows alternating, in each 128 bits."""


def _entries(tables: Place, offset: int) -> Any:
    value = tables.load(i8x16, offset).value
    return shuffled(tables.builder, value, value, [lane % 16 for lane in range(32)])


def _held(builder: Any, values: list[Any]) -> list[Any]:
    """The same vectors, in registers at this point of the program; LLVM knows nothing of what they are."""
    kinds = [value.type for value in values]
    constraints = ["=x"] * len(values) + [str(index) for index in range(len(values))] + ["~{memory}"]
    kind = ir.FunctionType(ir.LiteralStructType(kinds), kinds)
    held = builder.asm(kind, "", ",".join(constraints), values, True)
    return [builder.extract_value(held, index) for index in range(len(values))]


def _ask(row: Place, offset: int) -> None:
    hints = [ir.Constant(I32, value) for value in (0, 2, 1)]
    place = row.at(offset + AHEAD)
    call(row.builder, "llvm.prefetch.p0", ir.VoidType(), [pointer(row.builder, place.address), *hints])


def _column(rows: list[Place], tables: Place, column: int, fixed: list[Any], sums: list[Any]) -> list[Any]:
    """`sums` (or none yet) with the entries of one byte column added."""
    builder, (sixteenth, fifteen) = tables.builder, fixed
    offset = _COLUMN * column
    for nibble in (0, 1):
        entries = [_entries(tables, TABLE * column + 32 * nibble + 16 * part) for part in (0, 1)]
        found = []
        for row in rows:
            bits = row.load(i16x16, offset).value
            if nibble:
                # A shift of a value in memory takes a load of its own; a multiplication does not.
                bits = call(builder, "llvm.x86.avx2.pmulhu.w", i16x16.llvm, [bits, sixteenth])
            index = builder.bitcast(builder.and_(bits, fifteen), i8x32.llvm)
            found += [forms.lookup16(builder, each, index) for each in entries]
        sums = [builder.add(*pair) for pair in zip(sums, found, strict=True)] if sums else found
        sums = _held(builder, sums)
        _ask(rows[2 * nibble], offset)
    return sums


def group_of(weights: Sequence[int]) -> Any:
    """A function (a, b, c, d, tables): the int16 sums over 4 byte columns of 32 rows at each of four addresses.

    They are multiplied by a weight each, and are two vectors each, as `lut_tile.joined_narrow` gives them. The cache
    lines of a and of c are asked for.
    """

    @intrinsic
    def group_four(_context: Any, a: Any, b: Any, c: Any, d: Any, tables: Any) -> Any:
        result = types.UniTuple(i16x16, 8)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            rows = [Place(builder, address) for address in arguments[:4]]
            fixed = _held(builder, [filled(builder, i16x16, value).value for value in (1 << 12, 0x0F0F)])
            sums: list[Any] = []
            for column in range(4):
                sums = _column(rows, Place(builder, arguments[4]), column, fixed, sums)
            joined = []
            for low, high, weight in zip(sums[::2], sums[1::2], weights, strict=True):
                parts = filled(builder, i16x16, weight * (1 + (32 << 8))).viewed(i8x32).value
                joined += [forms.maddubs(builder, shuffled(builder, low, high, mask), parts) for mask in _UNPACK]
            return context.make_tuple(builder, result, _held(builder, joined))

        return result(*[types.int64] * 5), generate

    return group_four
