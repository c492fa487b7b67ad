"""A pool under random actions: kills, lapses, zombies, yields, drains, cancellations, expiries, lost claims; seeded.

Workers here are only calls, so thousands of interleavings take seconds. The decoder is the identity: token n of a
request is n, so a resumed stream is right exactly if its tokens are 1, 2, 3, ... Invariants are checked from the
logs, after the fact and on the way (the audit must find nothing to mend in a pool that no damage was done to).
"""

from __future__ import annotations

import dataclasses
import random

import pytest

from broker import events, keys
from broker.answers import Claim
from broker.errors import NotFound, NotMember, QueueFull
from broker.reap import rescue
from broker.store import WorkerStore
from tests.conformance.rig import Rig, check_settled, check_stream, tokens

ACTIONS = 400
SEEDS = 12


@dataclasses.dataclass
class Running:
    """One turn in a worker's hands, as that worker sees it."""

    claim: Claim
    ev: int
    n: int
    started: bool = False


class Worker:
    """A worker of the simulation: takes, emits, finishes; may be killed, paused for ever (zombie) or drained."""

    def __init__(self, rig: Rig, name: str) -> None:
        self.store: WorkerStore = rig.worker(name)
        self.turn: Running | None = None
        self.unsettled: list[str] = []
        self.draining = False

    def step(self, dice: random.Random, rig: Rig) -> None:
        if self.turn is None:
            self._take(dice)
        elif not self.turn.started:
            start = events.start(
                attempt=self.turn.claim.attempt, worker=self.store.worker, prompt_tokens=1, reused_tokens=0
            )
            self._append([start], self.turn.n, dice)
            if self.turn is not None:
                self.turn.started = True
        elif dice.random() < 0.25:
            self._finish(dice)
        else:
            count = dice.randint(1, 3)
            ids = list(range(self.turn.n + 1, self.turn.n + count + 1))
            merged = dice.random() < 0.5
            payloads = (
                [events.delta(n=ids[-1], ids=ids, text="")]
                if merged
                else [events.delta(n=i, ids=[i], text="") for i in ids]
            )
            self._append(payloads, ids[-1], dice)

    def _take(self, dice: random.Random) -> None:
        running = list(self.unsettled)
        claim = self.store.take(running)
        if claim is not None and dice.random() < 0.1:
            claim = self.store.take(running)  # the first reply was lost
        if claim is not None:
            assert claim.emitted == list(range(1, claim.n + 1))
            self.turn = Running(claim, claim.ev, claim.n)

    def _append(self, payloads: list[bytes], n: int, dice: random.Random) -> None:
        turn = self.turn
        assert turn is not None
        request, epoch = turn.claim.request, turn.claim.epoch
        for _ in range(2 if dice.random() < 0.2 else 1):
            flags = self.store.append(request, epoch, turn.ev + 1, payloads, n)
        if flags.status in ("fenced", "gone"):
            self.turn = None
            return
        assert flags.status == "ok"
        turn.ev, turn.n = turn.ev + len(payloads), n
        if flags.cancel:
            self._end("cancelled", flags.cancel)
        elif flags.yield_now or self.draining:
            self.store.give_back(request, epoch, "preempted" if flags.yield_now else "drain")
            self.turn = None

    def _finish(self, dice: random.Random) -> None:
        self._end(dice.choice(("done", "done", "done", "failed")), "why")
        if dice.random() < 0.7:
            for request in self.unsettled:
                self.store.settle(request)
            self.unsettled.clear()

    def _end(self, state: str, reason: str) -> None:
        turn = self.turn
        assert turn is not None
        claim = turn.claim
        outcome = self.store.finish(
            claim.request,
            claim.epoch,
            turn.ev + 1,
            state=state,  # type: ignore[arg-type]
            reason=reason,
            n=turn.n,
            usage={},
        )
        assert outcome.status in ("ok", "fenced")
        self.turn = None
        if outcome.status == "ok":
            self.unsettled.append(claim.request)


