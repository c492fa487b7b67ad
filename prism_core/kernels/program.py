"""The interpreter of a decoder step: one call without the GIL runs a range of phases for all tokens of the call.

A phase is a chain (its operations share their units: token by token) or a split (the units of its operations are
numbered one after another). Threads take chunks of a phase's units by ticket; a phase is over when all its units are
done, so a thread that the system has put aside delays the others only while it holds a chunk.

Invariant: what an operation computes depends on the units, never on who does them or in which chunks.

Tickets and completion counts carry the number of the run they belong to, and every change is a compare-and-exchange
or is made by a holder of a chunk. So nobody has to wait for helpers to leave a run: a late one sees a foreign number
and goes back to waiting, and what it may have read in between is of no consequence.
"""

from __future__ import annotations

from typing import Any

from prism_core.kernels.jit import device, kernel
from prism_core.kernels.memory import (
    acquire_i64,
    add_release_i64,
    atomic_add_i64,
    atomic_load_i64,
    atomic_store_i64,
    call_entry,
    compare_exchange_i64,
    futex_wait,
    futex_wake,
    release_i64,
    spin_hint,
    store_i64,
    yield_thread,
)
from prism_core.kernels.words import (
    ENTRY,
    FIRST_OPERATION,
    GRAIN,
    IS_SPLIT,
    OPERATION_COUNT,
    OPERATION_WORDS,
    PHASE_WORDS,
    SPAN,
    TOKENS,
    UNITS,
    monotonic_ns,
    word,
)

CONTROL_WORDS = 48
RUN, SLEEPERS, LIMIT = 0, 8, 16
"""Words that threads share while running, each on a cache line of its own. An even RUN is running, an odd one idle."""
STOP, PHASES, OPERATIONS, CONTEXT, SYNC, THREADS, FIRST, PROFILE = range(24, 32)
"""Set by the owner before RUN: tables, number of threads, first phase; PROFILE: address of ns per phase, or 0."""
SYNC_WORDS = 8
TICKET, OPEN, TOTAL, CHUNK, STEP = range(5)
"""Per phase, on one cache line: units not yet taken, units not yet done, all units, units of the smallest chunk, and
the power of two that chunks are multiples of, but for the last. The first two carry the run in their high half."""

CHUNKS_PER_THREAD = 8
SPINS, IDLE_SPINS, IDLE_YIELDS = 1000, 256, 400
"""Looks before the first yield (some 20 us); looks and yields of an idle helper before it sleeps (some 500 us)."""
NAP_US = 200_000
"""Longest sleep of an idle helper between looks, in case a wake-up is ever lost."""
_RUN_BITS, _COUNT_MASK, _RUN_MASK = 32, 0xFFFFFFFF, 0x7FFFFFFF


@device
def _units(operation: Any, context: Any) -> Any:
    span = word(operation, SPAN)
    blocks = word(context, -span) if span < 0 else (word(context, TOKENS) + span - 1) // span
    return word(operation, UNITS) * blocks


@device
def _phase_units(phase: Any, operations: Any, context: Any) -> Any:
    """How many units the whole phase has."""
    if word(phase, IS_SPLIT) == 0:
        return _units(operations + 8 * OPERATION_WORDS * word(phase, FIRST_OPERATION), context)
    total = 0
    for index in range(word(phase, OPERATION_COUNT)):
        total += _units(operations + 8 * OPERATION_WORDS * (word(phase, FIRST_OPERATION) + index), context)
    return total


@device
def _do(phase: Any, operations: Any, context: Any, begin: Any, end: Any, thread: Any) -> None:
    """The units [begin, end) of a phase."""
    split = word(phase, IS_SPLIT) != 0
    before = 0
    for index in range(word(phase, OPERATION_COUNT)):
        operation = operations + 8 * OPERATION_WORDS * (word(phase, FIRST_OPERATION) + index)
        first, last = begin, end
        if split:
            own = _units(operation, context)
            first, last = max(begin - before, 0), min(end - before, own)
            before += own
        if first < last:
            call_entry(word(operation, ENTRY), (operation, context, first, last, thread))


@device
def _wait(looks: Any) -> None:
    if looks < SPINS:
        spin_hint()
    else:
        yield_thread()


