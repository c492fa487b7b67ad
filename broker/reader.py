"""Reads one request's events: replay from the log, then live, with every gap repaired from the log.

    subscribe and wait for the acknowledgement -> log after the cursor -> live; a hole, an overflow or a silence -> log

Kept: each event once, in order, without holes, up to its `end`, over lost messages, lost connections and an outage of
the broker of up to `reader_outage_s`. A slow consumer costs nobody anything: it reads the log at its own pace.
Errors: `NotFound`, `InvalidCursor`, `StreamLost`, `ResultTimeout`, `BrokerUnavailable` (the outage was longer).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import redis

from broker import keys
from broker.calls import Record
from broker.config import PoolConfig
from broker.errors import BrokerUnavailable, NotFound, ResultTimeout
from broker.events import TERMINAL, Event
from broker.failures import translated
from broker.hub import Hub
from broker.stream import HEAD_FIELDS, Head, Stream

__all__ = ["Reader"]

RETRY_S = 0.1
T = TypeVar("T")


class Reader:
    """Streams of one owner's requests, over one client and the process's hub."""

    def __init__(self, client: redis.Redis, hub: Hub, config: PoolConfig, owner: str) -> None:
        self._redis = client
        self._hub = hub
        self._config = config
        self._owner = owner
        self.replays = 0
        """How often a live stream had to be repaired from the log."""

    def events(self, request: str, after: str | int | None = None, timeout_s: float | None = None) -> Iterator[Event]:
        """Events after `after` (see `Stream`) until the end, or `ResultTimeout` after `timeout_s` in all."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        subscription = self._hub.subscribe(keys.request(request), self._config.reader_queue)
        try:
            stream = self._open(request, after, deadline)
            messages: list[bytes] | None = []
            while not stream.ended:
                if messages is None:
                    self.replays += 1
                if messages:
                    yield from self._from_channel(stream, messages, deadline)
                else:
                    yield from self._from_log(stream, deadline)
                if not stream.ended:
                    messages = subscription.get(self._silence(request, deadline))
        finally:
            subscription.close()

    def at_end(self, request: str, ask: Callable[[], Record], timeout_s: float | None = None) -> Record:
        """The record of an ended request, which `ask()` reads, once it has ended. No token is sent or read for that.

        Errors as of `events`. The broker may be lost at any point of this, and come back without its last moments.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        head = self._patiently(lambda: self.head(request), request, deadline)
        stream = Stream(request, head, None)
        while True:
            if not stream.has_ended(head):
                self._wait(stream, deadline)
            with contextlib.suppress(NotFound):
                record = self._patiently(ask, request, deadline)
                if record.state in TERMINAL:
                    return record
            values, boot = self._patiently(lambda: self._standing(request), request, deadline)
            head = self._known(stream, values, boot)

    def _wait(self, stream: Stream, deadline: float | None) -> None:
        request = stream.request
        subscription = self._hub.subscribe(keys.end(request), 1)
        try:
            while True:
                values, boot = self._patiently(lambda: self._standing(request), request, deadline)
                if stream.has_ended(self._known(stream, values, boot)):
                    return
                subscription.get(self._silence(request, deadline))
        finally:
            subscription.close()

    def head(self, request: str) -> Head:
        """Where a request stands; `NotFound`."""
        return Head.read(request, self._owner, *self._standing(request))

    def _standing(self, request: str) -> tuple[Any, Any]:
        with translated(), self._redis.pipeline(transaction=False) as pipe:
            pipe.hmget(keys.request(request), list(HEAD_FIELDS))
            pipe.get(keys.BOOT)
            values, boot = pipe.execute()
        return values, boot

    def _open(self, request: str, after: str | int | None, deadline: float | None) -> Stream:
        head = self._patiently(lambda: self.head(request), request, deadline)
        stream = Stream(request, head, after)
        if stream.must_exist is not None:
            at = stream.must_exist
            values, boot, entries = self._patiently(lambda: self._page(stream, at, at), request, deadline)
            stream.admit(bool(entries), self._known(stream, values, boot))
        return stream

    def _from_channel(self, stream: Stream, messages: list[bytes], deadline: float | None) -> Iterator[Event]:
        for event in stream.from_channel(messages):
            if event is None:
                self.replays += 1
                yield from self._from_log(stream, deadline)
            else:
                yield event

    def _from_log(self, stream: Stream, deadline: float | None) -> Iterator[Event]:
        """What the log holds after the stream's position; checks that the stream still lives if that is nothing."""
        first = True
        while not stream.ended:
            values, boot, entries = self._patiently(
                lambda: self._page(stream, stream.log_after), stream.request, deadline
            )
            yield from stream.from_log(entries)
            if len(entries) < self._config.read_page:
                if first and not entries:
                    stream.check_alive(self._known(stream, values, boot))
                return
            first = False

    def _page(self, stream: Stream, first: str, last: str = "+") -> tuple[Any, Any, Any]:
        """Where the request stands and the log's entries `first..last`, all of one moment or nearly."""
        with translated(), self._redis.pipeline(transaction=False) as pipe:
            pipe.hmget(stream.channel, list(HEAD_FIELDS))
            pipe.get(keys.BOOT)
            pipe.xrange(stream.log_key, first, last, count=self._config.read_page)
            values, boot, entries = pipe.execute()
        return values, boot, entries

    def _known(self, stream: Stream, values: Any, boot: Any) -> Head:
        """Where a request stands that was there before."""
        try:
            return Head.read(stream.request, self._owner, values, boot)
        except NotFound:
            raise stream.gone(boot) from None

    def _patiently(self, ask: Callable[[], T], request: str, deadline: float | None) -> T:
        """`ask()`, again and again through an outage of the broker."""
        until = time.monotonic() + self._config.reader_outage_s
        while True:
            try:
                return ask()
            except BrokerUnavailable:
                if time.monotonic() >= until:
                    raise
                time.sleep(min(RETRY_S, self._silence(request, deadline)))

    def _silence(self, request: str, deadline: float | None) -> float:
        silence = self._config.silence_ms / 1000
        if deadline is None:
            return silence
        left = deadline - time.monotonic()
        if left <= 0:
            raise ResultTimeout(f"request {request}: the time to wait for it is over; nothing is done to it")
        return min(silence, left)
