"""The memory of one sequence: reference-counted pages of keys and values, and the recurrent state of hybrids.

A page holds 32 positions of all layers. A checkpoint is a list of pages and a length; it copies nothing. Pages are
shared by counting, and a shared page is written to only where no checkpoint can see it: in slots that come after all
that anybody has stored there. A sequence that went back and now writes into a page's middle gets a copy first.

Recurrent state is shared the same way: a state that a checkpoint holds is never written; the next step reads it and
leaves its result in other memory.

Memory grows by some pages at a time, and pages that nobody refers to are used again: an arena never holds more than the
pages of the live sequence and of the checkpoints that were alive at one time, and a slab. An interrupt between any two
steps leaves counts that are right or too high, never too low; before memory grows they are counted anew. Not safe for
use by two threads at once, except that checkpoints may die in any thread.
"""

from __future__ import annotations

import itertools
import mmap
import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism_core.errors import DecoderError

PAGE_TOKENS = 32
ALIGNMENT = 64
HUGE = 2 << 20
SLAB_BYTES = 4 << 20
PAGES_PER_SLAB = 64
"""Pages get their memory in runs of about this size, of this many pages at most."""
_IDLE_STATES = 2

Bytes = NDArray[np.uint8]


def aligned(count: int) -> Bytes:
    """`count` bytes that start on a cache line, uninitialised."""
    return _from(np.empty(count + ALIGNMENT, dtype=np.uint8), count, ALIGNMENT)


def large(count: int) -> Bytes:
    """`count` bytes for which the system is asked to use huge pages; memory is taken as it is first touched."""
    try:
        memory = mmap.mmap(-1, count + HUGE)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"the system refuses {count:,} bytes of memory") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return _from(np.frombuffer(memory, dtype=np.uint8), count, HUGE)


def _from(raw: Bytes, count: int, alignment: int) -> Bytes:
    start = -raw.ctypes.data % alignment
    return raw[start : start + count]