@device
def _share(control: Any, number: Any, run: Any, thread: Any) -> Any:
    """Work on a phase until it is complete; False where the run is over."""
    ticket = word(control, SYNC) + 8 * SYNC_WORDS * number
    while True:
        now = acquire_i64(ticket)
        if now >> _RUN_BITS != run:
            return False
        left = now & _COUNT_MASK
        if left == 0:
            break
        # Large chunks first: fewer quarrels over the line, and what is left at the end is small enough to share.
        count = max(2 * left // (3 * word(control, THREADS)), word(ticket, CHUNK))
        count = min(count & -word(ticket, STEP), left)
        if compare_exchange_i64(ticket, now, now - count) == now:
            # With a chunk in hand nobody else can move on: now everything that is read belongs to this run.
            begin = word(ticket, TOTAL) - left
            phase = word(control, PHASES) + 8 * PHASE_WORDS * number
            _do(phase, word(control, OPERATIONS), word(control, CONTEXT), begin, begin + count, thread)
            add_release_i64(ticket + 8 * OPEN, -count)
    looks = 0
    while True:
        now = acquire_i64(ticket + 8 * OPEN)
        if now >> _RUN_BITS != run:
            return False
        if now & _COUNT_MASK == 0:
            return True
        _wait(looks)
        looks += 1


@device
def _publish(control: Any, number: Any, run: Any) -> None:
    """Let helpers into a phase: fresh counters, then the limit."""
    phase = word(control, PHASES) + 8 * PHASE_WORDS * number
    units = _phase_units(phase, word(control, OPERATIONS), word(control, CONTEXT))
    ticket = word(control, SYNC) + 8 * SYNC_WORDS * number
    store_i64(ticket + 8 * TOTAL, units)
    step = word(phase, GRAIN) if word(word(control, CONTEXT), TOKENS) > 1 else 1
    store_i64(ticket + 8 * STEP, step)
    store_i64(ticket + 8 * CHUNK, max(units // (CHUNKS_PER_THREAD * word(control, THREADS)), step))
    release_i64(ticket + 8 * OPEN, (run << _RUN_BITS) | units)
    release_i64(ticket, (run << _RUN_BITS) | units)
    release_i64(control + 8 * LIMIT, number + 1)


@device
def _alone(control: Any, first: Any, last: Any, deadline: Any) -> Any:
    operations, context, profile = word(control, OPERATIONS), word(control, CONTEXT), word(control, PROFILE)
    number = first
    while number < last:
        begun = monotonic_ns() if profile != 0 else 0
        phase = word(control, PHASES) + 8 * PHASE_WORDS * number
        _do(phase, operations, context, 0, _phase_units(phase, operations, context), 0)
        if profile != 0:
            store_i64(profile + 8 * number, word(profile, number) + monotonic_ns() - begun)
        number += 1
        if deadline != 0 and monotonic_ns() >= deadline:
            break
    return number


@kernel("int64(int64, int64, int64, int64)")
def run_phases(control: Any, first: Any, last: Any, budget_ns: Any) -> Any:
    """Run phases [first, last) with the helpers of `control`; give the number of the first phase not run.

    A budget above 0 stops the run after the first phase that ends beyond it.
    """
    deadline = monotonic_ns() + budget_ns if budget_ns > 0 else 0
    if word(control, THREADS) == 1:
        return _alone(control, first, last, deadline)
    profile = word(control, PROFILE)
    store_i64(control + 8 * FIRST, first)
    release_i64(control + 8 * LIMIT, first)
    run = (word(control, RUN) + 1) & _RUN_MASK
    if deadline == 0:
        for number in range(first, last):
            _publish(control, number, run)
    atomic_store_i64(control + 8 * RUN, run)
    if atomic_load_i64(control + 8 * SLEEPERS) > 0:
        futex_wake(control + 8 * RUN, 1 << 30)
    number = first
    while number < last:
        begun = monotonic_ns() if profile != 0 else 0
        if deadline != 0:
            _publish(control, number, run)
        _share(control, number, run, 0)
        if profile != 0:
            store_i64(profile + 8 * number, word(profile, number) + monotonic_ns() - begun)
        number += 1
        if deadline != 0 and monotonic_ns() >= deadline:
            break
    atomic_store_i64(control + 8 * RUN, run + 1)
    return number


@device
def _follow(control: Any, run: Any, thread: Any) -> None:
    """Help with a run from its first phase on, until it is over."""
    number = word(control, FIRST)
    looks = 0
    while acquire_i64(control + 8 * RUN) == run:
        if number < acquire_i64(control + 8 * LIMIT):
            if not _share(control, number, run, thread):
                return
            number += 1
            looks = 0
        else:
            _wait(looks)
            looks += 1


@kernel("void(int64, int64)")
def help_out(control: Any, thread: Any) -> None:
    """The life of a helper: follow each run, sleep in between, return when the owner sets STOP."""
    looks = 0
    while word(control, STOP) == 0:
        run = acquire_i64(control + 8 * RUN)
        if run & 1 == 0:
            _follow(control, run, thread)
            looks = 0
        elif looks < IDLE_SPINS:
            spin_hint()
        elif looks < IDLE_SPINS + IDLE_YIELDS:
            yield_thread()
        else:
            atomic_add_i64(control + 8 * SLEEPERS, 1)
            futex_wait(control + 8 * RUN, run, NAP_US)
            atomic_add_i64(control + 8 * SLEEPERS, -1)
        looks += 1


@kernel("void(int64)")
def wake_helpers(control: Any) -> None:
    """Have every helper look at the control words now."""
    futex_wake(control + 8 * RUN, 1 << 30)
