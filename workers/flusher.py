"""Carries one turn's events to the broker beside the decoder: step k's append travels while step k+1's kernel runs.

Invariant: events get their numbers once, in order, without holes, and are kept until the turn ends, so an append whose
reply was lost, or that the broker lost, is sent again with the same number and bytes. One append is in flight; the next
carries everything that came meanwhile, tokens merged into one delta. Whatever the broker answers (cancelled, yield,
fenced) reaches the turn's cancellation object before the next decoder step; after a silence of `poll_s` it is asked.
The decoder's thread never waits for the flusher's: it takes no lock in Python (a thread that the system sets aside
while it holds one would hold up the decoder too), and while tokens keep coming it does not even wake it: on a busy
machine the woken thread takes the waker's core. The flusher looks by itself every `TICK_S`, most likely while a kernel
runs that does not hold the interpreter. A decoder that is faster has its tokens sent two or more at a time, and is then
looked after every `LONG_TICK_S`. Only a flusher that has dozed off, after `DOZE_TICKS` in vain, is woken by a token.
Not promised: that an emitted token is stored when `token` returns; `flush` waits for that.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from broker.answers import Claim, Flags
from broker.errors import BrokerUnavailable
from broker.store import WorkerStore
from prism_core.errors import Cancelled
from workers.cancellation import Halt, TurnCancellation
from workers.ledger import Ledger, Token

POLL_S = 0.05
TICK_S = 0.007  # less than a reader can see; a cancellation does not wait for it, it comes by `look`
LONG_TICKS = 3
LONG_TICK_S = LONG_TICKS * TICK_S  # where a step is shorter than a tick: a third of the appends, and still 45 a second
DOZE_TICKS = 4
SLICE_S = 0.1
FIRST_RETRY_S = 0.02
LAST_RETRY_S = 1.0
CLOSE_S = 2.0


@dataclass(frozen=True)
class _Mark:
    """Passed once everything queued before it is stored."""

    passed: threading.Event


@dataclass(frozen=True)
class _Heal:
    """The broker's log ends here, short of what it acknowledged."""

    stored_ev: int


class _Look:
    """Ask the broker for its flags at once."""


