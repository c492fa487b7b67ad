"""The arithmetic of 32 columns: exact integer sums, then float32 in a fixed order.

With s the row's scale, m its minimum, d and `sum` the activations' scale and integer sum:

    one scale:   acc = fma(float(I) * s, d, acc)                          I = sum of (code - offset) * q
    two scales:  acc = fma(fma(float(I0), s0, float(I1) * s1), d, acc)    of 16 columns each
    one minimum: acc = fma(m, d * float(sum), acc)
    two:         acc = fma(m1, d * float(sum1), fma(m0, d * float(sum0), acc))

The integers are exact in every processor's form of them (|I| <= 32 * 255 * 127), so all forms agree bit for bit.
"""

from __future__ import annotations

from typing import Any

from prism_core.kernels import forms
from prism_core.kernels.coding import A8_HIGH_SUM, A8_SCALE, A8_SCALED_SUM, A8_SUM
from prism_core.kernels.layout import Layout
from prism_core.kernels.staging import Lanes, Place, filled, fused
from prism_core.kernels.target import target
from prism_core.kernels.vectors import vector


def integer_sums(layout: Layout, codes: list[Lanes], tokens: list[list[Lanes]], parts: int) -> list[list[Lanes]]:
    """For each token, `parts` vectors of exact int32 sums of codes times activations (8 of each, 4 columns in each)."""
    builder, lanes = codes[0].builder, codes[0].kind.lanes // 4
    total = vector("i32", lanes)
    zero = filled(builder, total, 0)
    now = target()
    if now.vnni or (now.dotprod and layout.largest < 128):
        dot = forms.dot_us if now.vnni else forms.dot_ss
        single = _chained(dot, codes, tokens, zero)
    elif layout.signed or layout.largest > 127:
        single = _chained(forms.dot_ss if layout.signed else forms.dot_us, codes, tokens, zero)
    else:
        single = _grouped(layout.largest, codes, tokens, parts)
    each = len(single[0]) // parts
    return [[_added(sums[part * each : (part + 1) * each]) for part in range(parts)] for sums in single]


def _added(values: list[Lanes]) -> Lanes:
    result = values[0]
    for value in values[1:]:
        result = result + value
    return result


def _chained(dot: Any, codes: list[Lanes], tokens: list[list[Lanes]], zero: Lanes) -> list[list[Lanes]]:
    """Two chains of four byte dot products per token; for many tokens these are independent enough."""
    sums = [[zero, zero] for _ in tokens]
    for j, code in enumerate(codes):
        for total, values in zip(sums, tokens, strict=True):
            before = total[j // 4]
            total[j // 4] = Lanes(zero.builder, zero.kind, dot(zero.builder, before.value, code.value, values[j].value))
    return sums


def _grouped(largest: int, codes: list[Lanes], tokens: list[list[Lanes]], parts: int) -> list[list[Lanes]]:
    """Pairs are added in int16 for as many vectors as must fit, and only then widened."""
    builder = codes[0].builder
    words, total = vector("i16", codes[0].kind.lanes // 2), vector("i32", codes[0].kind.lanes // 4)
    ones = filled(builder, words, 1)
    fit = min(8 // parts, 32767 // (2 * 127 * largest))
    size = 1 << (fit.bit_length() - 1)
    sums: list[list[Lanes]] = [[] for _ in tokens]
    for first in range(0, 8, size):
        for result, values in zip(sums, tokens, strict=True):
            pairs = [
                Lanes(builder, words, forms.maddubs(builder, codes[j].value, values[j].value))
                for j in range(first, first + size)
            ]
            wide = forms.maddwd(builder, _added(pairs).value, ones.value)
            result.append(Lanes(builder, total, wide))
    return sums


def add_columns(
    layout: Layout, sums: list[Lanes], scales: list[Lanes], minimums: list[Lanes], act: Place, acc: Lanes
) -> Lanes:
    """The float part of 32 columns for one token; see the module's text."""
    integers = vector("i32", acc.kind.lanes)
    if layout.offset:
        shift = layout.offset.bit_length() - 1
        total = act.repeat(integers, A8_SUM)
        if len(sums) == 2:
            high = act.repeat(integers, A8_HIGH_SUM)
            sums = [sums[0] - ((total - high) << shift), sums[1] - (high << shift)]
        else:
            sums = [sums[0] - (total << shift)]
    scale = act.repeat(acc.kind, A8_SCALE)
    value = sums[-1].floats() * scales[-1]
    if len(sums) == 2:
        value = fused(sums[0].floats(), scales[0], value)
    acc = fused(value, scale, acc)
    if len(minimums) == 1:
        acc = fused(minimums[0], act.repeat(acc.kind, A8_SCALED_SUM), acc)
    elif minimums:
        total, high = act.repeat(integers, A8_SUM), act.repeat(integers, A8_HIGH_SUM)
        acc = fused(minimums[0], (total - high).floats() * scale, acc)
        acc = fused(minimums[1], high.floats() * scale, acc)
    return acc
