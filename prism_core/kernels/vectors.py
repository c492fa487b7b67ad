"""Vector types for Numba, and what is needed to define operations on them.

A `Vector` is an LLVM vector held in registers: it can be a local variable, an argument or result of a `device`
function, and a member of a tuple. Names are element and lanes: `i8x32` is 32 bytes. Integers have no sign of their own;
the operation says how it reads them. Vectors wider than the processor's are split by LLVM, and by `by_width` where a
processor's own instruction is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numba.extending
from llvmlite import ir
from numba import types
from numba.core.datamodel import models

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
_ELEMENTS: dict[str, tuple[Any, int]] = {"i8": (I8, 8), "i16": (I16, 16), "i32": (I32, 32), "i64": (I64, 64)}
_ELEMENTS |= {"f16": (F16, 16), "f32": (F32, 32), "f64": (F64, 64)}


class Vector(types.Type):  # type: ignore[misc]
    """The Numba type of `lanes` elements; made by `vector`, one object per kind."""

    def __init__(self, element: str, lanes: int) -> None:
        self.element = element
        self.lanes = lanes
        self.scalar, self.width = _ELEMENTS[element]
        super().__init__(f"{element}x{lanes}")

    @property
    def is_float(self) -> bool:
        return self.element.startswith("f")

    @property
    def number(self) -> types.Type:
        """Numba's type of one lane as a scalar; integers are int64."""
        return types.float64 if self.element == "f64" else types.float32 if self.is_float else types.int64

    @property
    def bits(self) -> int:
        return int(self.width) * self.lanes

    @property
    def llvm(self) -> ir.VectorType:
        return ir.VectorType(self.scalar, self.lanes)

    def constant(self, values: int | float | Sequence[int] | Sequence[float]) -> ir.Constant:
        """The same value in all lanes, or one value each."""
        each = list(values) if isinstance(values, Sequence) else [values] * self.lanes
        return ir.Constant(self.llvm, [ir.Constant(self.scalar, value) for value in each])


class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector_type: Vector) -> None:
        super().__init__(manager, vector_type, vector_type.llvm)


numba.extending.register_model(Vector)(_VectorModel)

_made: dict[tuple[str, int], Vector] = {}


def vector(element: str, lanes: int) -> Vector:
    """The one `Vector` of this element and number of lanes."""
    return _made.setdefault((element, lanes), Vector(element, lanes))


def intrinsic(function: Callable[..., Any]) -> Any:
    """`numba.extending.intrinsic`, with a type."""
    return numba.extending.intrinsic(function)


Emit = Callable[..., Any]


def shuffled(builder: ir.IRBuilder, a: Any, b: Any, mask: Sequence[int]) -> Any:
    """shufflevector by a constant mask; lanes of `b` follow those of `a`."""
    kind = ir.VectorType(I32, len(mask))
    return builder.shuffle_vector(a, b, ir.Constant(kind, [ir.Constant(I32, lane) for lane in mask]))


def splatted(builder: ir.IRBuilder, scalar: Any, lanes: int) -> Any:
    """A scalar in all lanes."""
    empty = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    first = builder.insert_element(empty, scalar, ir.Constant(I32, 0))
    return shuffled(builder, first, empty, [0] * lanes)


def pointer(builder: ir.IRBuilder, address: Any, kind: Any = I8) -> Any:
    """An int64 as a pointer."""
    return builder.inttoptr(address, kind.as_pointer())


def call(builder: ir.IRBuilder, name: str, result: Any, arguments: Sequence[Any]) -> Any:
    """Call the LLVM intrinsic or C function `name`, declared by the types of its arguments."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    known = builder.module.globals.get(name)
    function = known if known is not None else ir.Function(builder.module, kind, name)
    return builder.call(function, arguments)


def halves(builder: ir.IRBuilder, value: Any) -> tuple[Any, Any]:
    """The low and the high half of a vector value."""
    lanes = value.type.count
    low = shuffled(builder, value, value, range(lanes // 2))
    return low, shuffled(builder, value, value, range(lanes // 2, lanes))


def joined(builder: ir.IRBuilder, low: Any, high: Any) -> Any:
    """Two vector values of one type side by side."""
    return shuffled(builder, low, high, range(2 * low.type.count))


_WIDTHS = {"i8": 8, "i16": 16, "i32": 32, "i64": 64, "half": 16, "float": 32, "double": 64}


def bits_of(value: Any) -> int:
    """The width of a vector value."""
    return _WIDTHS[str(value.type.element)] * int(value.type.count)


def by_width(builder: ir.IRBuilder, forms: Mapping[int, Emit], generic: Emit, arguments: Sequence[Any]) -> Any:
    """Apply the form for the arguments' width in bits; wider vectors are split, narrower ones left to `generic`."""
    width = bits_of(arguments[0])
    if width in forms:
        return forms[width](builder, *arguments)
    if not forms or width < min(forms):
        return generic(builder, *arguments)
    pairs = [halves(builder, argument) for argument in arguments]
    low, high = (by_width(builder, forms, generic, part) for part in zip(*pairs, strict=True))
    return joined(builder, low, high)
