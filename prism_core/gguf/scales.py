"""Refusing NaN, infinity and absurdly large numbers where a file stores floats.

Invariant: after `check_scales` every value that `dequantize` makes of the tensor is below 2^32 in magnitude. No model
comes near (no block type with f16 scales can reach it), but one flipped bit in an exponent does, and activations that
overflow on the way end as fluent nonsense and not as an error. Negative, zero and subnormal scales are fine, they are
decoded as they are. Only the scales of quantised blocks are read, so the cost is that of touching the memory once.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..errors import ModelError
from .file import TensorInfo
from .types import BF16_VALUES, E8M0_SCALE, F32_VALUES, TensorType

PIECE = 1 << 17
MAX_E8M0 = 156
"""The largest MXFP4 exponent whose largest level, 12 * 2^(e - 128), is below 2^32."""

_FORMS = {F32_VALUES: ("<u4", 0x7FFFFFFF, 0x4F800000), BF16_VALUES: ("<u2", 0x7FFF, 0x4F80)}
"""How to read a number, and the bits of 2^32, from which on it is refused."""
_HALF = ("<u2", 0x7FFF, 0x7C00)


def check_scales(tensor: TensorInfo) -> None:
    """Raise ModelError where a scale (or a plain value) of `tensor` is NaN, infinite or absurd; names the first one."""
    kind = tensor.type
    if kind.scale_form == E8M0_SCALE:
        _check(tensor, 0, "<u1", 0xFF, MAX_E8M0 + 1)
        return
    dtype, mask, limit = _FORMS.get(kind.scale_form, _HALF)
    for at in kind.scales:
        _check(tensor, at, dtype, mask, limit)


def check_all_scales(tensors: Iterable[TensorInfo]) -> None:
    """`check_scales` of each."""
    for tensor in tensors:
        check_scales(tensor)


def _check(tensor: TensorInfo, at: int, dtype: str, mask: int, limit: int) -> None:
    """Find stored numbers whose bits under `mask` reach `limit`, one number per block at byte `at`."""
    step = tensor.type.block_bytes
    count = tensor.nbytes // step
    numbers = np.ndarray((count,), dtype, buffer=tensor.data, offset=at, strides=(step,))
    scratch = np.empty(min(count, PIECE), numbers.dtype)
    for begin in range(0, count, PIECE):
        piece = numbers[begin : begin + PIECE]
        masked = np.bitwise_and(piece, numbers.dtype.type(mask), out=scratch[: len(piece)])
        if masked.max() >= limit:
            raise _error(tensor, begin + int(np.argmax(masked >= limit)), at)


def _error(tensor: TensorInfo, block: int, at: int) -> ModelError:
    kind = tensor.type
    if kind is TensorType.MXFP4:
        exponent = int(tensor.data[block * kind.block_bytes])
        return ModelError(
            f"tensor {tensor.name!r}: block {block} has the scale exponent {exponent}; the limit is {MAX_E8M0}"
        )
    raw = tensor.data[block * kind.block_bytes + at :]
    if kind is TensorType.F32:
        value = raw[:4].view("<f4")[0]
    elif kind is TensorType.BF16:
        value = (raw[:2].view("<u2").astype(np.uint32) << 16).view(np.float32)[0]
    else:
        value = raw[:2].view("<f2")[0]
    what = "value" if kind.block_size == 1 else "the scale of block"
    return ModelError(
        f"tensor {tensor.name!r}: {what} {block} is {value}; stored numbers must be finite and below 2^32"
    )
