"""The turn worker: one process, one Runtime, one turn at a time, on RQ's BaseWorker with a loop of its own.

Invariant: between `join` and the process's end every claim is ended, handed back, or left to be rescued; nothing else
removes it from this worker. Signal handlers only set flags. A worker that the pool has forgotten (reaped, or the broker
lost its data) writes nothing more and exits with 75, so that its supervisor starts a new incarnation.
Not promised: that a turn in progress survives this process; it is taken over by another, from its last stored token.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import redis

from broker import keys
from broker.answers import Claim
from broker.errors import BrokerUnavailable, NotMember
from broker.store import Lease, WorkerStore
from prism_core.errors import PrismError
from workers.budget import Plan
from workers.cancellation import Halt, Progress
from workers.config import WorkerConfig
from workers.heart import Heart
from workers.hints import Hints
from workers.rq_adapter import HEARTBEAT_S, RqWorker
from workers.tracing import turn_span
from workers.turn import Turn, TurnResult

log = logging.getLogger(__name__)

EXIT_DRAINED = 0
EXIT_BROKEN = 70
EXIT_REAPED = 75
PAUSE_S = 0.1


def incarnation() -> str:
    """A name that no worker has had before: the host's and a ULID."""
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:32] or "host"
    return f"{host}-{keys.new_ulid()}"


@dataclass
class Tally:
    """What this incarnation has done, shown by `prism top`."""

    turns: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    busy_s: float = 0.0
    running: str = ""
    states: dict[str, int] = field(default_factory=dict)

    def add(self, result: TurnResult, seconds: float) -> None:
        self.turns += 1
        self.prompt_tokens += result.prompt_tokens
        self.reused_tokens += result.reused_tokens
        self.tokens += result.tokens
        self.busy_s += seconds
        what = result.state or result.disposition
        self.states[what] = self.states.get(what, 0) + 1


