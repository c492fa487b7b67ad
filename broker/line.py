"""The appends of a running turn on a connection that is held for them: what a decoder's neighbour must do per step.

redis-py takes a connection from its pool, wraps the call for tries and statistics, and parses the reply in Python: with
the caches full of weights that is five times the processor time of everything else in an append. So the first append
of a turn goes that way, and what follows goes over the same kind of connection, which redis-py has opened, secured and
logged in, but written and read here.
Kept: a line knows whole replies of the script and nothing else. Whatever goes wrong (no answer in the socket's time, a
closed connection, an error, half a reply, an interrupt) cuts it, so a late answer has nobody to mislead, and the caller
calls again in the ordinary way, with all its tries: a blind resend, which every script survives.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from redis import ConnectionPool
from redis.exceptions import RedisError

from broker import keys
from broker.wire import Replies, words

__all__ = ["Line"]

STORED = b"*4\r\n:0\r\n:%d\r\n$0\r\n\r\n:0\r\n"
"""The usual reply: all is stored, nobody wants the turn to stop. Known beforehand, so that it need not be parsed."""


class Line:
    """Appends of one turn under one epoch. For one thread at a time."""

    @classmethod
    def open(cls, pool: ConnectionPool, sha: str, request: str, worker: str, epoch: int) -> Line | None:
        """A line on a connection of `pool`, best one that has just been used; None if there is none to be had."""
        try:
            return cls(pool, sha, request, worker, epoch)
        except (RedisError, OSError):
            return None

    def __init__(self, pool: ConnectionPool, sha: str, request: str, worker: str, epoch: int) -> None:
        self._use = (request, epoch, os.getpid())
        self._pool = pool
        self._connection: Any = pool.get_connection()
        self._socket: Any = self._connection._sock
        fixed = ("EVALSHA", sha, "1", keys.request(request), request, worker, str(epoch))
        self._head, self._fixed = words(*map(str.encode, fixed)), len(fixed)

    def serves(self, request: str, epoch: int) -> bool:
        """Whether it is this turn's, under this epoch, and of this process: a forked child has its parent's socket."""
        return self._use == (request, epoch, os.getpid())

    def append(self, ev: int, payloads: Sequence[bytes], n: int) -> Any:
        """The script's raw reply; None: it is not known whether it ran, and the line is cut."""
        last = ev + len(payloads) - 1
        answer = None
        try:
            body = words(b"%d" % ev, b"%d" % n, *payloads)
            self._socket.sendall(b"*%d\r\n%b%b" % (self._fixed + 2 + len(payloads), self._head, body))
            data = self._socket.recv(4096)
            answer = [0, last, b"", 0] if data == STORED % last else _sole(data)
        except OSError:
            pass
        finally:
            if answer is None:
                self._connection.disconnect()
                self.close()
        return answer

    def close(self) -> None:
        """Give the connection back."""
        self._pool.release(self._connection)


def _sole(data: bytes) -> list[Any] | None:
    """The one reply of a script that `data` is, neither less nor more."""
    replies = Replies()
    found = replies.feed(data)
    return found[0] if len(found) == 1 and isinstance(found[0], list) and not replies.begun else None
