"""Attention against float64, and against itself for every number of queries together."""

from __future__ import annotations

import numpy as np
import pytest

from prism_core.kernels import words
from prism_core.kernels.attention import attention_f16, attention_f32, join_segments
from prism_core.kernels.attention_tiles import ROW_BYTES

SEED = 20261104
QUERIES_PER_UNIT = 16


class Attention:
    """Keys and values of `positions` tokens in pages, and queries for the last of them."""

    def __init__(
        self, kv_heads: int, group: int, dim: int, positions: int, *, window: int = 0, half: bool = True
    ) -> None:
        rng = np.random.default_rng(SEED)
        kind, self.entry = (np.float16, attention_f16) if half else (np.float32, attention_f32)
        self.kv_heads, self.group, self.dim, self.window, self.positions = kv_heads, group, dim, window, positions
        self.row, count = -(-dim // 32) * 32, -(-positions // 32)
        self.k = rng.standard_normal((positions, kv_heads, dim)).astype(kind)
        self.v = rng.standard_normal((positions, kv_heads, dim)).astype(kind)
        self.q = rng.standard_normal((positions, kv_heads * group, dim)).astype(np.float32)
        self.scale = float(np.float32(dim**-0.5))
        self.pages = np.full((count, kv_heads, 32 * (dim + self.row)), np.nan, kind)
        for at in range(positions):
            page = self.pages[at // 32]
            page[:, at % 32 : 32 * dim : 32] = self.k[at]
            values = page[:, 32 * dim :].reshape(kv_heads, 32, self.row)
            values[:, at % 32, :dim], values[:, at % 32, dim:] = self.v[at], 0
        self.table = np.array([page.ctypes.data for page in self.pages], np.int64)

    def expected(self, tokens: int) -> np.ndarray:
        """float64[tokens, heads, dim] of the last tokens."""
        q, k, v = (x.astype(np.float64) for x in (self.q, self.k, self.v))
        out = []
        for at in range(self.positions - tokens, self.positions):
            first = max(at + 1 - self.window, 0) if self.window else 0
            keys, values = (np.repeat(x[first : at + 1], self.group, 1) for x in (k, v))
            scores = np.einsum("hd,khd->hk", q[at], keys) * self.scale
            weights = np.exp(scores - scores.max(1, keepdims=True))
            out.append(np.einsum("hk,khd->hd", weights / weights.sum(1, keepdims=True), values))
        return np.array(out)

    def found(self, begin: int, end: int) -> np.ndarray:
        """float32[tokens, heads, dim] of the positions [begin, end), computed in one call."""
        tokens, heads, row = end - begin, self.kv_heads * self.group, self.row
        q, out = np.ascontiguousarray(self.q[begin:end]), np.full((tokens, heads, self.dim), np.nan, np.float32)
        rows = QUERIES_PER_UNIT * self.group
        work = np.full(rows * (3 * row + 3 * ROW_BYTES // 4), np.nan, np.float32)
        partial = self.group * (4 * row + 2 * ROW_BYTES)
        segments = (end - 1) // words.SEGMENT_TOKENS + 1
        partials = np.full(segments * self.kv_heads * partial // 4, np.nan, np.float32)
        context = np.zeros(words.CONTEXT_WORDS, np.int64)
        context[[words.TOKENS, words.POSITION, words.PAGES]] = tokens, begin, self.table.ctypes.data
        scale = int(np.float32(self.scale).view(np.uint32))
        operation, join = np.zeros((2, words.OPERATION_WORDS), np.int64)
        given = [q.ctypes.data, heads * self.dim, self.dim, out.ctypes.data, heads * self.dim, 0, self.kv_heads]
        given += [self.group, self.dim, row, self.window, scale, QUERIES_PER_UNIT, work.ctypes.data, work.nbytes]
        given += [partials.ctypes.data, partial]
        operation[words.ARGUMENTS :][: len(given)] = given
        given = [out.ctypes.data, self.kv_heads, self.group, self.dim, row, partials.ctypes.data, partial]
        given += [work.ctypes.data, work.nbytes, self.window]
        join[words.ARGUMENTS :][: len(given)] = given
        blocks = segments if tokens == 1 else -(-tokens // QUERIES_PER_UNIT)
        for unit in range(0, blocks * self.kv_heads, 3):
            last = min(unit + 3, blocks * self.kv_heads)
            self.entry(operation.ctypes.data, context.ctypes.data, unit, last, 0)
        join_segments(join.ctypes.data, context.ctypes.data, 0, 1, 0)
        return out


SHAPES = [
    pytest.param(1, 1, 64, 70, 0, id="one head"),
    pytest.param(2, 2, 128, 300, 0, id="two queries of a key"),
    pytest.param(3, 3, 64, 290, 0, id="three"),
    pytest.param(1, 4, 256, 290, 100, id="four, in a window"),
    pytest.param(2, 7, 33, 45, 9, id="an odd width in a window"),
    pytest.param(1, 9, 2, 33, 0, id="the least width"),
    pytest.param(1, 3, 1, 40, 5, id="a single dimension"),
]


@pytest.mark.parametrize("half", [True, False], ids=["float16", "float32"])
@pytest.mark.parametrize(("kv_heads", "group", "dim", "positions", "window"), SHAPES)
def test_attention_agrees_with_the_definition_and_with_itself(
    kv_heads: int, group: int, dim: int, positions: int, window: int, half: bool
) -> None:
    print("seed", SEED)
    attention = Attention(kv_heads, group, dim, positions, window=window, half=half)
    tokens = min(positions, 37)
    together = attention.found(positions - tokens, positions)
    assert np.abs(together - attention.expected(tokens)).max() < 3e-6
    for size in (1, 5, 16):
        for begin in range(positions - tokens, positions, size):
            some = attention.found(begin, min(begin + size, positions))
            first = begin - (positions - tokens)
            assert (some.view(np.uint32) == together[first : first + len(some)].view(np.uint32)).all(), (begin, size)
