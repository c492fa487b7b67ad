"""Writing keys and values into the pages of the cache; `attention` says how a page is laid out."""

from __future__ import annotations

from typing import Any

import numpy as np

from prism_core.kernels.jit import device, entry
from prism_core.kernels.memory import load_f32, store_f16, store_f32
from prism_core.kernels.simd import less, load_f32x8, select, splat_f32x8, store, store_apart, to_f16
from prism_core.kernels.words import OPERATION, PAGE_TOKENS, PAGES, POSITION, argument, word

_LARGEST_HALF = np.float32(65504.0)


@device
def _store_half(address: Any, value: Any) -> None:
    """Saturating, so that a huge value cannot become an infinity that 0 would turn into NaN. A NaN stays one."""
    store_f16(address, max(min(value, _LARGEST_HALF), -_LARGEST_HALF))


@device
def _halves(values: Any) -> Any:
    """The same of eight values; `minimum` and `maximum` would turn a NaN into a number, and nobody would be told."""
    largest, least = splat_f32x8(_LARGEST_HALF), splat_f32x8(-_LARGEST_HALF)
    values = select(less(largest, values), largest, values)
    return to_f16(select(less(values, least), least, values))


@device
def _floats(values: Any) -> Any:
    return values


def _store_kv(size: int, put: Any, narrow: Any, name: str) -> Any:
    def store_kv(operation: Any, context: Any, begin: Any, end: Any, thread: Any) -> None:
        """(k, pitch, v, pitch, offset in page, heads, head_dim, V row): put k and v of each token into its page."""
        heads, dim, row = argument(operation, 5), argument(operation, 6), argument(operation, 7)
        eights = dim // 8 * 8
        for token in range(begin, end):
            position = word(context, POSITION) + token
            page = word(word(context, PAGES), position // PAGE_TOKENS) + argument(operation, 4)
            slot = position % PAGE_TOKENS
            k = argument(operation, 0) + 4 * token * argument(operation, 1)
            v = argument(operation, 2) + 4 * token * argument(operation, 3)
            for head in range(heads):
                keys = page + size * PAGE_TOKENS * (dim + row) * head
                values = keys + size * PAGE_TOKENS * dim + size * slot * row
                for i in range(0, eights, 8):
                    inside = 4 * (head * dim + i)
                    apart = keys + size * (PAGE_TOKENS * i + slot)
                    store_apart(apart, narrow(load_f32x8(k + inside)), size * PAGE_TOKENS)
                    store(values + size * i, narrow(load_f32x8(v + inside)))
                for i in range(eights, dim):
                    put(keys + size * (PAGE_TOKENS * i + slot), load_f32(k + 4 * (head * dim + i)))
                    put(values + size * i, load_f32(v + 4 * (head * dim + i)))

    return entry(OPERATION, name=name)(store_kv)


store_kv_f16 = _store_kv(2, _store_half, _halves, "store_kv_f16")
store_kv_f32 = _store_kv(4, store_f32, _floats, "store_kv_f32")
