"""One pass over a vocabulary: exact sums of weights, and what lies between two logits, gathered as members.

What a pass writes is dense and in the order of places, and nothing in it depends on a guess of the processor's: it
notes the wanted lanes of a block, then packs them. The memory that is written may be the one that is read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from prism_core.kernels.dealing import (
    HITS,
    IDS,
    KEPT,
    KEPT_IDS,
    ROOM,
    TAIL,
    VALUES,
    lanes_set,
    ordered,
)
from prism_core.kernels.jit import device
from prism_core.kernels.loads import constant, i32x8
from prism_core.kernels.memory import (
    bits_f32,
    load_f32,
    load_i32,
    store_f32,
    store_i32,
    store_i64,
)
from prism_core.kernels.simd import (
    add,
    as_i32x16,
    less,
    load_f32x8,
    load_f32x16,
    load_i32x8,
    splat_f32x16,
    splat_i32x8,
    splat_i32x16,
    store,
    sub,
    sum_lanes,
    xor,
)
from prism_core.kernels.target import target
from prism_core.kernels.vectors import I8, I32, I64, Vector, call, intrinsic, pointer
from prism_core.kernels.weights import (
    BLOCK,
    LANES,
    UNIT,
    no_units,
    only,
    raw_units,
    sum_raw,
    weigh,
)
from prism_core.kernels.words import word

HALF = 8
NO_LIMIT = np.float32(-np.inf)
EVEN_THE_BEST = np.float32(np.inf)


@device
def _block(plan: Any, values: Any, begin: Any, size: Any) -> tuple[Any, Any]:
    """(the address of at most `BLOCK` values, how many): a whole multiple of sixteen, the rest of it -infinity."""
    count = min(BLOCK, size - begin)
    if count % LANES == 0:
        return values + 4 * begin, count
    whole = count - count % LANES + LANES
    for at in range(whole):
        store_f32(plan + 8 * TAIL + 4 * at, load_f32(values + 4 * (begin + at)) if at < count else NO_LIMIT)
    return plan + 8 * TAIL, whole


_ORDERS = [
    sum(lane << 8 * place for place, lane in enumerate(lane for lane in range(HALF) if bits >> lane & 1))
    for bits in range(1 << HALF)
]
"""For eight bits, the lanes that are set, in order, a byte each."""


@intrinsic
def _pack(_context: Any, a: Any, bits: Any, address: Any) -> Any:
    """Write those of eight 32-bit lanes whose bits are set, one after the other; all 32 bytes may be overwritten."""
    if not isinstance(a, Vector) or a.width != 32 or a.lanes != HALF:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector, bits, address = arguments
        if target().avx2:
            name, kind = "packing_orders", ir.ArrayType(I64, len(_ORDERS))
            table = builder.module.globals.get(name) or ir.GlobalVariable(builder.module, kind, name)
            table.initializer, table.linkage, table.global_constant = ir.Constant(kind, _ORDERS), "internal", True
            order = builder.load(builder.gep(table, [ir.Constant(I64, 0), bits], inbounds=True), typ=I64)
            lanes = builder.zext(builder.bitcast(order, ir.VectorType(I8, HALF)), ir.VectorType(I32, HALF))
            operation = "llvm.x86.avx2.permps" if a.is_float else "llvm.x86.avx2.permd"
            packed = call(builder, operation, a.llvm, [vector, lanes])
            builder.store(packed, pointer(builder, address, a.llvm), align=1)
            return context.get_dummy_value()
        for lane in range(HALF):
            value = builder.extract_element(vector, ir.Constant(I32, lane))
            builder.store(value, pointer(builder, address, a.scalar), align=1)
            bit = builder.and_(builder.lshr(bits, ir.Constant(I64, lane)), ir.Constant(I64, 1))
            address = builder.add(address, builder.shl(bit, ir.Constant(I64, 2)))
        return context.get_dummy_value()

    return types.void(a, types.int64, types.int64), generate


@intrinsic
def _set_bits(_context: Any, bits: Any) -> Any:
    """How many bits of an int64 are set."""
    return types.int64(types.int64), lambda context, builder, signature, arguments: builder.ctpop(arguments[0])


_eight = constant(i32x8, range(HALF))


@device
def _note(plan: Any, hits: Any, at: Any, bits: Any) -> Any:
    """Note which of sixteen values are wanted, without a condition, which would be guessed wrong too often."""
    store_i64(plan + 8 * (HITS + hits), at << LANES | bits)
    return hits + (bits != 0)


@device
def _gather(plan: Any, hits: Any, source: Any, begin: Any, ids: Any, values: Any, places: Any, found: Any) -> Any:
    """Write what was noted of a block, with its places, or with its ids if there are any; how many are found then."""
    for hit in range(hits):
        noted = word(plan, HITS + hit)
        for half in range(2):
            at = (noted >> LANES) + HALF * half
            bits = (noted >> HALF * half) & ((1 << HALF) - 1)
            numbers = load_i32x8(ids + 4 * (begin + at)) if ids != 0 else add(_eight(), splat_i32x8(begin + at))
            _pack(load_f32x8(source + 4 * at), bits, values + 4 * found)
            _pack(numbers, bits, places + 4 * found)
            found += _set_bits(bits)
    return found


@device
def sift(plan: Any, values: Any, size: Any, best: Any, inverse: Any, low: Any, high: Any) -> tuple[Any, Any, Any]:
    """Gather as members what is above `low` and not above `high`: (the sum of all, of those above, how many members).

    With an inverse of 0 all weigh the same, and the sum of all is left to the caller."""
    every, above, counted, found, done = no_units(), no_units(), splat_i32x16(0), np.int64(0), np.int64(0)
    overs = plan + 8 * ROOM + 4 * BLOCK
    room, highs, lows = plan + 8 * ROOM, splat_f32x16(high), splat_f32x16(low)
    for begin in range(0, size, BLOCK):
        source, count = _block(plan, values, begin, size)
        if inverse > 0:
            weigh(source, count, best, inverse, room)
            for at in range(size - begin, count):
                store_f32(room + 4 * at, np.float32(0.0))
            done += count
        hits = np.int64(0)
        for at in range(0, count, LANES):
            vector = load_f32x16(source + 4 * at)
            over = less(highs, vector)
            store(overs + 4 * at, over)
            counted = sub(counted, over)
            hits = _note(plan, hits, at, lanes_set(xor(over, less(lows, vector))))
        if inverse > 0:
            if high == EVEN_THE_BEST:
                for at in range(0, 4 * count, 4 * LANES):
                    every = add(every, raw_units(load_f32x16(room + at)))
            else:
                for at in range(0, 4 * count, 4 * LANES):
                    weights = raw_units(load_f32x16(room + at))
                    every = add(every, weights)
                    above = add(above, only(weights, as_i32x16(load_f32x16(overs + at))))
        found = _gather(plan, hits, source, begin, np.int64(0), word(plan, VALUES), word(plan, IDS), found)
    number = sum_lanes(counted)
    return sum_raw(every, done), sum_raw(above, number) if inverse > 0 else number * UNIT, found


@device
def adopt(plan: Any, ids: Any, count: Any) -> None:
    """Keep all members; `ids` are those of where they were gathered, or 0 for the places."""
    members, places, kept, kept_ids = word(plan, VALUES), word(plan, IDS), word(plan, KEPT), word(plan, KEPT_IDS)
    for at in range(count):
        place = load_i32(places + 4 * at)
        store_f32(kept + 4 * at, load_f32(members + 4 * at))
        store_i32(kept_ids + 4 * at, load_i32(ids + 4 * place) if ids != 0 else place)
        store_i32(places + 4 * at, at)


@device
def _float(order: Any) -> Any:
    return bits_f32(order if order >= 0 else 0x80000000 - order)


@device
def lowest_within(best: Any, floor: Any) -> Any:
    """The lowest logit whose difference from the best, in float32, is at least `floor`."""
    within, below = ordered(best), ordered(NO_LIMIT)
    while within - below > 1:
        middle = (within + below) >> 1
        if np.float64(_float(middle) - best) >= floor:
            within = middle
        else:
            below = middle
    return _float(within)


@device
def keep(plan: Any, values: Any, ids: Any, size: Any, limit: Any, last: Any) -> Any:
    """Keep what is above `limit`, or equal and at place `last` or before: how many. `ids` may be 0, for the places."""
    found, before = np.int64(0), _float(ordered(limit) - 1)
    for begin in range(0, size, BLOCK):
        source, count = _block(plan, values, begin, size)
        beyond, hits = splat_f32x16(before if begin + count - 1 <= last else limit), np.int64(0)
        for at in range(0, count, LANES):
            hits = _note(plan, hits, at, lanes_set(less(beyond, load_f32x16(source + 4 * at))))
        if begin <= last < begin + count - 1:
            hits = np.int64(0)
            for at in range(0, count, LANES):
                bits = 0
                for lane in range(LANES):
                    value = load_f32(source + 4 * (at + lane))
                    bits |= (value > limit or (value == limit and begin + at + lane <= last)) << lane
                hits = _note(plan, hits, at, bits)
        found = _gather(plan, hits, source, begin, ids, word(plan, KEPT), word(plan, KEPT_IDS), found)
    return found
