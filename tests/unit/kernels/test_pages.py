"""Keys and values in the pages of the cache against numpy, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prism_core.kernels import pages, words

SEED = 20261201
TOKENS, START, OFFSET = 5, 30, 64
"""The tokens go over the end of the first page; another layer's pages stand before `OFFSET`."""
SPECIAL = np.float32(
    [65504, 65519.9, 65520, -65520, 3e38, np.inf, -np.inf, 0.0, -0.0, 6e-5, 5.9e-8, -3e-8, 1e-40, -1e-40, np.nan]
)


def bits(values: np.ndarray) -> np.ndarray:
    """As integers, with one integer for every NaN."""
    return np.where(np.isnan(values), 0x7E00, values.view(f"u{values.itemsize}"))


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("dim", [1, 5, 8, 12, 80])
@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_every_value_is_stored_saturated_and_a_nan_as_a_nan(kind: Any, dim: int, heads: int) -> None:
    print("seed", SEED)
    rng, row, size = np.random.default_rng(SEED), dim + 3, np.dtype(kind).itemsize
    shape = (2, TOKENS, heads, dim)
    k, v = np.where(rng.random(shape) < 0.5, rng.choice(SPECIAL, shape), rng.standard_normal(shape)).astype(np.float32)
    shared = np.full((2, OFFSET + size * words.PAGE_TOKENS * heads * (dim + row)), 0xEE, np.uint8)
    table = np.array([page.ctypes.data for page in shared])
    context, operation = np.zeros(words.CONTEXT_WORDS, np.int64), np.zeros(words.OPERATION_WORDS, np.int64)
    context[words.POSITION], context[words.PAGES] = START, table.ctypes.data
    arguments = (k.ctypes.data, heads * dim, v.ctypes.data, heads * dim, OFFSET, heads, dim, row)
    operation[words.ARGUMENTS : words.ARGUMENTS + len(arguments)] = arguments
    wanted = shared.copy()

    store = pages.store_kv_f16 if kind is np.float16 else pages.store_kv_f32
    store(operation.ctypes.data, context.ctypes.data, 0, TOKENS, 0)

    with np.errstate(all="ignore"):
        most = 65504 if kind is np.float16 else np.inf
        keys, values = (np.clip(each, -most, most).astype(kind) for each in (k, v))
    for token in range(TOKENS):
        page, slot = divmod(START + token, words.PAGE_TOKENS)
        # Per head: keys by dimension, then values by token.
        each = wanted[page, OFFSET:].view(kind).reshape(heads, -1)
        each[:, slot : words.PAGE_TOKENS * dim : words.PAGE_TOKENS] = keys[token]
        each[:, words.PAGE_TOKENS * dim + row * slot :][:, :dim] = values[token]
    assert (bits(shared.view(kind)) == bits(wanted.view(kind))).all()