class Flusher:
    """The event log of one turn, written by a thread of its own. Make, use and close it on the loop's thread."""

    def __init__(
        self,
        store: WorkerStore,
        claim: Claim,
        cancellation: TurnCancellation,
        *,
        buffer_events: int = 4096,
        buffer_s: float = 30.0,
        poll_s: float = POLL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._claim, self._cancellation = store, claim, cancellation
        self._buffer_events, self._buffer_s, self._poll_s = buffer_events, buffer_s, poll_s
        self._clock = clock
        self._inbox: deque[_Item] = deque()  # filled by any thread, emptied by the flusher's
        self._kicks: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._tick_s = TICK_S
        self._idle_ticks = DOZE_TICKS
        self._dozing = False  # nothing but a kick, or the time of the next poll, ends the flusher's wait
        self._pending: deque[bytes | Token | _Mark] = deque()  # taken from the inbox, not yet numbered
        self._ledger = Ledger(claim.ev, claim.n)
        self._put_count = 0  # counted by the loop's thread only
        self._done_count = 0  # counted by the flusher's thread only
        self._mark: _Mark | None = None
        self._heal: int | None = None
        self._look_now = False
        self._close = threading.Event()
        self._stored = threading.Event()  # something was stored since the last look
        self._dead = False  # fenced, gone or refused: nothing is written any more
        self._away_since: float | None = None
        self._heard = clock()
        self.appends = 0
        self.append_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"flush-{claim.request}", daemon=True)
        self._thread.start()

    # --- the loop's side -----------------------------------------------------------------------------------------

    def event(self, payload: bytes) -> None:
        """Queues a ready event, such as `start`, and sends it now."""
        self._put_count += 1
        self._inbox.append(payload)
        self._kicks.put(None)

    def token(self, token: int, text: str, logprob: Any = None) -> None:
        """Queues one emitted token and the text that it released."""
        self._put_count += 1
        self._inbox.append((token, text, logprob))
        if self._dozing:
            self._kicks.put(None)

    def tail(self, text: str) -> None:
        """Queues text that was held back, after the last token."""
        if text:
            self._put_count += 1
            self._inbox.append((None, text, None))

    def wait_for_room(self, check: Callable[[], None]) -> None:
        """Returns once there is room for another event; `check` is called each 100 ms meanwhile and may raise."""
        # Asked for each token, in a cold cache: the usual case is told without another call.
        if self._away_since is None and self._put_count - self._done_count < self._buffer_events:
            return
        while not self._has_room():
            if self._cancellation.is_cancelled:
                raise Cancelled("the turn was stopped while it waited for the broker")
            check()
            self._stored.clear()
            if not self._has_room():
                self._stored.wait(SLICE_S)

    def flush(self, slice_s: float = SLICE_S) -> bool:
        """Waits for at most `slice_s`; True once everything queued is stored, or nothing can be stored any more."""
        if self._dead:
            return True
        if self._mark is None:
            self._mark = _Mark(threading.Event())
            self._ask(self._mark)
        if self._mark.passed.wait(slice_s):
            self._mark = None
            return True
        return self._dead

    def resend(self, stored_ev: int) -> None:
        """The broker's log ends at `stored_ev`, short of what it acknowledged: send the rest again."""
        self._ask(_Heal(stored_ev))

    def look(self) -> None:
        """Asks the broker for its flags at once rather than after a silence; from any thread."""
        self._ask(_Look())

    def close(self) -> None:
        """Ends the thread; what is not stored by now is dropped. Waits for a call in flight if the broker is there."""
        self._close.set()
        self._ask(_Look())
        self._thread.join(SLICE_S if self._away_since is not None else CLOSE_S)

    @property
    def ev(self) -> int:
        """Number of the last event made from what was queued; final once `flush` returned True."""
        return self._ledger.ev

    @property
    def n(self) -> int:
        """Tokens up to event `ev`."""
        return self._ledger.n

    @property
    def is_dead(self) -> bool:
        """True once the broker said that this turn is not ours any more."""
        return self._dead

    def _ask(self, item: _Item) -> None:
        self._inbox.append(item)
        self._kicks.put(None)

    def _has_room(self) -> bool:
        away = self._away_since
        waiting = self._put_count - self._done_count
        return self._dead or (waiting < self._buffer_events and (away is None or self._clock() - away < self._buffer_s))

    # --- the thread's side ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._close.is_set() and not self._dead:
            self._receive()
            if self._close.is_set():
                break
            if self._heal is not None:
                ev, self._heal = self._heal + 1, None
                self._deliver(ev)
            elif self._pending:
                self._send_pending()
            elif self._look_now or self._clock() - self._heard >= self._poll_s:
                self._look_now = False
                self._call(self._store.poll)
        self._release()

    def _receive(self) -> None:
        """Takes what is queued. If there is nothing to do, waits for a tick, or dozes until a kick or the next poll."""
        if not self._pending and self._heal is None:
            wait_s = max(0.0, self._heard + self._poll_s - self._clock())
            self._dozing = self._idle_ticks >= DOZE_TICKS
            if not self._dozing:
                wait_s = min(wait_s, self._tick_s)
            elif self._inbox:  # a token that came before `_dozing` was set saw nobody to wake
                wait_s = 0.0
            try:
                self._kicks.get(timeout=wait_s)
                while True:
                    self._kicks.get_nowait()
            except queue.Empty:
                pass
            self._dozing = False
            self._idle_ticks = 0 if self._inbox else self._idle_ticks + 1
            a_tick_each = LONG_TICKS if self._tick_s == LONG_TICK_S else 1
            self._tick_s = LONG_TICK_S if len(self._inbox) > a_tick_each else TICK_S
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, _Heal):
                self._heal = item.stored_ev
            elif isinstance(item, _Look):
                self._look_now = True
            else:
                self._pending.append(item)

    def _send_pending(self) -> None:
        """One append of what is pending up to the next mark, which then is passed."""
        first = self.ev + 1
        taken = self._ledger.enter(self._pending)
        if self.ev >= first:
            self._deliver(first)
        self._done_count += taken
        if not self._stored.is_set():  # setting takes a lock, and seldom is anybody waiting
            self._stored.set()
        if not self._dead and self._pending and isinstance(self._pending[0], _Mark):
            self._pending.popleft().passed.set()  # type: ignore[union-attr]

    def _deliver(self, ev: int) -> None:
        """Sends the numbered events from `ev` on until the broker has them all, or the turn is lost."""
        while not self._dead and ev <= self.ev:
            part = self._ledger.since(ev)
            if part is None:
                self._give_up(Halt.BROKEN, f"the broker lost event {ev} of an earlier attempt")
                return
            began = self._clock()
            flags = self._call(self._store.append, ev, *part)
            if flags is None:
                return
            self.appends += 1
            self.append_s += self._clock() - began
            ev = flags.stored_ev + 1 if flags.status == "behind" else ev + len(part[0])

    def _call(self, verb: Callable[..., Flags], *arguments: Any) -> Flags | None:
        """One call, tried until the broker answers; None when the turn is over for us."""
        pause = FIRST_RETRY_S
        while True:
            try:
                flags = verb(self._claim.request, self._claim.epoch, *arguments)
            except BrokerUnavailable:
                if self._away_since is None:
                    self._away_since = self._clock()
                if self._close.wait(pause):
                    return None
                pause = min(pause * 2, LAST_RETRY_S)
                continue
            except Exception as error:
                self._give_up(Halt.BROKEN, f"{type(error).__name__}: {error}")
                return None
            self._away_since = None
            self._heard = self._clock()
            return flags if self._heed(flags) else None

    def _heed(self, flags: Flags) -> bool:
        """Passes the broker's flags on; False when the turn is not ours any more."""
        if flags.status in ("fenced", "gone"):
            self._give_up(Halt.FENCED, flags.status)
            return False
        if flags.cancel is not None:
            self._cancellation.stop(Halt.CANCELLED, flags.cancel)
        elif flags.yield_now:
            self._cancellation.stop(Halt.PREEMPTED)
        return True

    def _give_up(self, halt: Halt, detail: str) -> None:
        self._cancellation.stop(halt, detail)
        self._dead = True

    def _release(self) -> None:
        """Lets everybody go who still waits for something to be stored."""
        self._stored.set()
        for item in (*self._pending, *self._inbox):
            if isinstance(item, _Mark):
                item.passed.set()


_Item = bytes | Token | _Mark | _Heal | _Look
