"""Causal attention over pages of keys and values, 32 positions to a page, by an online softmax.

In a page, K of a kv head is stored [head_dim][32], so that the 32 scores of a tile are lanes of vectors, and V
[32][head_dim rounded up to 32]. Several queries of one head group share each load of K and V.

Positions are cut into segments of 256 keys. Each segment has its own softmax, and the segments are then joined in
rising order. One token's segments may therefore be computed by several threads; a block of tokens computes them one
after another, with the same result.

Invariant: for one query of one head the float operations and their order depend only on its position: keys by tiles of
32 at absolute positions, dimensions in rising order inside a score, keys in rising order inside a weighted sum. It does
not matter with how many other queries it is computed. Keys above the position, and below the window, have no
influence, and what stands in the unused part of a page is never read as a number.
"""

from __future__ import annotations

from typing import Any

from prism_core.kernels.attention_tiles import LINE, ROW_BYTES, ROWS_TOGETHER, scores_of, values_of
from prism_core.kernels.jit import device, entry, inlined
from prism_core.kernels.memory import load_f32, store_f32
from prism_core.kernels.simd import load_f32x8, mul, splat_f32x8, store
from prism_core.kernels.softmax import clear, finish, join, weigh
from prism_core.kernels.words import (
    OPERATION,
    PAGE_TOKENS,
    PAGES,
    POSITION,
    SEGMENT_TOKENS,
    TOKENS,
    argument,
    real,
    word,
)


@device
def _first_segment(position: Any, window: Any) -> Any:
    """The first segment with a key that a query at `position` sees."""
    return max(position + 1 - window, 0) // SEGMENT_TOKENS if window > 0 else 0


