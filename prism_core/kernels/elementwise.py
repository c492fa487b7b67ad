"""Operations that work on one token's values at a time: embedding rows, sums, scaling, gates, encoding.

Rows are read and written in steps of 16 floats: the scratch arena rounds every row up to that, and what stands behind
the last value of a row is never read as a value.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from prism_core.kernels.faults import check
from prism_core.kernels.jit import device, entry
from prism_core.kernels.memory import call_entry
from prism_core.kernels.numeric import one_plus_exp_of_minus
from prism_core.kernels.simd import add, div, fma, load_f32x16, mul, splat_f32x16, store
from prism_core.kernels.words import IDS, OPERATION, argument, real, word

_GELU_LINEAR = np.float32(2 * 0.7978845608028654)
_GELU_CUBIC = np.float32(2 * 0.7978845608028654 * 0.044715)


@entry(OPERATION)
def embed(operation: Any, context: Any, begin: Any, end: Any, thread: Any) -> None:
    """(row entry, table, rows, cols, out, out pitch): out = row of the table for the token's id."""
    ids = word(context, IDS)
    for token in range(begin, end):
        out = argument(operation, 4) + 4 * token * argument(operation, 5)
        identity = word(ids, token)
        table, rows, cols = argument(operation, 1), argument(operation, 2), argument(operation, 3)
        call_entry(argument(operation, 0), (table, rows, cols, identity, out))


@entry(OPERATION)
def encode(operation: Any, context: Any, begin: Any, end: Any, thread: Any) -> None:
    """(encoder entry, x, stride, cols, out, out stride): out = x in an activation coding; strides in bytes."""
    pitch, stride = argument(operation, 2), argument(operation, 5)
    x = argument(operation, 1) + begin * pitch
    out = argument(operation, 4) + begin * stride
    call_entry(argument(operation, 0), (x, argument(operation, 3), end - begin, pitch, out, stride))


@entry(OPERATION)
def scale(operation: Any, context: Any, begin: Any, end: Any, thread: Any) -> None:
    """(x, pitch, width, factor): x *= factor."""
    factor = splat_f32x16(real(operation, 3))
    for token in range(begin, end):
        x = argument(operation, 0) + 4 * token * argument(operation, 1)
        for at in range(0, 4 * argument(operation, 2), 64):
            store(x + at, mul(load_f32x16(x + at), factor))


@entry(OPERATION)
def add_rows(operation: Any, context: Any, begin: Any, end: Any, thread: Any) -> None:
    """(x, pitch, y, y pitch, width): x += y; a y pitch of 0 adds one vector to every token."""
    for token in range(begin, end):
        x = argument(operation, 0) + 4 * token * argument(operation, 1)
        y = argument(operation, 2) + 4 * token * argument(operation, 3)
        for at in range(0, 4 * argument(operation, 4), 64):
            store(x + at, add(load_f32x16(x + at), load_f32x16(y + at)))


@device
def _silu(x: Any) -> Any:
    """x / (1 + e^-x)."""
    return div(x, one_plus_exp_of_minus(x))


@device
def _gelu(x: Any) -> Any:
    """x/2 (1 + tanh u) = x / (1 + e^-2u), u = sqrt(2/pi) (x + 0.044715 x^3)."""
    square = mul(x, x)
    twice = mul(x, fma(square, splat_f32x16(_GELU_CUBIC), splat_f32x16(_GELU_LINEAR)))
    return div(x, one_plus_exp_of_minus(twice))


def _gated(activation: Any, name: str) -> Any:
    def multiply(operation: Any, context: Any, begin: Any, end: Any, thread: Any) -> None:
        """(gate, pitch, up, up pitch, width): gate = activation(gate) * up."""
        for token in range(begin, end):
            gate = argument(operation, 0) + 4 * token * argument(operation, 1)
            up = argument(operation, 2) + 4 * token * argument(operation, 3)
            for at in range(0, 4 * argument(operation, 4), 64):
                store(gate + at, mul(activation(load_f32x16(gate + at)), load_f32x16(up + at)))
            check(context, operation, gate, argument(operation, 4))

    return entry(OPERATION, name=name)(multiply)


silu_multiply = _gated(_silu, "silu_multiply")
gelu_multiply = _gated(_gelu, "gelu_multiply")