class TurnWorker(RqWorker):
    """Takes turns and runs them on `runtime` until told to stop. Made and run on the main thread."""

    def __init__(
        self,
        *,
        store: WorkerStore,
        rq_client: redis.Redis,
        model: Any,
        runtime: Any,
        plan: Plan,
        config: WorkerConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(rq_client, store.worker)
        self._store, self._model, self._runtime, self._plan = store, model, runtime, plan
        self._config, self._clock = config, clock
        self._progress = Progress(clock)
        self._tally = Tally()
        self._unsettled: list[str] = []
        self._drain_since: float | None = None
        self._stop_now = False
        self._turn: Turn | None = None
        self._heart: Heart | None = None

    # --- what others ask of it -----------------------------------------------------------------------------------

    def request_drain(self) -> None:
        """Takes no more turns and leaves; a running turn has the grace time to end."""
        if self._drain_since is None:
            self._drain_since = self._clock()
        if self._heart is not None:
            self._heart.drain()

    def request_stop_now(self) -> None:
        """Hands a running turn back at the next check and leaves."""
        self._stop_now = True
        self.request_drain()

    def _on_signal(self, signum: int, frame: object) -> None:
        if self._drain_since is None:
            self.request_drain()
        else:
            self.request_stop_now()

    def _on_hint(self, message: bytes) -> None:
        turn = self._turn
        if turn is not None:
            turn.look()

    def _on_command(self, message: bytes) -> None:
        command = self.command(message)
        turn = self._turn
        if command is not None and command[0] == "shutdown":
            self.request_drain()
        elif command is not None and turn is not None:
            turn.cancel(command[1], "stopped through rq")

    # --- the loop ------------------------------------------------------------------------------------------------

    def work(self, *args: Any, **kwargs: Any) -> int:
        """Runs until drained (returns 0), reaped (75) or broken (70)."""
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            boot = self._join()
            return EXIT_DRAINED if boot is None else self._serve(boot)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _join(self) -> str | None:
        """The broker's boot id, or None if the worker was told to leave before the broker came."""
        while self._drain_since is None:
            try:
                boot = self._store.join()
            except BrokerUnavailable:
                time.sleep(PAUSE_S)
                continue
            self.born()
            log.info("worker joined", extra={"worker": self.name, "model": self._model.identity})
            return boot
        return None

    def _serve(self, boot: str) -> int:
        heart = self._heart = Heart(
            self._store,
            self._progress,
            boot,
            stats=self._stats,
            beside=self.beat,
            beside_s=HEARTBEAT_S,
            clock=self._clock,
        )
        if self._drain_since is not None:  # told between the join and here
            heart.drain()
        channels = {f"prism:ctl:{self.name}": self._on_hint, self.command_channel: self._on_command}
        hints = Hints(self._store.redis, channels)
        heart.start()
        hints.start()
        try:
            code = self._loop(heart)
            if code == EXIT_DRAINED:
                self._leave()
            return code
        finally:
            hints.stop()
            heart.stop()

    def _loop(self, heart: Heart) -> int:
        while True:
            self._progress.stamp()
            if heart.lost:
                return EXIT_REAPED
            if self._stop_now and not self._unsettled:
                return EXIT_DRAINED
            try:
                heart.beat_if_due()
                self._settle()
                claim = self._store.take(self._unsettled)
                if claim is not None:
                    self._run(claim)
                elif heart.draining:
                    return EXIT_DRAINED
                elif not heart.lost:
                    self._store.wait_bell()
            except NotMember:
                return EXIT_REAPED
            except BrokerUnavailable:
                if self._stop_now:
                    return EXIT_DRAINED
                time.sleep(PAUSE_S)
            except RuntimeBroken:
                log.error("runtime is broken", extra={"worker": self.name})
                return EXIT_BROKEN

    def _run(self, claim: Claim) -> None:
        began = self._clock()
        self._tally.running = claim.request
        self.begin(claim.request)
        self._turn = Turn(
            claim,
            model=self._model,
            runtime=self._runtime,
            store=self._store,
            config=self._config,
            progress=self._progress,
            outside=self._outside,
            abandoned=lambda: self._stop_now or (self._heart is not None and self._heart.lost),
            clock=self._clock,
        )
        try:
            with turn_span(_trace_of(claim), claim.request, self.name):
                result = self._turn.run()
        except Exception as error:
            raise RuntimeBroken(type(error).__name__) from error
        finally:
            self._turn = None
            self._tally.running = ""
        self._tally.add(result, self._clock() - began)
        if result.disposition == "ended":
            self.end(claim.request, state=str(result.state), reason=result.reason, tokens=result.tokens)
            self._unsettled.append(claim.request)
            self._settle()
        else:
            self.dropped()
        log.info(
            "turn left",
            extra={
                "worker": self.name,
                "request": claim.request,
                "attempt": claim.attempt,
                "disposition": result.disposition,
                "state": result.state,
                "tokens": result.tokens,
                "reused_tokens": result.reused_tokens,
            },
        )

    def _outside(self) -> Halt | None:
        """Reasons to stop a turn that come from neither the broker nor the client."""
        if self._heart is not None and self._heart.lost:
            return Halt.FENCED
        if self._stop_now:
            return Halt.DRAINED
        since = self._drain_since
        if since is not None and self._clock() - since >= self._config.grace_s:
            return Halt.DRAINED
        if self._heart is not None and self._heart.draining and since is None:
            self._drain_since = self._clock()
        return None

    def _settle(self) -> None:
        """Takes ended requests out of the run set; what an absent broker leaves is settled before the next take."""
        while self._unsettled:
            self._store.settle(self._unsettled[0])
            del self._unsettled[0]

    def _leave(self) -> None:
        try:
            self._store.leave()
        except BrokerUnavailable:
            log.warning("left without the broker", extra={"worker": self.name})
        self.died()
        log.info("worker left", extra={"worker": self.name, "turns": self._tally.turns})

    def _stats(self) -> dict[str, int | float | str]:
        tally = self._tally
        return {
            "state": "busy" if tally.running else "idle",
            "running": tally.running,
            "turns": tally.turns,
            "tokens": tally.tokens,
            "prompt_tokens": tally.prompt_tokens,
            "reused_tokens": tally.reused_tokens,
            "busy_ms": round(tally.busy_s * 1000),
            "saved_prefixes": self._runtime.checkpoint_count,
            "live_tokens": len(self._runtime.tokens),
            "threads": self._config.threads,
            "pid": os.getpid(),
            **self._plan.stats(),
        }


def _trace_of(claim: Claim) -> str:
    """The trace that the request carries; a spec that cannot be read is the turn's own affair."""
    try:
        return claim.spec.trace
    except PrismError:
        return ""


class RuntimeBroken(Exception):
    """The Runtime could not be brought back; the process must exit so that a new incarnation starts."""


def lease_for(name: str, model: Any, plan: Plan, label: str) -> Lease:
    """Who a worker is, for the pool."""
    return Lease(
        worker=name,
        model=model.identity,
        host=socket.gethostname(),
        pid=os.getpid(),
        name=label,
        tokenizer=str(getattr(model.tokenizer, "fingerprint", "") or model.identity.partition("+")[0]),
        context_tokens=plan.context_tokens,
        memory_bytes=plan.memory_bytes,
    )