class Simulation:
    """The pool, its workers, and what was asked of it."""

    def __init__(self, rig: Rig, dice: random.Random) -> None:
        self.rig, self.dice = rig, dice
        self.workers: list[Worker] = []
        self.zombies: list[Worker] = []
        self.requests: list[str] = []
        self.turns: dict[str, list[str]] = {}
        self.born = 0
        for _ in range(3):
            self.birth()

    def birth(self) -> None:
        self.born += 1
        self.workers.append(Worker(self.rig, f"w{self.born}"))

    def act(self) -> None:
        roll = self.dice.random()
        if roll < 0.2:
            self._submit()
        elif roll < 0.8:
            self._work()
        elif roll < 0.84:
            self._lose(zombie=False)
        elif roll < 0.88:
            self._lose(zombie=True)
        elif roll < 0.92 and self.requests:
            self.rig.cancel(self.dice.choice(self.requests))
        elif roll < 0.94:
            self._drain()
        elif roll < 0.96 and self.requests:
            self._expire()
        elif roll < 0.98:
            self.rig.reaper().tick()
            assert self.rig.reaper().audit_all() == 0
        elif len(self.workers) < 4:
            self.birth()

    def _submit(self) -> None:
        conversation = self.dice.choice([None, "a", "b", "c"])
        priority = self.dice.choice(["interactive", "interactive", "background", "batch"])
        group = self.dice.choice(["", "g"]) if priority == "batch" and conversation is None else ""
        try:
            request = self.rig.submit(conversation=conversation, priority=priority, group=group).request
        except QueueFull:
            return
        self.requests.append(request)
        if conversation:
            self.turns.setdefault(conversation, []).append(request)

    def _work(self) -> None:
        for worker in self.dice.sample(self.workers + self.zombies, k=min(2, len(self.workers))):
            try:
                worker.step(self.dice, self.rig)
            except NotMember:
                (self.zombies if worker in self.zombies else self.workers).remove(worker)

    def _lose(self, *, zombie: bool) -> None:
        if not self.workers:
            return
        worker = self.workers.pop(self.dice.randrange(len(self.workers)))
        self.rig.lapse(worker.store)
        if zombie:
            self.zombies.append(worker)
        if worker.turn is not None and self.dice.random() < 0.3:
            rescue(self.rig.scripts.run, worker.turn.claim.request, worker.store.worker)
        self.rig.kill(worker.store)

    def _drain(self) -> None:
        if not self.workers:
            return
        worker = self.dice.choice(self.workers)
        try:
            worker.store.drain()
            worker.draining = True
            if worker.turn is None or self.dice.random() < 0.3:
                worker.store.leave()
                self.workers.remove(worker)
        except NotFound:
            self.workers.remove(worker)

    def _expire(self) -> None:
        request = self.dice.choice(self.requests)
        if self.rig.state(request) in ("queued", "running"):
            self.rig.age(request, self.rig.config.overdue_ms + 1)

    def wind_down(self) -> None:
        """One healthy worker does what is left."""
        for worker in self.workers:
            self.rig.kill(worker.store)
        self.workers, self.zombies = [], []
        self.birth()
        while self.rig.redis.zcard(keys.LIVE) or self.workers[0].turn:
            self.workers[0].step(self.dice, self.rig)
            self.rig.reaper().tick()
        self.rig.kill(self.workers[0].store)

    def check(self) -> None:
        ended_at: dict[str, int] = {}
        for request in self.requests:
            stream = self.rig.log(request)
            check_stream(stream)
            assert tokens(stream) == list(range(1, len(tokens(stream)) + 1))
            record = self.rig.record(request)
            assert record.state == stream[-1].state
            assert record.n == len(tokens(stream))
            ended_at[request] = record.ended_ms
            status = {"done": "finished", "failed": "failed", "cancelled": "canceled", "expired": "failed"}[
                record.state
            ]
            assert self.rig.rq(request) == status
        for order in self.turns.values():
            ran = [request for request in order if any(event.kind == "start" for event in self.rig.log(request))]
            assert [ended_at[request] for request in ran] == sorted(ended_at[request] for request in ran)
        check_settled(self.rig)
        leftovers = {key.decode() for key in self.rig.redis.keys("prism:w:*") + self.rig.redis.keys("prism:rq:worker*")}
        assert leftovers == set()
        for name in (keys.WORKERS, keys.DRAINING, keys.REAPING):
            assert self.rig.redis.exists(name) == 0


@pytest.mark.parametrize("run", range(SEEDS))
def test_nothing_is_lost_doubled_or_reordered_under_chaos(rig: Rig, run: int) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    simulation = Simulation(rig, random.Random(seed))
    for _ in range(ACTIONS):
        simulation.act()
        if not simulation.workers:
            simulation.birth()
    simulation.wind_down()
    simulation.check()
