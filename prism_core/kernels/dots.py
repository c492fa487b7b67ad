"""The arithmetic of 32 columns: exact integer sums, then float32 in a fixed order.

With s the row's scale, m its minimum, d and `sum` the activations' scale and integer sum:

    one scale:   acc = fma(float(I) * s, d, acc)                          I = sum of (code - offset) * q
    two scales:  acc = fma(fma(float(I0), s0, float(I1) * s1), d, acc)    of 16 columns each
    one minimum: acc = fma(m, d * float(sum), acc)
    two:         acc = fma(m1, d * float(sum1), fma(m0, d * float(sum0), acc))

The integers are exact in every processor's form of them (|I| <= 32 * 255 * 127), so all forms with a fused multiply-add
agree bit for bit, and all without.

`codes[v][j]` is the j-th vector of 4 columns of the v-th group of rows; results are `[v][token]`. Instructions come out
column by column, so that a broadcast of 4 activations serves all groups of rows, and 4 codes of a row all tokens.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from prism_core.kernels import forms
from prism_core.kernels.coding import (
    A8_NEGATED_HIGH_SUM,
    A8_NEGATED_SUM,
    A8_SCALE,
    A8_SCALED_SUM,
    LIFT,
    LIFTED,
    PARTED_SIGNS,
    PARTED_START,
)
from prism_core.kernels.layout import Layout
from prism_core.kernels.staging import Lanes, Place, filled, fused, kept
from prism_core.kernels.target import target
from prism_core.kernels.vectors import vector

Codes = Sequence[Callable[[int], Lanes]]
"""For each group of rows, the vector of columns 4j to 4j + 3."""


def integer_sums(layout: Layout, codes: Codes, acts: list[Place], chains: int) -> list[list[list[Lanes]]]:
    """[v][token] -> `scales_per_32` vectors of exact int32 sums of (code - offset) * q, over equal parts of 32 columns.

    With parted activations they are `LIFT` more.

    Sums are kept in at least `chains` chains of dependent instructions: 2 hides their latency where few are in flight.
    """
    parts = layout.scales_per_32
    now = target()
    if layout.parted:
        return _parted(codes, acts, chains)
    if now.vnni or (now.dotprod and layout.largest < 128):
        dot = forms.dot_us if now.vnni else forms.dot_ss
        return _chained(layout, dot, codes, acts, max(chains, parts))
    if layout.signed or layout.largest > _LARGEST_GROUPED:
        dot = forms.dot_ss if layout.signed else forms.dot_us
        return _chained(layout, dot, codes, acts, max(chains, parts))
    return _grouped(layout, codes, acts)


_LARGEST_GROUPED = 32767 // (4 * 127)
"""The largest code of which two products of pairs are sure to fit in int16."""


def _in_order(codes: Codes, acts: list[Place]) -> Any:
    """What keeps the sums of a whole block in registers, where the processor has just enough of them.

    One token's sums are few, and better left to the compiler. The wider registers are twice as many.
    """
    now = target()
    block = len(codes) * len(acts) > 1
    return kept if block and now.x86 and now.avx2 and not now.avx512 else lambda lanes: lanes


def _offsets(layout: Layout, act: Place, kind: Any) -> list[Lanes]:
    """What the sums start from: -offset times the sum of the activations, for each part."""
    zero = filled(act.builder, kind, 0)
    if not layout.offset:
        return [zero] * layout.scales_per_32
    shift = layout.offset.bit_length() - 1
    total = act.repeat(kind, A8_NEGATED_SUM)
    if layout.scales_per_32 == 1:
        return [total << shift]
    high = act.repeat(kind, A8_NEGATED_HIGH_SUM)
    return [(total - high) << shift, high << shift]


def _merged(chains: list[Lanes], parts: int) -> list[Lanes]:
    """Add the chains of each part."""
    each = len(chains) // parts
    result = chains[::each]
    for part in range(parts):
        for other in chains[part * each + 1 : (part + 1) * each]:
            result[part] = result[part] + other
    return result


def _chained(layout: Layout, dot: Any, codes: Codes, acts: list[Place], chains: int) -> list[list[list[Lanes]]]:
    bytes_ = codes[0](0).kind
    kind, parts = vector("i32", bytes_.lanes // 4), layout.scales_per_32
    zero, keep = filled(acts[0].builder, kind, 0), _in_order(codes, acts)
    starts = [_offsets(layout, act, kind) for act in acts]
    first_of_part = chains // parts
    sums = [
        [[start[i // first_of_part] if i % first_of_part == 0 else zero for i in range(chains)] for start in starts]
        for _ in codes
    ]
    for j in range(8):
        each = [of(j) for of in codes]
        for token, act in enumerate(acts):
            q = act.repeat(bytes_, 4 * j)
            for v, code in enumerate(each):
                chain = sums[v][token]
                before = chain[j * chains // 8]
                total = Lanes(q.builder, kind, dot(q.builder, before.value, code.value, q.value))
                chain[j * chains // 8] = keep(total)
    return [[_merged(chain, parts) for chain in row] for row in sums]


def _parted(codes: Codes, acts: list[Place], chains: int) -> list[list[list[Lanes]]]:
    """Products of sizes with codes that are flipped where the activation is negative.

    Where registers are few, all groups of rows go step by step in the order written, and codes have none: each is
    loaded anew for each token, as an operand of the instruction that flips it.
    """
    builder, bytes_, keep = acts[0].builder, codes[0](0).kind, _in_order(codes, acts)
    words, kind = vector("i16", bytes_.lanes // 2), vector("i32", bytes_.lanes // 4)
    ones, zero = filled(builder, words, 1), filled(builder, kind, 0)
    sums = [[[act.repeat(kind, PARTED_START), *[zero] * (chains - 1)] for act in acts] for _ in codes]
    for j in range(8):
        for token, act in enumerate(acts):
            if keep is kept:
                act.keep_order()
            signs, sizes = act.repeat(bytes_, PARTED_SIGNS + 4 * j), act.repeat(bytes_, 4 * j)
            flipped = [keep(of(j) ^ signs) for of in codes]
            pairs = [keep(Lanes(builder, words, forms.maddubs(builder, sizes.value, each.value))) for each in flipped]
            wide = [keep(Lanes(builder, kind, forms.maddwd(builder, each.value, ones.value))) for each in pairs]
            for row, more in zip(sums, wide, strict=True):
                row[token][j * chains // 8] = keep(row[token][j * chains // 8] + more)
    return [[_merged(chain, 1) for chain in row] for row in sums]


def _grouped(layout: Layout, codes: Codes, acts: list[Place]) -> list[list[list[Lanes]]]:
    """Products are added in int16 for as many vectors as are sure to fit, and only then widened."""
    bytes_, builder, parts = codes[0](0).kind, acts[0].builder, layout.scales_per_32
    words, kind = vector("i16", bytes_.lanes // 2), vector("i32", bytes_.lanes // 4)
    ones, keep = filled(builder, words, 1), _in_order(codes, acts)
    fit = min(8 // parts, 32767 // (2 * 127 * layout.largest))
    size = 1 << (fit.bit_length() - 1)
    # The int16 sums of a block fill the registers. Those of two vectors need not: each is done before the next.
    at_once = size if size == 2 else 1
    sums = [[_offsets(layout, act, kind) for act in acts] for _ in codes]
    pairs: dict[tuple[int, int], Lanes] = {}
    for j in range(0, 8, at_once):
        each = [[of(j + i) for i in range(at_once)] for of in codes]
        for token, act in enumerate(acts):
            values = [act.repeat(bytes_, 4 * (j + i)) for i in range(at_once)]
            for v, vectors in enumerate(each):
                products = [
                    Lanes(builder, words, forms.maddubs(builder, code.value, q.value))
                    for code, q in zip(vectors, values, strict=True)
                ]
                if j % size:
                    products.insert(0, pairs[v, token])
                pair = functools.reduce(operator.add, products)
                if size > 2:
                    pairs[v, token] = pair = keep(pair)
                if (j + at_once) % size == 0:
                    wide = Lanes(builder, kind, forms.maddwd(builder, pair.value, ones.value))
                    part = j * parts // 8
                    total = sums[v][token][part] + wide
                    sums[v][token][part] = total if size > 2 else keep(total)
    return sums


def _scaled(layout: Layout, total: Lanes, scale: Lanes) -> Lanes:
    """float(I) * s, rounded once."""
    if not layout.parted:
        return total.floats() * scale
    if target().fma:
        # LIFTED * s is exact, a scale being a float16; so the lift leaves no trace, and no conversion is needed.
        return fused(total.viewed(scale.kind), scale, scale * -LIFTED)
    return (total - LIFT).floats() * scale


def add_columns(
    layout: Layout, sums: list[Lanes], scales: list[Lanes], minimums: list[Lanes], act: Place, acc: Lanes
) -> Lanes:
    """The float part of 32 columns for one token; see the module's text."""
    scale = act.repeat(acc.kind, A8_SCALE)
    value = _scaled(layout, sums[-1], scales[-1])
    if len(sums) == 2:
        value = fused(sums[0].floats(), scales[0], value)
    acc = fused(value, scale, acc)
    if len(minimums) == 1:
        return fused(minimums[0], act.repeat(acc.kind, A8_SCALED_SUM), acc)
    if minimums:
        kind = vector("i32", acc.kind.lanes)
        total, high = act.repeat(kind, A8_NEGATED_SUM), act.repeat(kind, A8_NEGATED_HIGH_SUM)
        acc = fused(minimums[0], (high - total).floats() * scale, acc)
        acc = fused(minimums[1], (filled(acc.builder, kind, 0) - high).floats() * scale, acc)
    return acc
