"""What a program uses to talk to the pool: submit, stream, wait, cancel.

    with Client() as client:
        request = client.submit(messages=[{"role": "user", "content": "Hello"}], conversation="c1")
        for event in request.events():
            print(event.text, end="")

Kept: every call may be repeated blindly; a submission has its id before its first try, so a lost reply never makes a
second generation. All requests carry this client's owner: another owner's are "not found".
Not promised: that a delta stands. Until `end` says "done" the text is provisional.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker import admin, calls, keys, transcript
from broker.calls import Cancelled, Record
from broker.config import PoolConfig
from broker.connect import Connection, connect
from broker.events import Event
from broker.failures import translated
from broker.hub import Hub
from broker.lua import Scripts
from broker.reader import Reader
from broker.spec import RequestSpec

__all__ = ["Client", "Request", "Result", "spec_of"]


@dataclass(frozen=True)
class Result:
    """How a request ended."""

    request: str
    state: str
    """done, failed, cancelled or expired."""
    reason: str
    """`stop` or `length` if done, else why not, in one line."""
    text: str
    """The whole answer; of a request that is not done, whatever its worker left, to be disowned."""
    token_ids: list[int]
    usage: dict[str, int]
    """prompt_tokens, completion_tokens, reused_tokens, as far as known."""

    @classmethod
    def of(cls, record: Record) -> Result:
        return cls(record.request, record.state, record.reason, record.text, record.token_ids, record.usage)


@dataclass(frozen=True)
class Request:
    """A request of this client's owner; any number of them may stand for the same one."""

    client: Client
    id: str
    outcome: str = ""
    """After submit: `placed`, `boxed` (behind another turn of its conversation) or `dup` (an earlier call made it)."""

    @property
    def replayed(self) -> bool:
        """This submission was a repetition: the same id, one generation."""
        return self.outcome == "dup"

    def events(self, after: str | int | None = None, timeout: float | None = None) -> Iterator[Event]:
        """Events from the begin, or after an event id or sequence number, up to the end.

        Errors: `InvalidCursor`, `StreamLost`, `ResultTimeout` if `timeout` seconds pass first, `NotFound`.
        """
        return self.client.reader.events(self.id, after, timeout)

    def record(self) -> Record:
        """All that the pool knows of it now."""
        return self.client.record(self.id)

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end. `ResultTimeout` after `timeout` seconds; the request goes on."""
        return Result.of(self.client.reader.at_end(self.id, self.record, timeout))

    def cancel(self, reason: str = "") -> Cancelled:
        """`cancelled`: it waited and has ended. `cancelling`: its worker stops at the next step. `ended`: too late."""
        return self.client.cancel(self.id, reason)


class Client:
    """A synchronous client. Safe to share between threads; not across fork."""

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        config: PoolConfig | None = None,
        home: Path | None = None,
    ) -> None:
        """`url`: see `broker.connect`; None is PRISM_REDIS_URL or the embedded broker. `api_key` names the owner."""
        connection = connect(url, home=home)
        self._bind(connection, Hub(connection.redis), config or PoolConfig(), keys.owner_of(api_key))

    def _bind(self, connection: Connection, hub: Hub, config: PoolConfig, owner: str) -> None:
        self.config = config
        self.owner = owner
        self.connection = connection
        self.redis = connection.redis
        self._run = Scripts(self.redis, config).run
        self._hub = hub
        self._shares = False
        self.reader = Reader(self.redis, hub, config, owner)

    def for_key(self, api_key: str | None) -> Client:
        """A client of another owner over the same connections; closing it closes nothing."""
        other = object.__new__(Client)
        other._bind(self.connection, self._hub, self.config, keys.owner_of(api_key))
        other._shares = True
        return other

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections of this client."""
        if self._shares:
            return
        self._hub.close()
        self.connection.close()

    def submit(
        self,
        spec: RequestSpec | None = None,
        *,
        conversation: str | None = None,
        model: str = "",
        priority: str = "interactive",
        deadline: float | None = None,
        idempotency_key: str | None = None,
        request_id: str | None = None,
        group: str = "",
        **options: Any,
    ) -> Request:
        """Queue a generation: `spec`, or its fields by name (prompt | messages | token_ids, max_tokens, seed, ...).

        conversation: turns of one name run in order, on one worker while it lives. deadline: seconds from now, queueing
        included. idempotency_key: the same key and content give the same request. model: a name that some worker of the
        pool has had, or an identity (its `+` tells it from a name), which may wait for its first worker until the
        deadline; empty for whatever the pool runs. Errors: `InvalidRequest`, `Conflict`, `QueueFull`, `NotFound`
        (model), and `BrokerUnavailable`: it may have been accepted all the same, so call again with the same
        `request_id` or `idempotency_key`.
        """
        item = calls.Submission(
            request=request_id or keys.new_ulid(),
            owner=self.owner,
            conversation=conversation,
            model=model,
            priority=priority,
            deadline_s=deadline,
            idempotency_key=idempotency_key,
            group=group,
        )
        done = self._call(calls.submit(item, spec_of(spec, options), self.config))
        return Request(self, done.request, done.outcome)

    def request(self, request_id: str) -> Request:
        """A handle for an existing request; `NotFound`."""
        keys.check_id(request_id, "request id")
        self.reader.head(request_id)
        return Request(self, request_id)

    def record(self, request_id: str) -> Record:
        """What the pool knows of a request; `NotFound`."""
        with translated():
            values: list[Any] = self.redis.hmget(keys.request(request_id), list(calls.RECORD_FIELDS))
        return calls.read_record(request_id, self.owner, values)

    def cancel(self, request_id: str, reason: str = "") -> Cancelled:
        """See `Request.cancel`; `NotFound`."""
        return self._call(calls.cancel(request_id, self.owner, reason))

    def transcript(self, conversation: str) -> list[transcript.TurnRecord]:
        """Committed turns of a conversation, oldest first; empty if there are none."""
        ckey = keys.conversation_key(self.owner, conversation)
        with translated():
            entries: list[Any] = self.redis.lrange(keys.conversation_part(ckey, "hist"), 0, -1)
        return [transcript.TurnRecord.unpack(entry) for entry in entries]

    def workers(self) -> list[admin.WorkerInfo]:
        """The pool's workers, by name."""
        return admin.Admin(self.redis, self.config).workers()

    def _call(self, call: calls.Call[calls.T]) -> calls.T:
        return call.parse(self._run(call.script, call.keys, call.arguments))


def spec_of(spec: RequestSpec | None, options: dict[str, Any]) -> RequestSpec:
    """The spec of a submission that was given whole or by its fields."""
    if spec is None:
        return RequestSpec.of(options)
    if options:
        raise TypeError(f"give either a spec or its fields by name, not both: {', '.join(sorted(options))}")
    return spec
