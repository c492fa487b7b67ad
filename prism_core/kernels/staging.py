"""Vector values while a kernel is generated: Python operators that emit LLVM instructions.

A weight layout describes how its codes and scales come out of a packed block once, in Python that runs at compile
time: loops and conditions are unrolled, `Lanes` are what remains. The operations are those of `simd`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from prism_core.kernels import forms
from prism_core.kernels.vectors import I8, I32, I64, Vector, call, halves, joined, pointer, splatted, vector


class Lanes:
    """A vector in a register. Integer shifts are logical; `+`, `-`, `*` are of integers or floats by the element."""

    __slots__ = ("builder", "kind", "value")

    def __init__(self, builder: Any, kind: Vector, value: Any) -> None:
        self.builder = builder
        self.kind = kind
        self.value = value

    def _with(self, value: Any) -> Lanes:
        return Lanes(self.builder, self.kind, value)

    def _other(self, other: Lanes | float) -> Any:
        return other.value if isinstance(other, Lanes) else self.kind.constant(other)

    def __and__(self, other: Lanes | int) -> Lanes:
        return self._with(self.builder.and_(self.value, self._other(other)))

    def __or__(self, other: Lanes | int) -> Lanes:
        return self._with(self.builder.or_(self.value, self._other(other)))

    def __xor__(self, other: Lanes | int) -> Lanes:
        return self._with(self.builder.xor(self.value, self._other(other)))

    def __lshift__(self, count: int) -> Lanes:
        return self._with(self.builder.shl(self.value, self.kind.constant(count))) if count else self

    def __rshift__(self, count: int) -> Lanes:
        return self._with(self.builder.lshr(self.value, self.kind.constant(count))) if count else self

    def __add__(self, other: Lanes | int) -> Lanes:
        operation = self.builder.fadd if self.kind.is_float else self.builder.add
        return self._with(operation(self.value, self._other(other)))

    def __sub__(self, other: Lanes | int) -> Lanes:
        operation = self.builder.fsub if self.kind.is_float else self.builder.sub
        return self._with(operation(self.value, self._other(other)))

    def __mul__(self, other: Lanes | float) -> Lanes:
        operation = self.builder.fmul if self.kind.is_float else self.builder.mul
        return self._with(operation(self.value, self._other(other)))

    def negated(self) -> Lanes:
        """The float with its sign flipped, 0 included."""
        return self._with(self.builder.fneg(self.value))

    def viewed(self, kind: Vector) -> Lanes:
        """The same bits as another type."""
        return Lanes(self.builder, kind, self.builder.bitcast(self.value, kind.llvm))

    def widened(self, kind: Vector, *, signed: bool) -> Lanes:
        """Wider integers of the same count."""
        extend = self.builder.sext if signed else self.builder.zext
        return Lanes(self.builder, kind, extend(self.value, kind.llvm))

    def floats(self) -> Lanes:
        """int32 or float16 lanes as float32."""
        kind = vector("f32", self.kind.lanes)
        if self.kind.element == "f16":
            return Lanes(self.builder, kind, forms.half_to_float(self.builder, self.value))
        return Lanes(self.builder, kind, self.builder.sitofp(self.value, kind.llvm))

    def chosen_below(self, bound: int, below: Lanes, otherwise: Lanes) -> Lanes:
        """`below` in the lanes that are less than `bound` (unsigned), `otherwise` in the rest."""
        small = self.builder.icmp_unsigned("<", self.value, self.kind.constant(bound))
        return below._with(self.builder.select(small, below.value, otherwise.value))

    def looked_up(self, table: list[int]) -> Lanes:
        """Index bytes 0..15 replaced by the bytes of a table."""
        repeated = self.kind.constant([table[lane % 16] for lane in range(self.kind.lanes)])
        return self._with(forms.lookup16(self.builder, repeated, self.value))

    def part(self, index: int) -> Lanes:
        """The low (0) or the high (1) half."""
        kind = vector(self.kind.element, self.kind.lanes // 2)
        return Lanes(self.builder, kind, halves(self.builder, self.value)[index])

    def beside(self, high: Lanes) -> Lanes:
        """This and another vector as one."""
        kind = vector(self.kind.element, self.kind.lanes * 2)
        return Lanes(self.builder, kind, joined(self.builder, self.value, high.value))


class Place:
    """An address known when the kernel runs, with offsets known when it is compiled."""

    __slots__ = ("_scales", "address", "builder")

    def __init__(self, builder: Any, address: Any) -> None:
        self.builder = builder
        self.address = address
        self._scales: dict[int, Lanes] = {}

    def _pointer(self, offset: int, kind: Any) -> Any:
        # Added to the pointer, not to the address: LLVM would keep every sum of a loop's start and an offset
        # in a register of its own, which there are not.
        base = pointer(self.builder, self.address)
        moved = self.builder.gep(base, [ir.Constant(I64, offset)], source_etype=I8) if offset else base
        return self.builder.bitcast(moved, kind.as_pointer())

    def at(self, offset: int) -> Place:
        """This place moved by a number of bytes."""
        return Place(self.builder, self.builder.add(self.address, ir.Constant(I64, offset)))

    def load(self, kind: Vector, offset: int) -> Lanes:
        """A vector `offset` bytes further."""
        value = self.builder.load(self._pointer(offset, kind.llvm), typ=kind.llvm, align=1)
        return Lanes(self.builder, kind, value)

    def scale(self, offset: int) -> Lanes:
        """8 float16 as float32, loaded and converted once however often they are asked for at this place."""
        if offset not in self._scales:
            self._scales[offset] = self.load(vector("f16", 8), offset).floats()
        return self._scales[offset]

    def store(self, lanes: Lanes, offset: int) -> None:
        """Write a vector `offset` bytes further."""
        self.builder.store(lanes.value, self._pointer(offset, lanes.kind.llvm), align=1)

    def prefetch(self, offset: int) -> None:
        """Ask for the cache line `offset` bytes further."""
        hints = [ir.Constant(I32, value) for value in (0, 3, 1)]
        call(self.builder, "llvm.prefetch.p0", ir.VoidType(), [self._pointer(offset, I8), *hints])

    def keep_order(self) -> None:
        """As `memory.keep_order`: nothing is loaded, stored or prefetched on the other side of this."""
        self.builder.fence("seq_cst", "singlethread")

    def repeat(self, kind: Vector, offset: int) -> Lanes:
        """The 4 bytes at `offset`, repeated over a vector."""
        element = kind.scalar if kind.width == 32 else I32
        word = self.builder.load(self._pointer(offset, element), typ=element, align=1)
        wide = splatted(self.builder, word, kind.bits // 32)
        return Lanes(self.builder, kind, wide if kind.width == 32 else self.builder.bitcast(wide, kind.llvm))


def filled(builder: Any, kind: Vector, value: float) -> Lanes:
    """A constant in all lanes."""
    return Lanes(builder, kind, kind.constant(value))


def fused(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """a * b + c, rounded once where the processor can."""
    return Lanes(a.builder, a.kind, forms.fma(a.builder, a.value, b.value, c.value))


def kept(lanes: Lanes) -> Lanes:
    """The same value, in a register at this point of the program.

    LLVM regroups sums and moves loads until more values live at once than there are registers; what is kept stays in
    the order in which it was written.
    """
    value = lanes.value
    identity = ir.FunctionType(value.type, [value.type])
    return Lanes(lanes.builder, lanes.kind, lanes.builder.asm(identity, "", "=x,0", [value], side_effect=True))
