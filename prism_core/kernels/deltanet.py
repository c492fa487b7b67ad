"""The gated delta net: causal convolution of the projected inputs, gates, and the scan of the state.

The scan goes through the tokens of a call one by one, in prefill as in decode, so the state after a token does not
depend on how the tokens were cut into calls. Units are independent: blocks of channels, blocks of value columns.

The recurrent state is read from the context's `STATE_BEFORE` by the first token of a call and written to
`STATE_AFTER`; the two may be one memory. Different memories leave the old state as it was.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from prism_core.kernels.jit import entry
from prism_core.kernels.memory import copy, load_f32, store_f32
from prism_core.kernels.numeric import exp_f32, one_plus_exp_of_minus, sigmoid_f32x16
from prism_core.kernels.simd import (
    add,
    broadcast4_f32x16,
    div,
    fma,
    load_f32x16,
    mul,
    splat_f32x16,
    store,
    sub,
)
from prism_core.kernels.words import OPERATION, STATE_AFTER, STATE_BEFORE, TOKENS, argument, word

TAPS = 4
CHANNELS = 16
COLUMNS = 32
"""Value columns of one scan unit: its state, 32 columns of every key element, stays in the first-level cache."""
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@entry(OPERATION)
def convolve(operation: Any, context: Any, begin: Any, end: Any, thread: Any) -> None:
    """(u, pitch, taps [channel][4], channels, offset of the window in the state, workspace, its bytes per thread):
    u = silu(taps . (the three u before, u)) for 16 channels to a unit; the window keeps the last three u, oldest first.
    """
    pitch, taps, channels = argument(operation, 1), argument(operation, 2), argument(operation, 3)
    before = word(context, STATE_BEFORE) + 4 * argument(operation, 4)
    after = word(context, STATE_AFTER) + 4 * argument(operation, 4)
    turned = argument(operation, 5) + thread * argument(operation, 6)
    row = 4 * channels
    for unit in range(begin, end):
        for channel in range(CHANNELS):
            for tap in range(TAPS):
                weight = load_f32(taps + 4 * (TAPS * (unit * CHANNELS + channel) + tap))
                store_f32(turned + 4 * (tap * CHANNELS + channel), weight)
        w0, w1 = load_f32x16(turned), load_f32x16(turned + 64)
        w2, w3 = load_f32x16(turned + 128), load_f32x16(turned + 192)
        at = 4 * CHANNELS * unit
        oldest, older = load_f32x16(before + at), load_f32x16(before + row + at)
        old = load_f32x16(before + 2 * row + at)
        for token in range(word(context, TOKENS)):
            u = argument(operation, 0) + 4 * token * pitch + at
            now = load_f32x16(u)
            c = add(add(add(mul(w0, oldest), mul(w1, older)), mul(w2, old)), mul(w3, now))
            store(u, div(c, one_plus_exp_of_minus(c)))
            oldest, older, old = older, old, now
        store(after + at, oldest)
        store(after + row + at, older)
        store(after + 2 * row + at, old)


@entry(OPERATION)
def delta_gates(operation: Any, context: Any, begin: Any, end: Any, thread: Any) -> None:
    """(beta, pitch, alpha, pitch, dt, a, heads): beta = sigmoid(beta), alpha = exp(a * softplus(alpha + dt))."""
    for token in range(begin, end):
        beta = argument(operation, 0) + 4 * token * argument(operation, 1)
        alpha = argument(operation, 2) + 4 * token * argument(operation, 3)
        for head in range(argument(operation, 6)):
            b = np.float64(load_f32(beta + 4 * head))
            store_f32(beta + 4 * head, np.float32(1.0 / (1.0 + math.exp(-b))))
            x = np.float64(load_f32(alpha + 4 * head)) + np.float64(load_f32(argument(operation, 4) + 4 * head))
            softplus = x if x > 20.0 else math.log1p(math.exp(x))
            decay = np.float64(load_f32(argument(operation, 5) + 4 * head)) * softplus
            store_f32(alpha + 4 * head, np.float32(math.exp(decay)))


@entry(OPERATION)
def delta_scan(operation: Any, context: Any, begin: Any, end: Any, thread: Any) -> None:
    """(u, pitch, beta, pitch, decay, pitch, o, pitch, key heads, size, offset of the state).

    A unit is (value head, block of 32 columns); its state is [size][32], one unit after another. u holds q, k (unit
    length) and v side by side. For each token: S *= decay; d = (v - S^T k) beta; S += k d^T; o = S^T q / sqrt(size).
    """
    groups, size = argument(operation, 8), argument(operation, 9)
    blocks = size // COLUMNS
    scale = splat_f32x16(_ONE / math.sqrt(np.float32(size)))
    for unit in range(begin, end):
        head, block = unit // blocks, unit % blocks
        place = 4 * (argument(operation, 10) + unit * size * COLUMNS)
        state, before = word(context, STATE_AFTER) + place, word(context, STATE_BEFORE) + place
        if state != before:
            copy(state, before, 4 * size * COLUMNS)
        for token in range(word(context, TOKENS)):
            u = argument(operation, 0) + 4 * token * argument(operation, 1)
            q, k = u + 4 * (head % groups) * size, u + 4 * (groups + head % groups) * size
            v = u + 4 * (2 * groups * size + head * size + block * COLUMNS)
            beta = load_f32(argument(operation, 2) + 4 * (token * argument(operation, 3) + head))
            decay = load_f32(argument(operation, 4) + 4 * (token * argument(operation, 5) + head))
            o = argument(operation, 6) + 4 * (token * argument(operation, 7) + head * size + block * COLUMNS)
            decays = splat_f32x16(decay)
            read0 = read1 = splat_f32x16(_ZERO)
            for i in range(size):
                key = broadcast4_f32x16(k + 4 * i)
                read0 = fma(key, load_f32x16(state + 128 * i), read0)
                read1 = fma(key, load_f32x16(state + 128 * i + 64), read1)
            strength = splat_f32x16(beta)
            d0 = mul(sub(load_f32x16(v), mul(decays, read0)), strength)
            d1 = mul(sub(load_f32x16(v + 64), mul(decays, read1)), strength)
            out0 = out1 = splat_f32x16(_ZERO)
            for i in range(size):
                key, query = broadcast4_f32x16(k + 4 * i), broadcast4_f32x16(q + 4 * i)
                s0 = fma(key, d0, mul(load_f32x16(state + 128 * i), decays))
                s1 = fma(key, d1, mul(load_f32x16(state + 128 * i + 64), decays))
                store(state + 128 * i, s0)
                store(state + 128 * i + 64, s1)
                out0, out1 = fma(query, s0, out0), fma(query, s1, out1)
            store(o, mul(out0, scale))
            store(o + 64, mul(out1, scale))


@entry(OPERATION)
def sigmoid_gate(operation: Any, context: Any, begin: Any, end: Any, thread: Any) -> None:
    """(x, pitch, source, pitch, heads, width, head stride in source, offset): x *= sigmoid(gate), gates interleaved."""
    heads, width, stride = argument(operation, 4), argument(operation, 5), argument(operation, 6)
    for token in range(begin, end):
        for head in range(heads):
            x = argument(operation, 0) + 4 * (token * argument(operation, 1) + head * width)
            gate = argument(operation, 2) + 4 * (
                token * argument(operation, 3) + head * stride + argument(operation, 7)
            )
            whole = width - width % 16
            for i in range(0, 4 * whole, 64):
                store(x + i, mul(load_f32x16(x + i), sigmoid_f32x16(load_f32x16(gate + i))))
            for i in range(whole, width):
                g = load_f32(gate + 4 * i)
                store_f32(x + 4 * i, load_f32(x + 4 * i) * (_ONE / (_ONE + exp_f32(-g))))
