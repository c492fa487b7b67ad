"""Watches the pool from outside: plain Redis commands and msgpack, no code shared with those who write.

Invariant: what is checked here is what the protocol promises to a reader, so a violation is a bug of the pool or of
this file, never of a client library in between.
Not promised by the pool: that what was read survives a broker that is killed while its disk stalls. With `appendfsync
everysec` a server answers for up to 2 s without having handed its file's last lines to the system, if the fsync before
is still running; SIGKILL then takes them. A log that has gone back so is read again from the start, must tell the same
tokens as before, and is counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgpack
import redis

OPEN = (None, b"queued", b"running")


class Violation(AssertionError):
    """A promise was broken; the text names the request, the promise and what was seen."""


@dataclass
class Story:
    """The log of one request, checked while it is read: numbers without holes, one end, nothing after it."""

    request: str
    kinds: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    text: str = ""
    starts: list[dict[str, Any]] = field(default_factory=list)
    moves: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Seconds from the last event before each move to the first delta after it."""
    end: dict[str, Any] | None = None
    entries: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Ids and payloads as they were read."""
    before: Story | None = None
    """What was read of the same request before its log went back."""
    last: tuple[int, int] = (0, 0)
    seen_at: float = 0.0
    first_at: float | None = None
    """When the first delta was seen."""
    _left_at: float | None = None

    def take(self, entry: bytes, payload: bytes, now: float | None = None) -> None:
        """One log entry, `<epoch>-<ev>` and its msgpack event."""
        now = time.monotonic() if now is None else now
        epoch, ev = map(int, entry.decode().split("-"))
        self._check(ev == self.last[1] + 1, f"event {ev} follows event {self.last[1]}")
        self._check(epoch >= self.last[0], f"epoch {epoch} follows epoch {self.last[0]}")
        self._check(self.end is None, f"event {ev} after the end")
        self.last = (epoch, ev)
        self.entries.append((entry, payload))
        event = msgpack.unpackb(payload)
        self.kinds.append(event["k"])
        if event["k"] == "start":
            self.starts.append(event)
        elif event["k"] == "delta":
            self.ids += event["t"]
            self.text += event["x"]
            self._check(event["n"] == len(self.ids), f"n is {event['n']} after {len(self.ids)} tokens")
            self.first_at = self.first_at or now
            if self._left_at is not None:
                self.gaps.append(now - self._left_at)
                self._left_at = None
        elif event["k"] == "moved":
            self.moves.append(event["why"])
            self._left_at = self._left_at or self.seen_at or now
        else:
            self.end = event
            self._check(event["n"] == len(self.ids), f"the end counts {event['n']} tokens of {len(self.ids)}")
            self._agree()
        self.seen_at = now

    def went_back(self, client: Any) -> bool:
        """Whether the log does not hold any more what was read from it."""
        held = {entry: fields[b"d"] for entry, fields in client.xrange(f"prism:r:{self.request}:log")}
        return any(held.get(entry) != payload for entry, payload in self.entries)

    def again(self) -> Story:
        """A story of the same request from its beginning, to be held against this one."""
        return Story(self.request, before=self)

    @property
    def readings(self) -> int:
        """How often the log was read from its beginning."""
        return 1 if self.before is None else 1 + self.before.readings

    def _agree(self) -> None:
        """What was read before the log went back must be the beginning of what it tells now."""
        if self.before is not None:
            seen = self.before
            self._check(self.ids[: len(seen.ids)] == seen.ids, "the tokens changed when the log was written again")
            self._check(self.text.startswith(seen.text), "the text changed when the log was written again")

    @property
    def state(self) -> str | None:
        return self.end["state"] if self.end else None

    @property
    def reused(self) -> int:
        """Tokens that the last attempt took from a saved prefix."""
        return int(self.starts[-1]["reused_tokens"])

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            raise Violation(f"request {self.request}: {what}")


def follow(
    client: Any,
    request: str,
    until: Callable[[Story], bool] | None = None,
    timeout_s: float = 60.0,
    pause_s: float = 0.0,
    gone: Callable[[], None] | None = None,
) -> Story:
    """Reads a log from its beginning to its end event, or until `until` is true; outlasts a broker that is away.

    `pause_s` makes it a slow reader; `gone` is called in a silence if the broker knows no such request. A log that went
    back is read again; see the module and `Story.readings`.
    """
    story = Story(request)
    key, last = f"prism:r:{request}:log", b"0-0"
    deadline = time.monotonic() + timeout_s
    while story.end is None and not (until and until(story)):
        if time.monotonic() > deadline:
            raise Violation(
                f"request {request}: no end within {timeout_s:g} s; {len(story.ids)} tokens, last {story.kinds[-5:]}"
            )
        try:
            reply = client.xread({key: last}, block=200, count=64)
            state = None if reply else client.hget(f"prism:r:{request}", "state")
            if not reply and state is None and gone:
                gone()
            elif state not in OPEN and story.went_back(client):
                story, last = story.again(), b"0-0"
        except (redis.ConnectionError, redis.TimeoutError, redis.exceptions.BusyLoadingError):
            time.sleep(0.02)
            continue
        for _, entries in reply or []:
            for entry, fields in entries:
                try:
                    story.take(entry, fields[b"d"])
                except Violation:
                    if not story.went_back(client):
                        raise
                    story, last = story.again(), b"0-0"
                    break
                last = entry
        if pause_s:
            time.sleep(pause_s)
    return story


class Ear:
    """Hears every live event of the pool, to be compared with the logs afterwards."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._stop = threading.Event()
        self.heard: dict[str, dict[bytes, bytes]] = {}
        self._thread = threading.Thread(target=self._run, name="ear", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)

    def check(self, request: str, entries: dict[bytes, bytes]) -> int:
        """Nothing was published that the log does not hold under the same id; returns how many events were heard."""
        heard = self.heard.get(request, {})
        for entry, payload in heard.items():
            if entries.get(entry) != payload:
                raise Violation(f"request {request}: live event {entry.decode()} is not what the log holds")
        return len(heard)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with self._client.pubsub(ignore_subscribe_messages=True) as pubsub:
                    pubsub.psubscribe("prism:r:*")
                    while not self._stop.is_set():
                        message = pubsub.get_message(timeout=0.2)
                        if message is not None:
                            entry, _, payload = message["data"].partition(b" ")
                            request = message["channel"].decode().removeprefix("prism:r:")
                            self.heard.setdefault(request, {})[entry] = payload
            except redis.RedisError:
                self._stop.wait(0.02)
