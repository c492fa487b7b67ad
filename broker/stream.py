"""The reader's rules without any input or output: what to emit, what to drop, when the log must be read.

Kept: events come out in order, each once, without holes, however the log and the live channel interleave, repeat or
lose. The log is the truth, the channel only the bell: a live event is emitted only if it is the very next one, by its
number and by the tokens that it counts. A broker that was killed while its disk stalled may come back without the last
moments of its file, events that were read included; what is then written again has other events under old numbers. A
reader that cannot go on exactly says so (`StreamLost`): reading anew from the start gives the whole text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from broker import keys
from broker.errors import InvalidCursor, NotFound, StreamLost
from broker.events import BEGIN, TERMINAL, Cursor, Event, parse_cursor

__all__ = ["HEAD_FIELDS", "Head", "Stream"]

HEAD_FIELDS = ("owner", "state", "epoch", "ev")

Entries = Sequence[tuple[bytes, dict[bytes, bytes]]]


@dataclass(frozen=True)
class Head:
    """Where a request stands, from HMGET `HEAD_FIELDS` and the boot id; None if the record is gone."""

    state: str
    last: Cursor
    boot: str

    @classmethod
    def read(cls, request: str, owner: str, values: Sequence[bytes | None], boot: bytes | None) -> Head:
        """`NotFound` if the request is unknown or another owner's ('' may see all)."""
        its_owner, state, epoch, ev = values
        if its_owner is None or (owner and its_owner.decode() != owner):
            raise NotFound(f"no request {request}")
        return cls((state or b"").decode(), Cursor(int(epoch or 0), int(ev or 0)), (boot or b"").decode())


class Stream:
    """Position of one reader in one request's stream."""

    def __init__(self, request: str, head: Head, after: str | int | None) -> None:
        """`after`: None for all, an event id, or a sequence number. `InvalidCursor` if it lies beyond the last
        event."""
        self.request = request
        self.channel = keys.request(request)
        self.log_key = keys.log(request)
        self.ended = False
        self._boot = head.boot
        self._last = BEGIN
        self._seen = False
        """Whether the last event was read, rather than named by the cursor. It was not the end then."""
        self._n: int | None = 0
        """Tokens up to the last event; None where the cursor did not tell."""
        self._emit_after = 0
        """Events up to this sequence number are passed over: the cursor was a number, whose epoch is not known."""
        self.must_exist: str | None = None
        """An entry id that the log must hold for the cursor to be good."""
        if isinstance(after, bool) or (isinstance(after, int) and not 0 <= after <= head.last.ev):
            raise InvalidCursor(f"request {request} has {head.last.ev} events so far; cannot read after number {after}")
        if isinstance(after, int):
            self._emit_after = after
        elif after is not None:
            cursor = parse_cursor(after)
            if cursor.ev > head.last.ev or (cursor.ev == 0 and cursor != BEGIN):
                raise InvalidCursor(f"request {request} has no event {cursor}")
            if cursor != BEGIN:
                self.must_exist = str(cursor)
                self._last, self._n = cursor, None
        self._end_if_complete(head, max(self._last.ev, self._emit_after))

    def admit(self, found: bool, head: Head) -> None:
        """Answer to `must_exist`: refuse a cursor of another life of the stream."""
        if not found:
            if head.boot != self._boot:
                raise self._data_lost()
            if head.state in TERMINAL and head.last.ev:
                raise StreamLost(self._expired() + f" (or it never had event {self.must_exist})")
            raise InvalidCursor(f"request {self.request} has no event {self.must_exist}")
        self.must_exist = None

    @property
    def last(self) -> Cursor:
        """The last event that was seen; its id is good as `after` of a later read."""
        return self._last

    @property
    def log_after(self) -> str:
        """Exclusive lower bound for XRANGE."""
        return f"({self._last}" if self._last != BEGIN else "-"

    def from_log(self, entries: Entries) -> Iterator[Event]:
        """The events of one page of the log that come next."""
        for entry, fields in entries:
            cursor = parse_cursor(entry.decode())
            if cursor <= self._last:
                continue
            if cursor.ev <= self._last.ev:
                raise self._went_back()
            if cursor.ev != self._last.ev + 1:
                raise StreamLost(f"the log of request {self.request} has a hole between {self._last} and {cursor}")
            yield from self._next(cursor, fields[b"d"])

    def from_channel(self, messages: Iterable[bytes]) -> Iterator[Event | None]:
        """The events of live messages that come next; None once where the log must be read instead."""
        for message in messages:
            name, _, payload = message.partition(b" ")
            cursor = parse_cursor(name.decode(errors="replace"))
            if cursor.ev <= self._last.ev and cursor.epoch <= self._last.epoch:
                continue
            if cursor.ev != self._last.ev + 1:
                yield None
                return
            yield from self._next(cursor, payload)

    def _next(self, cursor: Cursor, payload: bytes) -> Iterator[Event]:
        event = Event.unpack(cursor, payload)
        n = event.data.get("n")
        if n is not None:
            if self._n is not None and n != self._n + len(event.token_ids):
                raise self._went_back()
            self._n = n
        self._last, self._seen = cursor, True
        self.ended = event.kind == "end"
        if cursor.ev > self._emit_after:
            yield event

    def has_ended(self, head: Head) -> bool:
        """For who reads nothing: whether the request has; `StreamLost` if nobody can tell any more."""
        if head.state in TERMINAL:
            return True
        if head.boot != self._boot:
            raise self._data_lost()
        return False

    def check_alive(self, head: Head) -> None:
        """After silence and an empty log: `StreamLost` if nothing can come any more."""
        if head.boot != self._boot:
            raise self._data_lost()
        if head.state in TERMINAL and (head.last < self._last or head.last.ev < self._last.ev + self._seen):
            raise self._went_back()
        if head.state in TERMINAL and head.last.ev > self._last.ev:
            raise StreamLost(self._expired())
        self._end_if_complete(head, self._last.ev)

    def _end_if_complete(self, head: Head, seen: int) -> None:
        """A reader that begins behind the last event of an ended request has nothing to wait for."""
        self.ended = self.ended or (head.state in TERMINAL and seen == head.last.ev > 0)

    def gone(self, boot: bytes | None) -> StreamLost:
        """The error for a request whose record does not exist any more."""
        if (boot or b"").decode() != self._boot:
            return self._data_lost()
        ends = f"; its stream ends after {self._last}" if self._last != BEGIN else ""
        return StreamLost(f"request {self.request} does not exist any more{ends}")

    def _went_back(self) -> StreamLost:
        return StreamLost(
            f"the broker lost events of request {self.request} that were read up to {self._last} (it was killed while "
            "its disk stalled): read it again from the start"
        )

    def _data_lost(self) -> StreamLost:
        after = f" after {self._last}" if self._last != BEGIN else ""
        return StreamLost(f"the broker lost its data; request {self.request} cannot be read{after}")

    def _expired(self) -> str:
        return f"the log of request {self.request} has expired; its result is kept longer"