class PageArena:
    """Pages of `page_bytes` each, by number, for one sequence."""

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self._pages: list[Bytes] = []
        self._addresses: list[int] = []
        self._references: list[int] = []
        self._filled: list[int] = []
        self._free: list[int] = []
        self._held: dict[weakref.ref[Checkpoint], tuple[int, ...]] = {}
        self._dropped: deque[weakref.ref[Checkpoint]] = deque()

    @property
    def pages(self) -> int:
        """Pages that have memory, in use or not."""
        return len(self._references)

    @property
    def pages_in_use(self) -> int:
        """Pages that somebody refers to."""
        self._collect()
        return self.pages - len(self._free)

    def take(self, live: Iterable[int]) -> int:
        """A page of unknown content with one reference. `live`: the sequence's pages."""
        self._collect()
        if not self._free:
            self._count_anew(live)
        if not self._free:
            self._grow()
        page = self._free.pop()
        self._references[page] = 1
        self._filled[page] = 0
        return page

    def _count_anew(self, live: Iterable[int]) -> None:
        """References from those who refer; pages that an interrupt lost are free again."""
        references = [0] * self.pages
        for page in itertools.chain(live, *self._held.values()):
            references[page] += 1
        self._references[:] = references
        self._free += [page for page, count in enumerate(references) if not count]

    def _grow(self) -> None:
        count = min(max(SLAB_BYTES // max(self.page_bytes, 1), 1), PAGES_PER_SLAB)
        slab = large(count * self.page_bytes)
        memory = [slab[number * self.page_bytes :][: self.page_bytes] for number in range(count)]
        addresses = [int(page.ctypes.data) if self.page_bytes else 0 for page in memory]
        # The references, lengthened last, say how many there are: what an interrupted growth left is written over.
        first = len(self._references)
        self._pages[first:] = memory
        self._addresses[first:] = addresses
        self._filled[first:] = [0] * count
        self._references += [0] * count
        self._free += range(first + count - 1, first - 1, -1)

    def copy(self, page: int, filled: int, live: Iterable[int]) -> int:
        """A page of one reference whose first `filled` slots are those of `page`."""
        twin = self.take(live)
        self._pages[twin][:] = self._pages[page]
        self._filled[twin] = filled
        return twin

    def share(self, pages: Iterable[int]) -> None:
        """One more reference to each page."""
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One reference less to each page; at none the page is free."""
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def hold(self, saved: Checkpoint) -> None:
        """One more reference to each page of a checkpoint, until the first `take` after its death.

        It may die in any thread, or in the middle of another operation. What notes that is no Python code, which an
        interrupt could break off.
        """
        self.share(saved.pages)  # first, so that only a reference that was counted is ever given up
        self._held[weakref.ref(saved, self._dropped.append)] = saved.pages

    def address(self, page: int) -> int:
        """Where the page's bytes begin."""
        return self._addresses[page]

    def writable(self, page: int, slot: int) -> bool:
        """Whether slots from `slot` on may be written without anybody else seeing it."""
        return self._references[page] == 1 or self._filled[page] <= slot

    def fill(self, page: int, slots: int) -> None:
        """Say that slots below `slots` hold something that a later checkpoint may rely on."""
        self._filled[page] = max(self._filled[page], slots) if self._references[page] > 1 else slots

    def _collect(self) -> None:
        while self._dropped:
            self.release(self._held.pop(self._dropped[0], ()))
            self._dropped.popleft()


class StatePool:
    """Recurrent states of `words` float32; a few that died are kept for the next one."""

    def __init__(self, words: int) -> None:
        self.words = words
        self._idle: deque[NDArray[np.float32]] = deque(maxlen=_IDLE_STATES)

    @property
    def nbytes(self) -> int:
        """Bytes of one state."""
        return 4 * self.words

    def take(self) -> State:
        """A state of unknown content."""
        try:
            memory = self._idle.pop()
        except IndexError:
            memory = aligned(self.nbytes).view(np.float32)
        return State(memory, self)

    def give_back(self, memory: NDArray[np.float32]) -> None:
        """Keep the memory of a dead state."""
        self._idle.append(memory)


class State:
    """One recurrent state. `frozen`: a checkpoint holds it, so it must not be written any more."""

    def __init__(self, memory: NDArray[np.float32], pool: StatePool) -> None:
        self.memory = memory
        self.frozen = False
        weakref.finalize(self, pool.give_back, memory).atexit = False

    @property
    def address(self) -> int:
        """Where the float32 words begin."""
        return int(self.memory.ctypes.data)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A state of one sequence, independently owned. Its pages are released when it dies."""

    arena: PageArena
    pages: tuple[int, ...]
    length: int
    state: State | None


class Sequence:
    """The live state: pages of the first `length` positions, and the recurrent state after them."""

    def __init__(self, page_bytes: int, state_words: int, context_tokens: int) -> None:
        self.arena = PageArena(page_bytes)
        self.states = StatePool(state_words)
        self.length = 0
        self.context_tokens = context_tokens
        self._pages: list[int] = []
        self._state: State | None = None
        self._next: State | None = None
        self._torn = False
        self.page_table = np.zeros(-(-context_tokens // PAGE_TOKENS), dtype=np.int64)
        """Addresses of the pages, for kernels."""

    # -- one step -----------------------------------------------------------------------------------------------

    def begin(self, tokens: int) -> tuple[int, int]:
        """Make room for `tokens` more positions; addresses of the recurrent state (before, after), 0 without one.

        Raises:
            DecoderError: the context is full, or an earlier step left the recurrent state half-way.
        """
        if self._torn:
            raise DecoderError("a step was broken off half-way: restore a checkpoint or reset before going on")
        end = self.length + tokens
        if end > self.context_tokens:
            raise DecoderError(
                f"{tokens} more tokens after {self.length} do not fit the context of {self.context_tokens}"
            )
        first = self.length // PAGE_TOKENS
        for number in range(first, -(-end // PAGE_TOKENS)):
            slot = self.length - first * PAGE_TOKENS if number == first else 0
            if number == len(self._pages):
                self._put(number, self.arena.take(self._pages))
            elif not self.arena.writable(self._pages[number], slot):
                page = self._pages[number]
                self._put(number, self.arena.copy(page, slot, self._pages))
                self.arena.release((page,))
            self.arena.fill(self._pages[number], min(end - number * PAGE_TOKENS, PAGE_TOKENS))
        return self._begin_state()

    def _put(self, number: int, page: int) -> None:
        if number == len(self._pages):
            self._pages.append(page)
        else:
            self._pages[number] = page
        self.page_table[number] = self.arena.address(page)

    def _begin_state(self) -> tuple[int, int]:
        if not self.states.words:
            return 0, 0
        before = self._state
        if before is None:
            before = self.states.take()
            before.memory[:] = 0.0
        after = self.states.take() if before.frozen else before
        self._state, self._next = before, after
        self._torn = after is before
        return before.address, after.address

    def end(self, tokens: int) -> None:
        """The step is complete: the positions count, and so does the new recurrent state."""
        self.length += tokens
        if self.states.words:
            self._state = self._next
            self._torn = False

    # -- going back ---------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """The empty sequence."""
        old, self._pages = self._pages, []
        self.length = 0
        self.arena.release(old)
        self._state = None
        self._torn = False

    def checkpoint_bytes(self, tokens: int | None = None) -> int:
        """Bytes that a checkpoint at `tokens` (default: now) refers to, shared pages included."""
        length = self.length if tokens is None else tokens
        return -(-length // PAGE_TOKENS) * self.arena.page_bytes + (self.states.nbytes if length else 0)

    def checkpoint(self) -> Checkpoint:
        """The present state; some microseconds per thousand tokens, whatever the model."""
        if self._torn:
            raise DecoderError("a step was broken off half-way: there is no state to save")
        pages = tuple(self._pages[: -(-self.length // PAGE_TOKENS)])
        state = self._state if self.length else None
        if state is not None:
            state.frozen = True
        saved = Checkpoint(self.arena, pages, self.length, state)
        self.arena.hold(saved)
        return saved

    def restore(self, saved: Any) -> None:
        """Go to `saved`, which stays as it is."""
        if not isinstance(saved, Checkpoint) or saved.arena is not self.arena:
            raise DecoderError("this checkpoint was made by another decoder")
        # In this order an interrupt between any two steps can lose pages, but never give one to two owners.
        self.arena.share(saved.pages)
        old, self._pages = self._pages, list(saved.pages)
        self.arena.release(old)
        self.page_table[: len(saved.pages)] = [self.arena.address(page) for page in saved.pages]
        self.length = saved.length
        self._state = saved.state
        self._torn = False
