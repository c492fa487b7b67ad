"""The worker's side of the broker: one small verb for each script of the pool protocol.

Kept: every verb is one round trip, atomic on the server, and survives a blind resend of the same call, so a lost
reply is answered by calling again. A verb raises `BrokerUnavailable` when the broker did not answer (whether it acted
is unknown: call again), never for a protocol outcome: those are return values, save `NotMember`, which tells the
worker to exit (75). Not promised: that a turn runs once. A worker that lost its lease may still compute, but `epoch`
fences it: nothing that it sends is accepted any more.

A worker's life in verbs (one `WorkerStore` for each incarnation; any thread may call any verb):

    store = WorkerStore(redis, lease)
    store.join()                                       once
    store.beat(stats)                                  each `beat_ms`, from the loop and the beat thread
    claim = store.take(running=())                     None: nothing to do -> store.wait_bell()
    store.append(claim.request, claim.epoch, ev, payloads, n)      from the flusher: ev of the first payload
    store.poll(claim.request, claim.epoch)             in prefill, at most each 50 ms
    store.finish(claim.request, claim.epoch, ev, ...)  the commit point: end event, transcript, promotion of the next
    turn store.settle(claim.request)                        after RQ's record is finalised
    store.give_back(claim.request, claim.epoch, why)   instead of finish: `preempted` or `drain`
    store.drain(), store.leave()
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from redis import Redis

from broker import events, keys
from broker.answers import Beat, Claim, Flags, Outcome
from broker.config import PoolConfig
from broker.errors import NotMember
from broker.failures import translated
from broker.line import Line
from broker.lua import Scripts, compose
from broker.reap import drain, reap
from broker.transcript import TurnCommit, TurnRecord
from prism_core import codec

LONGEST_WAIT_S = 4.0
"""A blocking pop must end before the socket's own time-out (5 s)."""

__all__ = ["Lease", "WorkerStore"]


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Who a worker is; stored as JSON in `prism:w:W` and read by placement."""

    worker: str
    """Name of this incarnation, unique for ever: `host-ulid`."""
    model: str
    """Model identity, numeric suffix included."""
    host: str
    pid: int
    slots: int = 1
    name: str = ""
    """What people call the model, such as `smollm2-135m`; clients may ask for it by this name."""
    tokenizer: str = ""
    """Fingerprint of the tokenizer: a conversation never meets two different ones. Empty: the model's identity."""
    context_tokens: int = 0
    memory_bytes: int = 0
    """Memory budget of this worker: weights, KV pages and saved prefixes."""

    def pack(self) -> str:
        keys.check_id(self.worker, "worker")
        return json.dumps(asdict(self), separators=(",", ":"), sort_keys=True)

    @classmethod
    def unpack(cls, data: bytes | str) -> Lease:
        value = json.loads(data)
        return cls(**{name: value[name] for name in cls.__dataclass_fields__ if name in value})