@device
def _opening(operation: Any, context: Any, unit: Any, element_bytes: Any) -> Any:
    """Addresses of the first four tiles of a single token's unit; of the last one again, where it has fewer."""
    heads, position, pages = argument(operation, 6), word(context, POSITION), word(context, PAGES)
    dim, row, window = argument(operation, 8), argument(operation, 9), argument(operation, 10)
    lowest = max(position + 1 - window, 0) if window > 0 else 0
    first = max(unit // heads * (SEGMENT_TOKENS // PAGE_TOKENS), lowest // PAGE_TOKENS)
    last = position // PAGE_TOKENS
    inside = argument(operation, 5) + element_bytes * PAGE_TOKENS * (dim + row) * (unit % heads)
    return (
        word(pages, first) + inside,
        word(pages, min(first + 1, last)) + inside,
        word(pages, min(first + 2, last)) + inside,
        word(pages, min(first + 3, last)) + inside,
    )


@device
def _moved(asked: Any, distance: Any) -> Any:
    return asked[0] + distance, asked[1] + distance, asked[2] + distance, asked[3] + distance


def _scores(element_bytes: int) -> Any:
    """A function that scores any number of rows; the first block of rows asks for what is `asked`."""
    one, two, three, four = (scores_of(rows, element_bytes) for rows in (1, 2, 3, 4))

    @inlined
    def scores(queries: Any, pitch: Any, keys: Any, dim: Any, out: Any, rows: Any, asked: Any) -> None:
        r = 0
        while r < rows:
            q, into, left = queries + r * pitch, out + ROW_BYTES * r, min(rows - r, ROWS_TOGETHER)
            if left == 4:
                four(q, pitch, keys, dim, into, asked)
            elif left == 3:
                three(q, pitch, keys, dim, into, asked)
            elif left == 2:
                two(q, pitch, keys, dim, into, asked)
            else:
                one(q, pitch, keys, dim, into, asked)
            r += left
            asked = (keys, keys, keys, keys)

    return scores


def _values(element_bytes: int) -> Any:
    """A function that adds the weighted values of 32 dimensions of a tile to any number of rows."""
    one, two, three, four = (values_of(rows, element_bytes) for rows in (1, 2, 3, 4))

    @inlined
    def values(
        weights: Any, states: Any, tile: Any, width: Any, low: Any, high: Any, sums: Any, pitch: Any, rows: Any,
        asked: Any,
    ) -> None:  # fmt: skip
        r = 0
        while r < rows:
            w, s, out = weights + ROW_BYTES * r, states + ROW_BYTES * r, sums + pitch * r
            left = min(rows - r, ROWS_TOGETHER)
            if left == 4:
                four(w, s, tile, width, low, high, out, pitch, asked)
            elif left == 3:
                three(w, s, tile, width, low, high, out, pitch, asked)
            elif left == 2:
                two(w, s, tile, width, low, high, out, pitch, asked)
            else:
                one(w, s, tile, width, low, high, out, pitch, asked)
            r += left
            asked = (tile, tile, tile, tile)

    return values


def _attention(element_bytes: int, name: str) -> Any:
    score_rows, add_values = _scores(element_bytes), _values(element_bytes)

    @inlined
    def tile(
        operation: Any, keys: Any, coming: Any, first_key: Any, position: Any, rows: Any, queries: Any,
        part: Any,
    ) -> None:  # fmt: skip
        """One tile of 32 keys for `rows` query rows, whose positions rise by one every `group` rows.

        `part`: sums [rows][row], then states, then scores, of the segment. `coming`: the next four tiles; a
        quarter of each is asked for, of the first the last one, so that a tile is there when it is due.
        """
        group, dim = argument(operation, 7), argument(operation, 8)
        row, window = argument(operation, 9), argument(operation, 10)
        states = part + rows * 4 * row
        scores = states + rows * ROW_BYTES
        key_bytes = element_bytes * PAGE_TOKENS * dim
        quarter = element_bytes * PAGE_TOKENS // 4 * (dim + row)
        asked = (coming[0] + 3 * quarter, coming[1] + 2 * quarter, coming[2] + quarter, coming[3])
        score_rows(queries, 4 * row, keys, dim, scores, rows, asked)
        lowest, highest = rows - rows + PAGE_TOKENS, rows - rows
        for r in range(rows):
            at = position + r // group
            high = max(min(at + 1 - first_key, PAGE_TOKENS), 0)
            low = min(max(at + 1 - window - first_key, 0), PAGE_TOKENS) if window > 0 else 0
            lowest, highest = min(lowest, low), max(highest, high)
            weigh(scores + ROW_BYTES * r, states + ROW_BYTES * r, low, high)
        for i in range(0, row, 32):
            place, sums = keys + key_bytes + element_bytes * i, part + 4 * i
            later = _moved(asked, LINE // 4 * (dim + i))
            add_values(scores, states, place, element_bytes * row, lowest, highest, sums, 4 * row, rows, later)

    @inlined
    def segment(
        operation: Any, pages: Any, head: Any, number: Any, position: Any, rows: Any, queries: Any, part: Any,
        after: Any,
    ) -> None:  # fmt: skip
        """The softmax of one segment for `rows` query rows, the first of which is at `position`.

        `after`: the four tiles that come then.
        """
        group, dim = argument(operation, 7), argument(operation, 8)
        row, window = argument(operation, 9), argument(operation, 10)
        for r in range(rows):
            clear(part + rows * 4 * row + ROW_BYTES * r, part + r * 4 * row, row)
        last = position + (rows - 1) // group
        lowest = max(position + 1 - window, 0) if window > 0 else 0
        per_segment = SEGMENT_TOKENS // PAGE_TOKENS
        begin = max(number * per_segment, lowest // PAGE_TOKENS)
        end = min((number + 1) * per_segment, last // PAGE_TOKENS + 1)
        inside = argument(operation, 5) + element_bytes * PAGE_TOKENS * (dim + row) * head
        for page in range(begin, end):
            coming = (
                word(pages, page + 1) + inside if page + 1 < end else after[page + 1 - end],
                word(pages, page + 2) + inside if page + 2 < end else after[page + 2 - end],
                word(pages, page + 3) + inside if page + 3 < end else after[page + 3 - end],
                word(pages, page + 4) + inside if page + 4 < end else after[page + 4 - end],
            )
            tile(operation, word(pages, page) + inside, coming, page * PAGE_TOKENS, position, rows, queries, part)

    def attention(operation: Any, context: Any, begin: Any, end: Any, thread: Any) -> None:
        """(q, pitch, head stride, out, pitch, offset in page, kv heads, group, head_dim, V row, window, scale,
        queries per unit, workspace, its bytes per thread, partials, bytes of a partial).

        Units are (block of queries, kv head); of a single token (segment, kv head), whose softmax goes to the partials
        for `join_segments`.
        """
        heads, group, row = argument(operation, 6), argument(operation, 7), argument(operation, 9)
        work = argument(operation, 13) + thread * argument(operation, 14)
        tokens = word(context, TOKENS)
        for unit in range(begin, end):
            head, number = unit % heads, unit // heads
            first, last = (0, 1) if tokens == 1 else (number * argument(operation, 12), tokens)
            last = min(last, first + argument(operation, 12))
            rows, position = (last - first) * group, word(context, POSITION) + first
            _load_queries(operation, first, last, head, work)
            sums = work + rows * 4 * row
            states = sums + rows * 4 * row
            part = states + rows * ROW_BYTES
            begin_segment = _first_segment(position, argument(operation, 10))
            end_segment = (position + last - first - 1) // SEGMENT_TOKENS + 1
            if tokens == 1:
                part = argument(operation, 15) + unit * argument(operation, 16)
                begin_segment, end_segment = max(begin_segment, number), min(end_segment, number + 1)
            after = (work, work, work, work)
            if tokens == 1 and unit + 1 < end:
                after = _opening(operation, context, unit + 1, element_bytes)
            for r in range(rows):
                clear(states + ROW_BYTES * r, sums + 4 * row * r, row)
            for each in range(begin_segment, end_segment):
                segment(operation, word(context, PAGES), head, each, position, rows, work, part, after)
                if tokens > 1:
                    own = part + rows * 4 * row
                    for r in range(rows):
                        join(states + ROW_BYTES * r, sums + 4 * row * r, own + ROW_BYTES * r, part + 4 * row * r, row)
            if tokens > 1:
                _write(operation, first, last, head, states, sums)

    return entry(OPERATION, name=name)(attention)


@inlined
def _load_queries(operation: Any, first: Any, last: Any, head: Any, queries: Any) -> None:
    """Scaled queries of the tokens [first, last) for the group of one kv head."""
    group, dim, row, scale = argument(operation, 7), argument(operation, 8), argument(operation, 9), real(operation, 11)
    for token in range(first, last):
        for member in range(group):
            into = queries + 4 * row * ((token - first) * group + member)
            place = token * argument(operation, 1) + (head * group + member) * argument(operation, 2)
            q = argument(operation, 0) + 4 * place
            whole, scales = dim - dim % 8, splat_f32x8(scale)
            for i in range(0, 4 * whole, 32):
                store(into + i, mul(load_f32x8(q + i), scales))
            for i in range(4 * whole, 4 * dim, 4):
                store_f32(into + i, load_f32(q + i) * scale)


@inlined
def _write(operation: Any, first: Any, last: Any, head: Any, states: Any, sums: Any) -> None:
    """The results of the tokens [first, last) for the group of one kv head."""
    group, dim, row = argument(operation, 7), argument(operation, 8), argument(operation, 9)
    for token in range(first, last):
        for member in range(group):
            r = (token - first) * group + member
            out = argument(operation, 3) + 4 * (token * argument(operation, 4) + (head * group + member) * dim)
            finish(states + ROW_BYTES * r, sums + 4 * row * r, out, dim)


attention_f16 = _attention(2, "attention_f16")
attention_f32 = _attention(4, "attention_f32")


@entry(OPERATION)
def join_segments(operation: Any, context: Any, begin: Any, end: Any, thread: Any) -> None:
    """(out, kv heads, group, head_dim, V row, partials, bytes of a partial, workspace, bytes per thread, window):
    a single token's segments joined and written out; nothing for more tokens, whose blocks did it."""
    if word(context, TOKENS) > 1:
        return
    heads, group, dim, row = (
        argument(operation, 1),
        argument(operation, 2),
        argument(operation, 3),
        argument(operation, 4),
    )
    sums = argument(operation, 7) + thread * argument(operation, 8)
    state = sums + 4 * row
    position = word(context, POSITION)
    first, segments = _first_segment(position, argument(operation, 9)), position // SEGMENT_TOKENS + 1
    for head in range(heads):
        for member in range(group):
            clear(state, sums, row)
            for number in range(first, segments):
                part = argument(operation, 5) + (number * heads + head) * argument(operation, 6)
                join(state, sums, part + 4 * row * group + ROW_BYTES * member, part + 4 * row * member, row)
            finish(state, sums, argument(operation, 0) + 4 * (head * group + member) * dim, dim)
