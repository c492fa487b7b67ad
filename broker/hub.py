"""One pub/sub connection for a whole process, shared by all its readers.

Kept: a reader whose queue is full never holds up the connection, let alone a producer: its queue is emptied and it is
told to read the log. Whenever messages may have been missed (overflow, lost connection) the subscription says so, once.
Not promised: that a message arrives. Readers look at the log after a silence anyway.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from typing import Any

import redis
from redis.exceptions import RedisError

from broker.errors import ClientClosed
from broker.wire import Replies, command, uncounted

__all__ = ["Hub", "Subscription"]

ACK_S = 2.0
PING_S = 10.0
BACK_OFF_S = (0.02, 0.1, 0.3, 1.0)

_log = logging.getLogger("prism.broker")


class Subscription:
    """Live messages of one channel for one reader; at most `limit` wait here."""

    def __init__(self, hub: Hub, channel: str, limit: int) -> None:
        self.channel = channel
        self._hub = hub
        self._limit = limit
        self._ready = threading.Condition()
        self._messages: collections.deque[bytes] = collections.deque()
        self._missed = False
        self._ended = False

    def get(self, timeout_s: float) -> list[bytes] | None:
        """All messages that wait, after at most `timeout_s`; empty: silence; None: some were missed, read the log.

        `ClientClosed` once the hub is closed.
        """
        with self._ready:
            if not self._messages and not self._missed and not self._ended:
                self._ready.wait(timeout_s)
            if self._ended:
                raise ClientClosed("the client was closed while it was reading")
            found = None if self._missed else list(self._messages)
            self._missed = False
            self._messages.clear()
            return found

    def close(self) -> None:
        self._hub.drop(self)

    def deliver(self, message: bytes) -> None:
        with self._ready:
            if len(self._messages) >= self._limit:
                self._messages.clear()
                self._missed = True
            elif not self._missed:
                self._messages.append(message)
            self._ready.notify()

    def end(self) -> None:
        """The client is being closed: the reader is woken and told."""
        with self._ready:
            self._ended = True
            self._ready.notify()

    def miss(self) -> None:
        """Something may not have arrived."""
        with self._ready:
            self._messages.clear()
            self._missed = True
            self._ready.notify()


class Hub:
    """The process's subscriber. Its thread starts with the first subscription and ends with `close`.

    Only that thread touches the socket (a TLS one bears no two at once); the others leave commands and wake it.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._pool = client.connection_pool
        self._lock = threading.Lock()
        self._channels: dict[str, list[Subscription]] = {}
        self._acks: dict[str, threading.Event] = {}
        self._commands: collections.deque[tuple[str, ...]] = collections.deque()
        self._thread: threading.Thread | None = None
        self._wake_up, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._closed = False
        self._pid = os.getpid()

    def subscribe(self, channel: str, limit: int) -> Subscription:
        """A subscription that the server has acknowledged; without an acknowledgement in time it begins as `missed`."""
        if self._pid != os.getpid():
            raise ClientClosed("a client cannot be used after fork: make a new one in the child")
        subscription = Subscription(self, channel, limit)
        with self._lock:
            if self._closed:
                raise ClientClosed("the client is closed")
            self._channels.setdefault(channel, []).append(subscription)
            ack = self._acks.get(channel)
            if ack is None:
                ack = self._acks[channel] = threading.Event()
                self._send("SUBSCRIBE", channel)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="prism-hub", daemon=True)
                self._thread.start()
        if not ack.wait(ACK_S):
            subscription.miss()
        return subscription

    def drop(self, subscription: Subscription) -> None:
        """Forget a subscription; the channel goes with its last one."""
        with self._lock:
            waiting = self._channels.get(subscription.channel, [])
            if subscription in waiting:
                waiting.remove(subscription)
                if not waiting:
                    del self._channels[subscription.channel]
                    self._acks.pop(subscription.channel, None)
                    self._send("UNSUBSCRIBE", subscription.channel)

    def close(self) -> None:
        """Close the connection and end the thread; waiting readers get `ClientClosed`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for waiting in self._channels.values():
                for subscription in waiting:
                    subscription.end()
            self._wake()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(5.0)
        self._wake_up.close()
        self._woken.close()

    def _send(self, *words: str) -> None:
        """Under the lock: leave a command for the thread."""
        if not self._closed:
            self._commands.append(words)
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_up.send(b"x", socket.MSG_DONTWAIT)

    def _run(self) -> None:
        failures = 0
        connection = uncounted(self._pool)
        while not self._closed:
            try:
                connection.connect()
                failures = 0
                self._listen(connection._sock)
            except (RedisError, OSError) as error:
                _log.debug("pub/sub connection lost: %s", error)
            finally:
                connection.disconnect()
            if not self._closed:
                time.sleep(BACK_OFF_S[min(failures, len(BACK_OFF_S) - 1)])
                failures += 1

    def _greet(self) -> bytes:
        """Subscribe to everything that is wanted now; commands left for an earlier connection are void."""
        with self._lock:
            self._commands.clear()
            for channel, waiting in self._channels.items():
                if self._acks[channel].is_set():
                    for subscription in waiting:
                        subscription.miss()
            channels = list(self._channels)
        return command("SUBSCRIBE", *channels) if channels else b""

    def _listen(self, stream: Any) -> None:
        """Until the hub is closed (returns) or the connection is lost (raises)."""
        stream.settimeout(ACK_S)
        stream.sendall(self._greet())
        replies = Replies()
        heard = time.monotonic()
        asked = False
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._closed:
                ready = {key.fileobj for key, _ in selector.select(1.0)}
                if self._woken in ready:
                    stream.sendall(self._left_commands())
                if stream in ready:
                    for reply in self._receive(stream, replies):
                        self._dispatch(reply)
                    heard, asked = time.monotonic(), False
                elif time.monotonic() - heard > PING_S * (2 if asked else 1):
                    if asked:
                        raise TimeoutError("the pub/sub connection is silent")
                    stream.sendall(command("PING"))
                    asked = True

    @staticmethod
    def _receive(stream: Any, replies: Replies) -> list[Any]:
        found: list[Any] = []
        while True:
            data = stream.recv(65_536)
            if not data:
                raise ConnectionError("the broker closed the pub/sub connection")
            found += replies.feed(data)
            # TLS may hold decrypted bytes that the selector does not see.
            if not getattr(stream, "pending", lambda: 0)():
                return found

    def _left_commands(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        with self._lock:
            words, self._commands = self._commands, collections.deque()
        return b"".join(command(*each) for each in words)

    def _dispatch(self, reply: Any) -> None:
        kind = reply[0] if isinstance(reply, list) and reply else None
        if kind == b"message":
            channel = reply[1].decode()
            with self._lock:
                waiting = list(self._channels.get(channel, ()))
            for subscription in waiting:
                subscription.deliver(reply[2])
        elif kind == b"subscribe":
            ack = self._acks.get(reply[1].decode())
            if ack is not None:
                ack.set()
