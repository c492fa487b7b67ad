"""Carries one turn's events to the broker beside the decoder: step k's append travels while step k+1's kernel runs.

Invariant: events get their numbers once, in order, without holes, and are kept until the turn ends, so an append whose
reply was lost, or that the broker lost, is sent again with the same number and bytes. One append is in flight; the next
carries everything that came meanwhile, tokens merged into one delta. Whatever the broker answers (cancelled, yield,
fenced) reaches the turn's cancellation object before the next decoder step; after a silence of `poll_s` it is asked.
Not promised: that an emitted token is stored when `token` returns; `flush` waits for that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from broker import events
from broker.errors import BrokerUnavailable
from broker.store import Claim, Flags, WorkerStore
from prism_core.errors import Cancelled
from workers.cancellation import Halt, TurnCancellation

POLL_S = 0.05
SLICE_S = 0.1
FIRST_RETRY_S = 0.02
LAST_RETRY_S = 1.0
MAX_EVENTS_PER_APPEND = 256
MAX_TOKENS_PER_DELTA = 512


@dataclass
class _Token:
    ids: list[int]
    text: str
    logprob: Any = None


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
        self._wake = threading.Condition()
        self._pending: deque[bytes | _Token] = deque()
        # Every event of this claim with the tokens up to it; the first one is number claim.ev + 1.
        self._sent: list[tuple[bytes, int]] = []
        self._n = claim.n  # tokens up to the last event in _sent
        self._busy = False
        self._closed = False
        self._dead = False  # fenced, gone or refused: nothing is written any more
        self._away_since: float | None = None
        self._heard = clock()
        self.appends = 0
        self.append_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"flush-{claim.request}", daemon=True)
        self._thread.start()

    # --- the loop's side -----------------------------------------------------------------------------------------

    def event(self, payload: bytes) -> None:
        """Queues a ready event, such as `start`."""
        self._put(payload)

    def token(self, token: int, text: str, logprob: Any = None) -> None:
        """Queues one emitted token and the text that it released."""
        self._put(_Token([token], text, logprob))

    def tail(self, text: str) -> None:
        """Queues text that was held back, after the last token."""
        if text:
            self._put(_Token([], text))

    def wait_for_room(self, check: Callable[[], None]) -> None:
        """Returns once there is room for another event; `check` is called each 100 ms meanwhile and may raise."""
        while not self._has_room():
            if self._cancellation.is_cancelled:
                raise Cancelled("the turn was stopped while it waited for the broker")
            check()
            with self._wake:
                if not self._has_room():
                    self._wake.wait(SLICE_S)

    def flush(self, slice_s: float = SLICE_S) -> bool:
        """Waits for at most `slice_s`; True once everything queued is stored, or nothing can be stored any more."""
        with self._wake:
            return self._wake.wait_for(self._is_idle, slice_s)

    def resend(self, stored_ev: int) -> None:
        """The broker's log ends at `stored_ev`, short of what it acknowledged: send the rest again."""
        with self._wake:
            self._heal = stored_ev
            self._wake.notify_all()

    def look(self) -> None:
        """Asks the broker for its flags at once rather than after a silence; from any thread."""
        with self._wake:
            self._heard = self._clock() - self._poll_s
            self._wake.notify_all()

    def close(self) -> None:
        """Ends the thread; what is not stored by now is dropped. Waits for a call in flight if the broker is there."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._thread.join(SLICE_S if self._away_since is not None else 2.0)

    @property
    def ev(self) -> int:
        """Number of the last event made from what was queued; final once `flush` returned True."""
        return self._claim.ev + len(self._sent)

    @property
    def n(self) -> int:
        """Tokens up to event `ev`."""
        return self._n

    @property
    def is_dead(self) -> bool:
        """True once the broker said that this turn is not ours any more."""
        return self._dead

    # --- the thread's side ---------------------------------------------------------------------------------------

    _heal: int | None = None

    def _put(self, item: bytes | _Token) -> None:
        with self._wake:
            self._pending.append(item)
            self._wake.notify_all()

    def _has_room(self) -> bool:
        if self._dead:
            return True
        away = self._away_since
        return len(self._pending) < self._buffer_events and (away is None or self._clock() - away < self._buffer_s)

    def _is_idle(self) -> bool:
        return self._dead or (not self._pending and not self._busy and self._heal is None)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._busy = False
                self._wake.notify_all()
                if self._closed or self._dead:
                    return
                if not self._pending and self._heal is None:
                    self._wake.wait(max(0.0, self._heard + self._poll_s - self._clock()))
                if self._closed:
                    return
                first, self._heal = self._heal, None
                fresh = self._number()
                self._busy = first is not None or fresh > 0
            if self._busy:
                self._deliver(self.ev - fresh + 1 if first is None else first + 1)
            elif self._clock() - self._heard >= self._poll_s:
                self._call(lambda: self._store.poll(self._claim.request, self._claim.epoch))

    def _number(self) -> int:
        """Moves what is pending into the numbered events, merging tokens; returns how many events that made."""
        made = 0
        while self._pending and made < MAX_EVENTS_PER_APPEND:
            item = self._pending.popleft()
            if isinstance(item, bytes):
                self._sent.append((item, self._n))
            else:
                self._sent.append((self._delta(item), self._n))
            made += 1
        return made

    def _delta(self, first: _Token) -> bytes:
        ids, texts = list(first.ids), [first.text]
        logprobs = None if first.logprob is None else [first.logprob]
        while self._pending and len(ids) < MAX_TOKENS_PER_DELTA:
            item = self._pending[0]
            if isinstance(item, bytes) or (item.ids and (item.logprob is None) != (logprobs is None)):
                break
            self._pending.popleft()
            ids += item.ids
            texts.append(item.text)
            if logprobs is not None and item.logprob is not None:
                logprobs.append(item.logprob)
        self._n += len(ids)
        return events.delta(n=self._n, ids=ids, text="".join(texts), logprobs=logprobs)

    def _deliver(self, ev: int) -> None:
        """Sends the numbered events from `ev` on until the broker has them all, or the turn is lost."""
        while not self._dead and ev <= self.ev:
            at = ev - self._claim.ev - 1
            if at < 0:
                # An event of an earlier attempt is missing, and only that attempt had it.
                self._give_up(Halt.BROKEN, f"the broker lost event {ev} of an earlier attempt")
                return
            part = self._sent[at : at + MAX_EVENTS_PER_APPEND]
            began = self._clock()
            flags = self._call(partial(self._append, ev, part))
            if flags is None:
                return
            self.appends += 1
            self.append_s += self._clock() - began
            ev = flags.stored_ev + 1 if flags.status == "behind" else ev + len(part)

    def _append(self, ev: int, part: list[tuple[bytes, int]]) -> Flags:
        payloads = [payload for payload, _ in part]
        return self._store.append(self._claim.request, self._claim.epoch, ev, payloads, part[-1][1])

    def _call(self, send: Callable[[], Flags]) -> Flags | None:
        """One call, tried until the broker answers; None when the turn is over for us."""
        pause = FIRST_RETRY_S
        while True:
            try:
                flags = send()
            except BrokerUnavailable:
                with self._wake:
                    self._away_since = self._away_since or self._clock()
                    self._wake.wait_for(lambda: self._closed, pause)
                    if self._closed:
                        return None
                pause = min(pause * 2, LAST_RETRY_S)
                continue
            except Exception as error:
                self._give_up(Halt.BROKEN, f"{type(error).__name__}: {error}")
                return None
            with self._wake:
                self._away_since = None
                self._heard = self._clock()
                self._wake.notify_all()
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
        with self._wake:
            self._dead = True
            self._wake.notify_all()
