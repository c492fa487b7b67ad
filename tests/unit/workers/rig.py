"""One worker's side of the pool in this process: submit, take, run the turn on a toy Runtime, read the log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import redis

from broker import keys, rqrecord
from broker.answers import Claim
from broker.config import PoolConfig
from broker.events import BEGIN, Event
from broker.lua import Scripts
from broker.spec import RequestSpec
from broker.store import Lease, WorkerStore
from prism_core.runtime import Generation, Limits, Runtime
from tests.brokers import PrivateBroker
from tests.toy import ToyModel
from workers.cancellation import Halt, Progress
from workers.config import WorkerConfig
from workers.turn import Turn, TurnResult

OWNER = "local"


@dataclass
class Log:
    events: list[Event]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def ids(self) -> list[int]:
        return [token for event in self.events for token in event.token_ids]

    @property
    def end(self) -> dict[str, Any]:
        assert self.events[-1].kind == "end"
        assert sum(event.kind == "end" for event in self.events) == 1
        return dict(self.events[-1].data)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


class Rig:
    def __init__(self, broker: PrivateBroker, model: ToyModel | None = None, **pool: Any) -> None:
        self.broker = broker
        self.redis: redis.Redis = broker.client()
        self.config = PoolConfig(**pool)
        self.model = model or ToyModel()
        self.scripts = Scripts(self.redis, self.config)
        self.store = self.worker("w1")
        self.runtime = self.new_runtime()

    def new_runtime(self) -> Runtime:
        limits = Limits(self.model.context_tokens, 8, 64 << 20)
        return Runtime(self.model.decoder(), limits, retention="lru")

    def worker(self, name: str) -> WorkerStore:
        store = WorkerStore(
            self.broker.client(), Lease(worker=name, model=self.model.identity, host="h", pid=1), self.config
        )
        store.join()
        return store

    def submit(
        self, *, conversation: str = "", deadline_ms: int = 60_000, priority: str = "interactive", **options: Any
    ) -> str:
        spec = RequestSpec(**options).seeded()
        request = keys.new_ulid()
        key = keys.conversation_key(OWNER, conversation) if conversation else ""
        fields = rqrecord.fields(request, priority=priority, conversation=None, config=self.config)
        names = [request, OWNER, self.model.identity, priority, key, conversation, "", "", spec.pack()]
        reply = self.scripts.run("submit", [keys.request(request)], [*names, spec.digest(), "", deadline_ms, *fields])
        assert reply[0] in (b"placed", b"boxed"), reply
        return request

    def turn(
        self, claim: Claim, *, store: WorkerStore | None = None, runtime: Runtime | None = None, **more: Any
    ) -> Turn:
        config = WorkerConfig(model="toy", redis_url=self.broker.url, **more.pop("config", {}))
        return Turn(
            claim,
            model=self.model,
            runtime=runtime or self.runtime,
            store=store or self.store,
            config=config,
            progress=Progress(),
            **more,
        )

    def stopped_after(self, claim: Claim, tokens: int, halt: Halt) -> TurnResult:
        """Runs the turn until it has emitted so many tokens in all, then stops it."""
        emitted: list[Turn] = []
        turn = self.turn(claim, outside=lambda: halt if emitted and len(emitted[0]._ids) >= tokens else None)
        emitted.append(turn)
        return turn.run()

    def run(self, **options: Any) -> tuple[TurnResult, Log]:
        """Submits, takes, runs and settles one turn."""
        request = self.submit(**options)
        claim = self.store.take()
        assert claim is not None
        assert claim.request == request
        result = self.turn(claim).run()
        self.store.settle(request)
        return result, self.log(request)

    def log(self, request: str) -> Log:
        entries = self.redis.xrange(keys.log(request))
        return Log([Event.unpack(BEGIN, fields[b"d"]) for _, fields in entries])

    def bare(self, prompt: list[int], max_tokens: int, sampler: Any = None) -> list[int]:
        """What the bare Runtime generates."""
        ids: list[int] = []
        self.new_runtime().generate(
            prompt,
            Generation(max_tokens=max_tokens, stop_tokens=self.model.tokenizer.stop_tokens),
            sampler=sampler,
            emit=ids.append,
        )
        return ids
