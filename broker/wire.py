"""The protocol of a connection's bytes (RESP2), for those who write and read a socket that redis-py has opened.

redis-py connects again behind one's back when a call meets a closed socket, and the new connection is subscribed to
nothing. So the hubs let it connect and log in, and then read and write the socket themselves; so does a turn's line,
because of what redis-py does around each call. Replies are parsed as their bytes arrive.
"""

from __future__ import annotations

from typing import Any

from redis import ConnectionPool

__all__ = ["MAX_REPLY_BYTES", "Replies", "command", "uncounted", "words"]

MAX_REPLY_BYTES = 64 << 20


def uncounted(pool: ConnectionPool) -> Any:
    """A connection like those of the pool, but none of them: a pool counts what it makes, up to its limit."""
    return pool.connection_class(**pool.connection_kwargs)


def command(*each: str) -> bytes:
    """One command as bytes."""
    return b"*%d\r\n" % len(each) + words(*map(str.encode, each))


def words(*each: bytes) -> bytes:
    """Words of a command, without the count that it begins with."""
    return b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in each])


class Replies:
    """Takes bytes in any pieces, gives whole replies. `ConnectionError` for bytes that are none."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Replies completed by `data`: lists, bytes, int or None."""
        self._buffer += data
        if len(self._buffer) > MAX_REPLY_BYTES:
            raise ConnectionError(f"a reply of the broker is over {MAX_REPLY_BYTES} bytes")
        found, at = [], 0
        while (parsed := self._parse(at)) is not None:
            value, at = parsed
            found.append(value)
        del self._buffer[:at]
        return found

    @property
    def begun(self) -> bool:
        """Whether there are bytes of a reply that is not whole yet."""
        return bool(self._buffer)

    def _parse(self, at: int) -> tuple[Any, int] | None:
        """The value at `at` and where the next begins; None if it is not all here."""
        end = self._buffer.find(b"\r\n", at)
        if end < 0:
            return None
        kind, line = bytes(self._buffer[at : at + 1]), bytes(self._buffer[at + 1 : end])
        at = end + 2
        if kind in (b"+", b"-"):
            return line, at
        try:
            number = int(line)
        except ValueError:
            raise ConnectionError(f"the broker sent {(kind + line)[:40]!r}, which is no reply") from None
        if kind == b":":
            return number, at
        if number < 0:
            return None, at
        if kind == b"$":
            stop = at + number
            return (bytes(self._buffer[at:stop]), stop + 2) if len(self._buffer) >= stop + 2 else None
        if kind != b"*":
            raise ConnectionError(f"the broker sent {(kind + line)[:40]!r}, which is no reply")
        items = []
        for _ in range(number):
            parsed = self._parse(at)
            if parsed is None:
                return None
            item, at = parsed
            items.append(item)
        return items, at
