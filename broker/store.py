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
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from redis import Redis

from broker import events, keys
from broker.config import PoolConfig
from broker.errors import NotMember
from broker.failures import translated
from broker.line import Line
from broker.lua import Scripts, compose
from broker.reap import drain, reap
from broker.spec import RequestSpec
from broker.transcript import TurnCommit, TurnRecord
from prism_core import codec

LONGEST_WAIT_S = 4.0
"""A blocking pop must end before the socket's own time-out (5 s)."""

__all__ = ["Beat", "Claim", "Flags", "Lease", "Outcome", "WorkerStore"]


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


@dataclass(frozen=True)
class Beat:
    """Answer to a beat."""

    draining: bool
    """Somebody asked this worker to drain: finish or give back what runs, take no more, leave."""
    boot: str
    """The broker's boot id; a change means that it lost its data."""


class Flags(NamedTuple):
    """Answer to append and poll: was it accepted, and what should the decoder loop do next."""

    status: Literal["ok", "fenced", "gone", "behind"]
    """ok: stored (or stored before). fenced: the turn is no longer ours: stop, write nothing. gone: the request's
    record does not exist. behind: events before these are missing in the log: resend from `stored_ev + 1`."""
    stored_ev: int = 0
    """Number of the last event in the log."""
    cancel: str | None = None
    """Reason of a cancellation, set by a client; roll back and finish as cancelled."""
    yield_now: bool = False
    """An interactive turn waits for this worker, which runs a batch line: roll back and `give_back(...,
    "preempted")`."""


@dataclass(frozen=True)
class Outcome:
    """Answer to finish, settle and give_back."""

    status: Literal["ok", "again", "fenced", "gone", "behind"]
    """ok: done now. again: done before by this same epoch. Others as in `Flags`."""
    stored_ev: int = 0


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A turn that this worker now runs, under `epoch`."""

    request: str
    epoch: int
    ev: int
    """Events in the log so far: the next one is `ev + 1`."""
    n: int
    """Tokens emitted so far by earlier attempts."""
    attempt: int
    """Takes so far, this one included; yields and drains do not count."""
    remaining_ms: int
    """Broker time left until the deadline, at the moment of the take."""
    cancel: str | None
    """Reason if it was cancelled already (only for a turn given again after a lost reply)."""
    priority: str
    conversation: str
    """Key of the conversation for `transcript`, empty without one."""
    model: str
    group: str
    """Batch group, empty without one."""
    owner: str
    queued_ms: int
    """Broker time from submission (or the last move) to this take."""
    spec_bytes: bytes
    emitted: list[int] = field(default_factory=list)
    """Ids of the `n` tokens emitted by earlier attempts, in order; generation goes on after them."""
    emitted_text: str = ""
    """All text that the log holds for them; it may run ahead of them by a tail that was held back."""
    prompt_tokens: int = 0
    """Prompt tokens that an earlier attempt reported; 0 before the first."""

    @cached_property
    def spec(self) -> RequestSpec:
        """The request; `InvalidRequest` or `CodecError` if this worker cannot read it: finish it as failed."""
        return RequestSpec.unpack(self.spec_bytes)


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
        return _text(self._run("join", [keys.worker(self.worker)], [self.worker, self.lease.pack()]))

    def beat(self, stats: Mapping[str, int | float | str] | None = None) -> Beat:
        """Renew the lease (a lapsed one too); `stats` are shown by `prism top` and live as long as the worker.

        Raises `NotMember` if this incarnation was reaped, or the broker came back empty: exit with 75.
        """
        flat = [item for pair in (stats or {}).items() for item in pair]
        reply = self._run("beat", [keys.worker(self.worker)], [self.worker, self.lease.pack(), *flat])
        if reply[0] != 1:
            raise NotMember(f"worker {self.worker} is no member of the pool any more")
        return Beat(draining=reply[1] == 1, boot=_text(reply[2]))

    def take(self, running: Collection[str] = ()) -> Claim | None:
        """Claim the next turn in the protocol's order, or None if there is none (then `wait_bell`) or we are draining.

        `running` are the requests that this worker knows it runs or has not settled: any other that the broker believes
        to run here is a claim whose reply was lost, and is given again under a new epoch.
        A lapsed lease gives None too (beat, then take again); `NotMember` as for `beat`.
        """
        while True:
            reply = self._run("take", [keys.worker(self.worker)], [self.worker, *running])
            what = _text(reply[0])
            if what == "claim":
                return _claim(reply)
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
        return _flags(reply)

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
        return _flags(self._run("poll", [keys.request(request)], [request, self.worker, epoch]))

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
        return _outcome(self._run("finish", [keys.request(request)], arguments))

    def settle(self, request: str) -> Outcome:
        """Take an ended request out of the run set; RQ's record is made true here if the caller has not done it.

        `fenced` if the request still runs at this worker (finish it first).
        """
        return _outcome(self._run("settle", [keys.request(request)], [request, self.worker]))

    def give_back(self, request: str, epoch: int, why: Literal["preempted", "drain"]) -> Outcome:
        """Put a running turn back at the front of its queue (new epoch, `moved{why}`); counts no attempt.

        Every event appended so far counts: the turn resumes at n + 1, here or elsewhere.
        """
        return _outcome(self._run("yield", [keys.request(request)], [request, self.worker, epoch, why]))

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


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


_STATUS: dict[int, Any] = {0: "ok", 1: "again", -1: "fenced", -2: "gone", -3: "behind"}


def _flags(reply: Any) -> Flags:
    status = _STATUS[reply[0]]
    if status != "ok":
        return Flags(status, reply[1] if len(reply) > 1 else 0)
    return Flags("ok", reply[1], _text(reply[2]) or None, reply[3] == 1)


def _outcome(reply: Any) -> Outcome:
    return Outcome(_STATUS[reply[0]], reply[1] if len(reply) > 1 else 0)


def _claim(reply: Any) -> Claim:
    emitted: list[int] = []
    texts: list[str] = []
    prompt_tokens = 0
    for payload in reply[15]:
        event = events.Event.unpack(events.BEGIN, payload)
        emitted += event.token_ids
        texts.append(event.text)
        prompt_tokens = event.data.get("prompt_tokens", prompt_tokens)
    return Claim(
        request=_text(reply[1]),
        epoch=reply[2],
        ev=reply[3],
        n=reply[4],
        attempt=reply[5],
        remaining_ms=reply[6],
        cancel=_text(reply[7]) or None,
        priority=_text(reply[8]),
        conversation=_text(reply[9]),
        model=_text(reply[10]),
        group=_text(reply[11]),
        owner=_text(reply[12]),
        queued_ms=reply[13],
        spec_bytes=reply[14],
        emitted=emitted,
        emitted_text="".join(texts),
        prompt_tokens=prompt_tokens,
    )
