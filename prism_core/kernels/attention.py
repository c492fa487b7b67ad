"""Causal attention over pages of keys and values, 32 positions to a page, by an online softmax.

In a page, K of a kv head is stored [head_dim][32], so that the 32 scores of a tile are lanes of vectors, and V
[32][head_dim rounded up to 16]. Several queries of one head group share each load of K and V.

Invariant: for one query of one head the float operations and their order depend only on its position: tiles of 32
keys at absolute positions in rising order, dimensions in rising order inside a score, keys in rising order inside a
weighted sum. It does not matter with how many other queries it is computed. Keys above the position, and below the
window, are never read as numbers: what stands in the unused part of a page has no influence.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from prism_core.kernels.jit import device, entry
from prism_core.kernels.memory import load_f32, store_f16, store_f32
from prism_core.kernels.numeric import exp_f32, exp_f32x16
from prism_core.kernels.simd import (
    add,
    and_,
    broadcast4_f32x16,
    constant,
    fma,
    i32x16,
    less,
    load_f16x16,
    load_f32x16,
    max_lanes,
    maximum,
    mul,
    select,
    splat_f32x16,
    splat_i32x16,
    store,
    sum_lanes,
    to_f32,
)
from prism_core.kernels.words import OPERATION, PAGE_TOKENS, PAGES, POSITION, TOKENS, argument, real, word

_LANES_LOW, _LANES_HIGH = constant(i32x16, range(16)), constant(i32x16, range(16, 32))
_NONE, _ZERO = np.float32(-1e30), np.float32(0.0)
_LARGEST_HALF = np.float32(65504.0)


@device
def _load_half(address: Any) -> Any:
    return to_f32(load_f16x16(address))


@device
def _store_half(address: Any, value: Any) -> None:
    """Saturating, so that a huge value cannot become an infinity that 0 would turn into NaN."""
    store_f16(address, max(min(value, _LARGEST_HALF), -_LARGEST_HALF))


def _store_kv(size: int, put: Any, name: str) -> Any:
    def store_kv(operation: Any, context: Any, begin: Any, end: Any, thread: Any) -> None:
        """(k, pitch, v, pitch, offset in page, heads, head_dim, V row): put k and v of each token into its page."""
        heads, dim, row = argument(operation, 5), argument(operation, 6), argument(operation, 7)
        for token in range(begin, end):
            position = word(context, POSITION) + token
            page = word(word(context, PAGES), position // PAGE_TOKENS) + argument(operation, 4)
            slot = position % PAGE_TOKENS
            k = argument(operation, 0) + 4 * token * argument(operation, 1)
            v = argument(operation, 2) + 4 * token * argument(operation, 3)
            for head in range(heads):
                keys = page + size * PAGE_TOKENS * (dim + row) * head
                values = keys + size * PAGE_TOKENS * dim + size * slot * row
                for i in range(dim):
                    put(keys + size * (PAGE_TOKENS * i + slot), load_f32(k + 4 * (head * dim + i)))
                    put(values + size * i, load_f32(v + 4 * (head * dim + i)))

    return entry(OPERATION, name=name)(store_kv)


store_kv_f16 = _store_kv(2, _store_half, "store_kv_f16")
store_kv_f32 = _store_kv(4, store_f32, "store_kv_f32")


@device
def _softmax_row(scores: Any, state: Any, low: Any, high: Any) -> Any:
    """Turn 32 scores into weights against the running maximum; the factor that older sums must be scaled by.

    `state`: maximum (1 float, in a row of 16), then 16 partial sums. Keys outside [low, high) get weight 0.
    """
    a, b = load_f32x16(scores), load_f32x16(scores + 64)
    bottom, top = splat_i32x16(low - 1), splat_i32x16(high)
    seen_a = and_(less(bottom, _LANES_LOW()), less(_LANES_LOW(), top))
    seen_b = and_(less(bottom, _LANES_HIGH()), less(_LANES_HIGH(), top))
    none = splat_f32x16(_NONE)
    a, b = select(seen_a, a, none), select(seen_b, b, none)
    before = load_f32(state)
    highest = max(before, max_lanes(maximum(a, b)))
    store_f32(state, highest)
    shift = splat_f32x16(-highest)
    zero = splat_f32x16(_ZERO)
    a = select(seen_a, exp_f32x16(add(a, shift)), zero)
    b = select(seen_b, exp_f32x16(add(b, shift)), zero)
    store(scores, a)
    store(scores + 64, b)
    factor = exp_f32(before - highest)
    sums = load_f32x16(state + 64)
    store(state + 64, fma(sums, splat_f32x16(factor), add(a, b)))
    return factor


def _tile_products(load: Any, size: int) -> Any:
    """Functions on one tile of keys or values whose elements `load` reads 16 at a time."""
    tile_row = size * PAGE_TOKENS
    half_row = size * 16

    @device
    def scores_of_two(q: Any, pitch: Any, keys: Any, dim: Any, scores: Any) -> None:
        a0 = a1 = b0 = b1 = splat_f32x16(_ZERO)
        for i in range(dim):
            k0, k1 = load(keys + tile_row * i), load(keys + tile_row * i + half_row)
            qa, qb = broadcast4_f32x16(q + 4 * i), broadcast4_f32x16(q + pitch + 4 * i)
            a0, a1, b0, b1 = fma(qa, k0, a0), fma(qa, k1, a1), fma(qb, k0, b0), fma(qb, k1, b1)
        store(scores, a0)
        store(scores + 64, a1)
        store(scores + 128, b0)
        store(scores + 192, b1)

    @device
    def scores_of_one(q: Any, keys: Any, dim: Any, scores: Any) -> None:
        a0 = a1 = splat_f32x16(_ZERO)
        for i in range(dim):
            qa = broadcast4_f32x16(q + 4 * i)
            a0 = fma(qa, load(keys + tile_row * i), a0)
            a1 = fma(qa, load(keys + tile_row * i + half_row), a1)
        store(scores, a0)
        store(scores + 64, a1)

    @device
    def add_values(weights: Any, values: Any, row: Any, low: Any, high: Any, out: Any, factor: Any) -> None:
        """out = factor * out + sum of weight x value over the keys [low, high), 16 dimensions at a time."""
        scaled = splat_f32x16(factor)
        for i in range(0, row, 16):
            total = mul(load_f32x16(out + 4 * i), scaled)
            for key in range(low, high):
                total = fma(broadcast4_f32x16(weights + 4 * key), load(values + size * (key * row + i)), total)
            store(out + 4 * i, total)

    return scores_of_two, scores_of_one, add_values


def _attention(load: Any, size: int, name: str) -> Any:
    scores_of_two, scores_of_one, add_values = _tile_products(load, size)

    @device
    def tile(operation: Any, keys: Any, first_key: Any, position: Any, rows: Any, work: Any) -> None:
        """One tile of 32 keys for `rows` query rows, whose positions rise by one every `group` rows."""
        dim, row, group = argument(operation, 8), argument(operation, 9), argument(operation, 7)
        window = argument(operation, 10)
        values = keys + size * PAGE_TOKENS * dim
        pitch = 4 * row
        queries, sums = work, work + rows * pitch
        states = sums + rows * pitch
        scores = states + rows * 128
        for r in range(0, rows - 1, 2):
            scores_of_two(queries + r * pitch, pitch, keys, dim, scores + 128 * r)
        if rows % 2 == 1:
            scores_of_one(queries + (rows - 1) * pitch, keys, dim, scores + 128 * (rows - 1))
        for r in range(rows):
            at = position + r // group
            high = min(at + 1 - first_key, PAGE_TOKENS)
            low = max(at + 1 - window - first_key, 0) if window > 0 else 0
            if low < high:
                factor = _softmax_row(scores + 128 * r, states + 128 * r, low, high)
                add_values(scores + 128 * r, values, row, low, high, sums + r * pitch, factor)

    @device
    def load_queries(operation: Any, first: Any, last: Any, head: Any, rows: Any, work: Any) -> None:
        """Scaled queries, cleared sums and states."""
        dim, row, group = argument(operation, 8), argument(operation, 9), argument(operation, 7)
        scale = real(operation, 11)
        states = work + rows * 8 * row
        for token in range(first, last):
            for member in range(group):
                r = (token - first) * group + member
                q = argument(operation, 0) + 4 * (
                    token * argument(operation, 1) + (head * group + member) * argument(operation, 2)
                )
                for i in range(dim):
                    store_f32(work + 4 * (r * row + i), load_f32(q + 4 * i) * scale)
                for i in range(row):
                    store_f32(work + 4 * ((rows + r) * row + i), _ZERO)
                store_f32(states + 128 * r, _NONE)
                store(states + 128 * r + 64, splat_f32x16(_ZERO))

    @device
    def store_results(operation: Any, first: Any, last: Any, head: Any, rows: Any, work: Any) -> None:
        dim, row, group = argument(operation, 8), argument(operation, 9), argument(operation, 7)
        states = work + rows * 8 * row
        for token in range(first, last):
            for member in range(group):
                r = (token - first) * group + member
                out = argument(operation, 3) + 4 * (token * argument(operation, 4) + (head * group + member) * dim)
                total = sum_lanes(load_f32x16(states + 128 * r + 64))
                for i in range(dim):
                    store_f32(out + 4 * i, load_f32(work + 4 * ((rows + r) * row + i)) / total)

    def attention(operation: Any, context: Any, begin: Any, end: Any, thread: Any) -> None:
        """(q, pitch, head stride, out, pitch, offset in page, kv heads, group, head_dim, V row, window, scale,
        queries per unit, workspace, its bytes per thread): units are (block of queries, kv head)."""
        dim, row, group = argument(operation, 8), argument(operation, 9), argument(operation, 7)
        heads, window, queries = argument(operation, 6), argument(operation, 10), argument(operation, 12)
        work = argument(operation, 13) + thread * argument(operation, 14)
        pages, tokens = word(context, PAGES), word(context, TOKENS)
        for unit in range(begin, end):
            head = unit % heads
            first = unit // heads * queries
            last = min(first + queries, tokens)
            rows = (last - first) * group
            load_queries(operation, first, last, head, rows, work)
            position = word(context, POSITION) + first
            lowest = max(position + 1 - window, 0) if window > 0 else 0
            for page in range(lowest // PAGE_TOKENS, (position + last - first - 1) // PAGE_TOKENS + 1):
                keys = word(pages, page) + argument(operation, 5) + size * PAGE_TOKENS * (dim + row) * head
                tile(operation, keys, page * PAGE_TOKENS, position, rows, work)
            store_results(operation, first, last, head, rows, work)

    return entry(OPERATION, name=name)(attention)


attention_f16 = _attention(_load_half, 2, "attention_f16")
attention_f32 = _attention(load_f32x16, 4, "attention_f32")