class WorkerStore:
    """Verbs of one worker incarnation."""

    def __init__(self, redis: Redis, lease: Lease, config: PoolConfig | None = None) -> None:
        """`redis` comes from `broker.connect`, with bytes replies; `lease` names this incarnation."""
        self.redis = redis
        self.lease = lease
        self.worker = keys.check_id(lease.worker, "worker")
        self.config = config or PoolConfig()
        self._run = Scripts(redis, self.config).run
        self._lines: deque[Line] = deque()  # in use by nobody; more than one only if threads append side by side

    def join(self) -> str:
        """Become a member: lease, home queues, model registry. Returns the broker's boot id. Again: no change."""
        boot: bytes = self._run("join", [keys.worker(self.worker)], [self.worker, self.lease.pack()])
        return boot.decode()

    def beat(self, stats: Mapping[str, int | float | str] | None = None) -> Beat:
        """Renew the lease (a lapsed one too); `stats` are shown by `prism top` and live as long as the worker.

        Raises `NotMember` if this incarnation was reaped, or the broker came back empty: exit with 75.
        """
        flat = [item for pair in (stats or {}).items() for item in pair]
        reply = self._run("beat", [keys.worker(self.worker)], [self.worker, self.lease.pack(), *flat])
        if reply[0] != 1:
            raise NotMember(f"worker {self.worker} is no member of the pool any more")
        return Beat(draining=reply[1] == 1, boot=reply[2].decode())

    def take(self, running: Collection[str] = ()) -> Claim | None:
        """Claim the next turn in the protocol's order, or None if there is none (then `wait_bell`) or we are draining.

        `running` are the requests that this worker knows it runs or has not settled: any other that the broker believes
        to run here is a claim whose reply was lost, and is given again under a new epoch.
        A lapsed lease gives None too (beat, then take again); `NotMember` as for `beat`.
        """
        while True:
            reply = self._run("take", [keys.worker(self.worker)], [self.worker, *running])
            what = reply[0].decode()
            if what == "claim":
                return Claim.read(reply)
            if what == "reaped":
                raise NotMember(f"worker {self.worker} is no member of the pool any more")
            if what != "more":  # lapsed, draining, none
                return None

    def append(self, request: str, epoch: int, ev: int, payloads: Sequence[bytes], n: int) -> Flags:
        """Add events `ev, ev+1, ...` to the log and ring its readers; `n` = tokens emitted once all are in.

        `payloads` come from `broker.events` (`start`, `delta`). Those already stored are passed over, so a resend may
        carry more than the first try did.
        """
        line = self._line_of(request, epoch)
        reply = None if line is None else line.append(ev, payloads, n)
        if reply is None:
            reply = self._run("append", [keys.request(request)], [request, self.worker, epoch, ev, n, *payloads])
            sha = compose("append", self.config)[1]
            line = Line.open(self.redis.connection_pool, sha, request, self.worker, epoch)
        if line is not None:
            self._lines.append(line)
        return Flags.read(reply)

    def _line_of(self, request: str, epoch: int) -> Line | None:
        """The turn's line, if it has one that nobody uses; that of another turn has had its time."""
        try:
            line = self._lines.pop()
        except IndexError:
            return None
        if line.serves(request, epoch):
            return line
        line.close()
        return None

    def poll(self, request: str, epoch: int) -> Flags:
        """The flags without an event, for prefill and for waits."""
        return Flags.read(self._run("poll", [keys.request(request)], [request, self.worker, epoch]))

    def finish(
        self,
        request: str,
        epoch: int,
        ev: int,
        *,
        state: Literal["done", "failed", "cancelled", "expired"],
        reason: str,
        n: int,
        usage: Mapping[str, int],
        ids: Sequence[int] = (),
        text: str = "",
        turn: TurnCommit | None = None,
    ) -> Outcome:
        """End the turn: the one commit point. `ev` is the number of its end event: everything before must be in the
        log.

        reason: `stop`, `length`, or the error's one line. usage: prompt_tokens, completion_tokens, reused_tokens, ...
        ids, text: the whole answer, all attempts. turn: what to commit to the transcript, used only if state is done.
        The request stays in this worker's run set until `settle`.
        """
        payload = events.end(state=state, reason=reason, usage=usage, n=n)
        commit: list[int | bytes] = [turn.base, turn.record.pack()] if turn is not None and state == "done" else []
        body: list[str | bytes] = [state, reason, payload, codec.pack(dict(usage)), codec.pack(list(ids)), text]
        arguments = [request, self.worker, epoch, ev, n, *body, *commit]
        return Outcome.read(self._run("finish", [keys.request(request)], arguments))

    def settle(self, request: str) -> Outcome:
        """Take an ended request out of the run set; RQ's record is made true here if the caller has not done it.

        `fenced` if the request still runs at this worker (finish it first).
        """
        return Outcome.read(self._run("settle", [keys.request(request)], [request, self.worker]))

    def give_back(self, request: str, epoch: int, why: Literal["preempted", "drain"]) -> Outcome:
        """Put a running turn back at the front of its queue (new epoch, `moved{why}`); counts no attempt.

        Every event appended so far counts: the turn resumes at n + 1, here or elsewhere.
        """
        return Outcome.read(self._run("yield", [keys.request(request)], [request, self.worker, epoch, why]))

    def wait_bell(self, timeout_s: float | None = None) -> bool:
        """Sleep until the bell rings or `timeout_s` (default `bell_wait_ms`) passed; True if it rang."""
        seconds = self.config.bell_wait_ms / 1000 if timeout_s is None else timeout_s
        with translated():
            return (
                self.redis.blpop([keys.worker(self.worker) + ":bell"], timeout=min(max(seconds, 0.01), LONGEST_WAIT_S))
                is not None
            )

    def drain(self) -> int:
        """Ask for no new turns and place the queued ones elsewhere; the running one goes on. Returns how many were
        moved."""
        return drain(self._run, self.worker)

    def leave(self) -> None:
        """End this incarnation in order: delete the lease, hand over what may still run here, place the rest again."""
        reap(self._run, self.worker, why="drain", known_gone=True)

    def transcript(self, conversation: str) -> list[TurnRecord]:
        """Committed turns of `claim.conversation`, oldest first; `len()` of it is the base of a plain next turn."""
        with translated():
            entries: list[Any] = self.redis.lrange(keys.conversation_part(conversation, "hist"), 0, -1)
        return [TurnRecord.unpack(entry) for entry in entries]
