"""The threads of one decoder: helpers that follow the runs of `program.run_phases`.

Helpers are Python threads that live inside one kernel without the GIL and sleep between runs. They hold nothing but
the control words, so a decoder that is dropped takes its crew with it: `close` (called by a finalizer, and at exit)
stops and joins them. A crew belongs to the process that made it: a forked child must make its own.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism_core.errors import DecoderError
from prism_core.kernels import program
from prism_core.kernels.words import CONTEXT_WORDS, PHASE_WORDS

JOIN_S = 5.0
MAX_THREADS = 256

Words = NDArray[np.int64]


def _line_aligned(words: int) -> Words:
    raw = np.zeros(words + 8, dtype=np.int64)
    start = (-raw.ctypes.data % 64) // 8
    return raw[start : start + words]


class Crew:
    """`threads` - 1 helpers for the phases of one table. `context` is the words that each run reads."""

    def __init__(self, phases: Words, operations: Words, threads: int) -> None:
        count = len(phases) // PHASE_WORDS
        self.threads = threads
        self.context = _line_aligned(CONTEXT_WORDS)
        self._tables = (phases, operations)
        self._sync = _line_aligned(count * program.SYNC_WORDS)
        self._control = _line_aligned(program.CONTROL_WORDS)
        self._address = int(self._control.ctypes.data)
        self._profile: Words | None = None
        self._process = os.getpid()
        control = self._control
        control[program.RUN] = 1
        control[program.PHASES] = phases.ctypes.data
        control[program.OPERATIONS] = operations.ctypes.data
        control[program.CONTEXT] = self.context.ctypes.data
        control[program.SYNC] = self._sync.ctypes.data
        control[program.THREADS] = threads
        program.run_phases.warm()
        helpers = _start(control, threads - 1, (phases, operations, self._sync, self.context))
        self._finalizer = weakref.finalize(self, _stop, control, helpers)

    def run(self, first: int, last: int, budget_ns: int = 0) -> int:
        """Run phases [first, last), or fewer where a budget is given; the number of the first phase not run.

        Raises:
            DecoderError: this is a forked child of the process that made the crew.
        """
        if self._process != os.getpid():
            raise DecoderError("a decoder cannot be used in a forked child: open the model there")
        return int(program.run_phases(self._address, first, last, budget_ns))

    def profile(self) -> Words:
        """From now on, nanoseconds spent in each phase are added up in the array returned."""
        if self._profile is None:
            self._profile = np.zeros(len(self._tables[0]) // PHASE_WORDS, dtype=np.int64)
            self._control[program.PROFILE] = self._profile.ctypes.data
        return self._profile

    def close(self) -> None:
        """Stop the helpers. Nothing may run any more."""
        self._finalizer()


def _start(control: Words, count: int, keep: Any) -> list[threading.Thread]:
    """Helper threads; they keep alive whatever they may look at."""
    if count > 0:
        program.help_out.warm()
        program.wake_helpers.warm()

    def live(number: int, _alive: Any = (control, keep)) -> None:
        program.help_out(int(control.ctypes.data), number)

    helpers = [
        threading.Thread(target=live, args=(number + 1,), name=f"prism-helper-{number + 1}", daemon=True)
        for number in range(count)
    ]
    for helper in helpers:
        helper.start()
    return helpers


def _stop(control: Words, helpers: list[threading.Thread]) -> None:
    if not helpers:
        return
    control[program.STOP] = 1
    program.wake_helpers(int(control.ctypes.data))
    for helper in helpers:
        if helper is not threading.current_thread():
            helper.join(JOIN_S)
