"""How the few processor-dependent operations of `simd` are emitted, and their generic forms.

Every function takes an IR builder and vector values of any width, and gives the same lanes on every target.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from prism_core.kernels.target import Target, target
from prism_core.kernels.vectors import F16, F32, I8, I16, I32, by_width, call, shuffled

__all__ = [
    "dot_ss",
    "dot_us",
    "float_to_half",
    "fma",
    "half_to_float",
    "lookup16",
    "lookup64",
    "maddubs",
    "maddwd",
]


def _vector(element: Any, lanes: int) -> Any:
    return ir.VectorType(element, lanes)


def _splat(kind: Any, value: float) -> Any:
    return ir.Constant(kind, [ir.Constant(kind.element, value)] * kind.count)


def _native(names: dict[int, str], result: Any, scale: int) -> dict[int, Any]:
    """Forms that call an intrinsic; the result has lanes / scale of the first argument's lanes."""

    def form(name: str) -> Any:
        def emit(builder: Any, *arguments: Any) -> Any:
            return call(builder, name, _vector(result, arguments[0].type.count // scale), arguments)

        return emit

    return {width: form(name) for width, name in names.items()}


def _x86(now: Target, names: tuple[str, str, str], baseline: bool) -> dict[int, str]:
    """Intrinsic names by width, as far as the target has them."""
    have = {128: baseline, 256: now.avx2, 512: now.avx512}
    return {width: name for (width, ok), name in zip(have.items(), names, strict=True) if ok and name and now.x86}


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c; llvm.fma without hardware would call a C function per lane."""
    name = "llvm.fma" if target().fma else "llvm.fmuladd"
    return call(builder, f"{name}.v{a.type.count}f32", a.type, [a, b, c])


def half_to_float(builder: Any, halves: Any) -> Any:
    """float16 to float32, exact, subnormals and infinities included."""
    lanes = halves.type.count
    floats, words = _vector(F32, lanes), _vector(I32, lanes)
    if target().half:
        return builder.fpext(halves, floats)
    bits = builder.zext(builder.bitcast(halves, _vector(I16, lanes)), words)
    magnitude = builder.shl(builder.and_(bits, _splat(words, 0x7FFF)), _splat(words, 13))
    # Moving the exponent by a multiplication with 2^112 makes subnormals normal; 31 must become 255 by hand.
    scaled = builder.fmul(builder.bitcast(magnitude, floats), _splat(floats, 2.0**112))
    special = builder.icmp_unsigned(">=", magnitude, _splat(words, 0x7C00 << 13))
    result = builder.bitcast(scaled, words)
    result = builder.select(special, builder.or_(result, _splat(words, 0x7F800000)), result)
    sign_bit = builder.shl(builder.and_(bits, _splat(words, 0x8000)), _splat(words, 16))
    return builder.bitcast(builder.or_(result, sign_bit), floats)


def float_to_half(builder: Any, values: Any) -> Any:
    """float32 to float16, to nearest even; a NaN stays a NaN."""
    lanes = values.type.count
    halves, words, floats = _vector(F16, lanes), _vector(I32, lanes), _vector(F32, lanes)
    if target().half:
        return builder.fptrunc(values, halves)
    bits = builder.bitcast(values, words)
    sign_bit = builder.lshr(builder.and_(bits, _splat(words, 0x80000000)), _splat(words, 16))
    magnitude = builder.and_(bits, _splat(words, 0x7FFFFFFF))
    odd = builder.and_(builder.lshr(magnitude, _splat(words, 13)), _splat(words, 1))
    rounded = builder.add(builder.sub(magnitude, _splat(words, (127 - 15) << 23)), _splat(words, 0xFFF))
    normal = builder.lshr(builder.add(rounded, odd), _splat(words, 13))
    # Adding 0.5 puts the unit of a subnormal float16 at the last bit of the mantissa, so the hardware rounds it.
    shifted = builder.fadd(builder.bitcast(magnitude, floats), _splat(floats, 0.5))
    tiny = builder.sub(builder.bitcast(shifted, words), _splat(words, 0x3F000000))
    result = builder.select(builder.icmp_unsigned("<", magnitude, _splat(words, 113 << 23)), tiny, normal)
    overflow = builder.icmp_unsigned(">=", magnitude, _splat(words, 0x477FF000))
    result = builder.select(overflow, _splat(words, 0x7C00), result)
    invalid = builder.icmp_unsigned(">", magnitude, _splat(words, 0x7F800000))
    result = builder.select(invalid, _splat(words, 0x7E00), result)
    result = builder.trunc(builder.or_(result, sign_bit), _vector(I16, lanes))
    return builder.bitcast(result, halves)


def lookup16(builder: Any, table: Any, indices: Any) -> Any:
    """table[index] inside every 16 bytes; the table is repeated to the width of the indices."""
    now = target()
    names = _x86(now, ("llvm.x86.ssse3.pshuf.b.128", "llvm.x86.avx2.pshuf.b", "llvm.x86.avx512.pshuf.b.512"), now.ssse3)
    if now.arch == "aarch64":
        names = {128: "llvm.aarch64.neon.tbl1.v16i8"}

    def generic(builder: Any, table: Any, indices: Any) -> Any:
        lanes = indices.type.count
        result = _splat(indices.type, 0)
        for index in range(16):
            here = builder.icmp_unsigned("==", indices, _splat(indices.type, index))
            entry = shuffled(builder, table, table, [index] * lanes)
            result = builder.select(here, entry, result)
        return result

    return by_width(builder, _native(names, I8, 1), generic, [table, indices])


def lookup64(builder: Any, table: Any, indices: Any) -> Any:
    """table[index & 63] for 64 index bytes: one permutation, or a look-up per 16 bytes of the table."""
    if target().vbmi:
        return call(builder, "llvm.x86.avx512.permvar.qi.512", indices.type, [table, indices])
    low = builder.and_(indices, _splat(indices.type, 15))
    result = _splat(indices.type, 0)
    for part in range(4):
        wide = shuffled(builder, table, table, [16 * part + lane % 16 for lane in range(64)])
        here = builder.and_(indices, _splat(indices.type, 48))
        here = builder.icmp_unsigned("==", here, _splat(indices.type, 16 * part))
        result = builder.select(here, lookup16(builder, wide, low), result)
    return result


def _even_odd(builder: Any, bytes_: Any, right: str) -> tuple[Any, Any]:
    """The even and the odd bytes as int16; `right` is the shift that extends them (lshr or ashr)."""
    words = _vector(I16, bytes_.type.count // 2)
    pairs, eight = builder.bitcast(bytes_, words), _splat(words, 8)
    shift = getattr(builder, right)
    return shift(builder.shl(pairs, eight), eight), shift(pairs, eight)


def maddubs(builder: Any, a: Any, b: Any) -> Any:
    """Unsigned times signed bytes, neighbours added to int16."""
    now = target()
    last = ("llvm.x86.ssse3.pmadd.ub.sw.128", "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx512.pmaddubs.w.512")

    def generic(builder: Any, a: Any, b: Any) -> Any:
        (a0, a1), (b0, b1) = _even_odd(builder, a, "lshr"), _even_odd(builder, b, "ashr")
        return builder.add(builder.mul(a0, b0), builder.mul(a1, b1))

    return by_width(builder, _native(_x86(now, last, now.ssse3), I16, 2), generic, [a, b])


def maddwd(builder: Any, a: Any, b: Any) -> Any:
    """int16 times int16, neighbours added to int32."""
    names = ("llvm.x86.sse2.pmadd.wd", "llvm.x86.avx2.pmadd.wd", "llvm.x86.avx512.pmaddw.d.512")

    def generic(builder: Any, a: Any, b: Any) -> Any:
        words = _vector(I32, a.type.count // 2)
        sixteen = _splat(words, 16)

        def parts(value: Any) -> tuple[Any, Any]:
            pairs = builder.bitcast(value, words)
            return builder.ashr(builder.shl(pairs, sixteen), sixteen), builder.ashr(pairs, sixteen)

        (a0, a1), (b0, b1) = parts(a), parts(b)
        return builder.add(builder.mul(a0, b0), builder.mul(a1, b1))

    return by_width(builder, _native(_x86(target(), names, True), I32, 2), generic, [a, b])


def _dpbusd(now: Target) -> dict[int, Any]:
    widths = {128: now.vnni, 256: now.vnni, 512: now.vnni512}

    def form(width: int) -> Any:
        def emit(builder: Any, total: Any, a: Any, b: Any) -> Any:
            return call(builder, f"llvm.x86.avx512.vpdpbusd.{width}", total.type, [total, a, b])

        return emit

    return {width: form(width) for width, ok in widths.items() if ok}


def dot_us(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """total + 4 products per lane, a unsigned over its whole range, b signed."""

    def generic(builder: Any, total: Any, a: Any, b: Any) -> Any:
        # maddubs would saturate for a above 127, so even and odd bytes go through int16 of their own.
        (a0, a1), (b0, b1) = _even_odd(builder, a, "lshr"), _even_odd(builder, b, "ashr")
        return builder.add(total, builder.add(maddwd(builder, a0, b0), maddwd(builder, a1, b1)))

    return by_width(builder, _dpbusd(target()), generic, [total, a, b])


def dot_ss(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """total + 4 products per lane, both signed."""
    forms = {128: _sdot} if target().dotprod else {}

    def generic(builder: Any, total: Any, a: Any, b: Any) -> Any:
        (a0, a1), (b0, b1) = _even_odd(builder, a, "ashr"), _even_odd(builder, b, "ashr")
        return builder.add(total, builder.add(maddwd(builder, a0, b0), maddwd(builder, a1, b1)))

    return by_width(builder, forms, generic, [total, a, b])


def _sdot(builder: Any, total: Any, a: Any, b: Any) -> Any:
    return call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", total.type, [total, a, b])
