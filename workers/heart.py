"""Beats: renews the worker's lease beside the loop, and only while the loop makes progress.

Invariant: a lease that is being renewed belongs to a loop whose last check is less than `STALE_S` old, so a loop that
hangs loses its lease, and its turn goes elsewhere. A broker that is away costs nothing: the lease lapses and is renewed
when the broker is back, unless somebody reaped the worker meanwhile; then `lost` is set and the worker must exit.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping

from broker.errors import BrokerUnavailable, NotFound, NotMember
from broker.store import WorkerStore
from workers.cancellation import Progress

log = logging.getLogger(__name__)

STALE_S = 2.0
TICK_S = 0.1


class Heart:
    """The beat thread. `boot` is the broker's boot id at join: another one means that the broker lost its data."""

    def __init__(
        self,
        store: WorkerStore,
        progress: Progress,
        boot: str,
        *,
        stats: Callable[[], Mapping[str, int | float | str]] = dict,
        beside: Callable[[], None] = lambda: None,
        beside_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stats` are shown by `prism top`; `beside` is called every `beside_s`, for RQ's own heartbeat."""
        self._store, self._progress, self._boot = store, progress, boot
        self._stats, self._beside, self._beside_s, self._clock = stats, beside, beside_s, clock
        self._interval_s = store.config.beat_ms / 1000
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._beat_at = clock()
        self._beside_at = clock()
        self._wants_drain = False
        self._drained = False
        self.lost = False
        self.draining = False
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(1.0)

    def drain(self) -> None:
        """Asks the pool, from this thread's next tick on, for no new turns. Safe in a signal handler."""
        self._wants_drain = True

    def beat(self) -> None:
        """One beat now, from any thread. `BrokerUnavailable` passes; a refusal sets `lost`."""
        with self._lock:
            try:
                beat = self._store.beat(self._stats())
            except NotMember:
                self.lost = True
                return
            self._beat_at = self._clock()
            self.draining = self.draining or beat.draining
            self.lost = self.lost or beat.boot != self._boot

    def beat_if_due(self) -> None:
        """A beat from the loop, unless one was sent within the last interval."""
        if self._clock() - self._beat_at >= self._interval_s:
            self.beat()

    def _run(self) -> None:
        while not self._stop.wait(TICK_S) and not self.lost:
            try:
                self._tick()
            except BrokerUnavailable:
                self._stop.wait(self._interval_s / 4)
            except Exception as error:
                log.error("beat failed", extra={"error": type(error).__name__})
                self._stop.wait(self._interval_s)

    def _tick(self) -> None:
        if self._wants_drain and not self._drained:
            with contextlib.suppress(NotFound):  # reaped: the next beat says so
                self._store.drain()
            self._drained = self.draining = True
        if self._progress.age_s() >= STALE_S:
            return
        self.beat_if_due()
        if self._clock() - self._beside_at >= self._beside_s:
            self._beside_at = self._clock()
            self._beside()
