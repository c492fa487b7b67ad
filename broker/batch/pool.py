"""A batch's calls to the pool: submit lines, look at many at once, read how they ended.

Kept: every call may be repeated; a line's requests have their ids before their first try, so submitting one again finds
it. Answers are read from the record, and from the log where they hold log-probabilities.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import redis

from broker import calls, events, keys
from broker.calls import Cancelled, Record, Submission
from broker.config import PoolConfig
from broker.errors import Conflict, NotFound, StreamLost
from broker.events import TERMINAL, Event
from broker.failures import translated
from broker.gateway.response_object import events_of
from broker.lua import Scripts
from broker.spec import RequestSpec

__all__ = ["LinePool", "Seen"]

FORGET_S = 600
"""Time for which the pool keeps an answer that the batch has recorded."""

Seen = tuple[str, int]
"""(state, tokens so far) of a request."""


class LinePool:
    """The pool as one owner's batches see it."""

    def __init__(self, client: redis.Redis, config: PoolConfig, owner: str = keys.LOCAL_OWNER) -> None:
        self.redis = client
        self.config = config
        self.owner = owner
        self._run = Scripts(client, config).run
        self._names: dict[str, str] = {}

    def submit(self, request: str, spec: RequestSpec, *, model: str, group: str, deadline_s: float) -> None:
        """Queues one request of a line; one that is there already is left as it is.

        `QueueFull`: later. `NotFound`: no such model. `InvalidRequest`, `BrokerUnavailable`.
        """
        item = Submission(
            request=request,
            owner=self.owner,
            model=model,
            priority="batch",
            deadline_s=min(max(deadline_s, 0.001), self.config.max_deadline_s),
            group=group,
        )
        call = calls.submit(item, spec, self.config)
        with contextlib.suppress(Conflict):  # put into another group by an earlier runner: it is found by its id
            call.parse(self._run(call.script, call.keys, call.arguments))

    def look(self, requests: Sequence[str]) -> list[Seen | None]:
        """Where each request stands; None for one that the pool does not know (any more)."""
        with translated():
            pipe = self.redis.pipeline(transaction=False)
            for request in requests:
                pipe.hmget(keys.request(request), ["owner", "state", "n"])
            found = pipe.execute()
        owner = self.owner.encode()
        return [(state.decode(), int(n or 0)) if its == owner else None for its, state, n in found]

    def end_of(self, request: str, *, whole_log: bool) -> tuple[str, list[Event]]:
        """The model (identity) that an ended request ran on, and its events, or the shortest ones that tell the same.

        `whole_log`: the log itself, for what the record does not hold. `NotFound` if the record is gone, `StreamLost`
        if the log is.
        """
        record = self.record(request)
        if record.state not in TERMINAL:
            raise NotFound(f"request {request} has not ended")
        if not whole_log or record.state != "done":
            return record.model, events_of(record)
        with translated():
            entries: Any = self.redis.xrange(keys.log(request))
        log = [Event.unpack(events.parse_cursor(name.decode()), entry[b"d"]) for name, entry in entries]
        if len(log) != record.ev:
            raise StreamLost(f"the log of request {request} is gone")
        return record.model, log

    def record(self, request: str) -> Record:
        """`NotFound`."""
        with translated():
            values: list[Any] = self.redis.hmget(keys.request(request), list(calls.RECORD_FIELDS))
        return calls.read_record(request, self.owner, values)

    def cancel(self, request: str, reason: str) -> Cancelled:
        """`NotFound`."""
        call = calls.cancel(request, self.owner, reason)
        return call.parse(self._run(call.script, call.keys, call.arguments))

    def forget(self, request: str) -> None:
        """The answer is on disk: the pool need not keep it for a day."""
        self._run("forget", [keys.request(request)], [request, self.owner, FORGET_S])

    def workers(self) -> int:
        """Members of the pool."""
        with translated():
            count: Any = self.redis.scard(keys.WORKERS)
        return int(count)

    def file_root(self, name: str, seconds: int) -> str:
        """The name of the folder that the pool's gateways share: `name`, unless another was given less than `seconds`
        ago."""
        with translated():
            self.redis.set(keys.FILES, name, ex=seconds, nx=True)
            found: Any = self.redis.get(keys.FILES)
            if found == name.encode():
                self.redis.expire(keys.FILES, seconds)
        return name if found is None else str(found.decode())

    def models(self) -> list[str]:
        """Names of all models that the pool has ever run; identities of those without a name."""
        with translated():
            found: Any = self.redis.hgetall(keys.MODELS)
        self._names = {name.decode(): json.loads(facts).get("name", "") for name, facts in found.items()}
        return sorted(name or identity for identity, name in self._names.items())

    def knows(self, model: str) -> bool:
        """Whether a worker has ever run the model of this name or identity."""
        with translated():
            pipe = self.redis.pipeline(transaction=False)
            pipe.hexists(keys.NAMES, model)
            pipe.hexists(keys.MODELS, model)
            return any(pipe.execute())

    def name_of(self, identity: str) -> str:
        """What people call a model."""
        if identity not in self._names:
            self.models()
        return self._names.get(identity) or identity
