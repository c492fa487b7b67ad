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
import threading
import time
from typing import Any

import redis
from redis.exceptions import RedisError

from broker.errors import ClientClosed

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
    """The process's subscriber. Its thread starts with the first subscription and ends with `close`."""

    def __init__(self, client: redis.Redis) -> None:
        self._pool = client.connection_pool
        self._lock = threading.Lock()
        self._channels: dict[str, list[Subscription]] = {}
        self._acks: dict[str, threading.Event] = {}
        self._connection: Any = None
        self._thread: threading.Thread | None = None
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
            if self._thread is None:
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
            self._closed = True
            for waiting in self._channels.values():
                for subscription in waiting:
                    subscription.end()
            self._send("PING")
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(5.0)

    def _send(self, *command: str) -> None:
        """Under the lock. A failure is the reading thread's to notice: it connects and subscribes again."""
        if self._connection is not None:
            with contextlib.suppress(RedisError, OSError):
                self._connection.send_command(*command, check_health=False)

    def _run(self) -> None:
        failures = 0
        while not self._closed:
            try:
                self._connect()
                failures = 0
                self._listen()
            except (RedisError, OSError) as error:
                _log.debug("pub/sub connection lost: %s", error)
            finally:
                self._disconnect()
            if not self._closed:
                time.sleep(BACK_OFF_S[min(failures, len(BACK_OFF_S) - 1)])
                failures += 1

    def _connect(self) -> None:
        connection: Any = self._pool.make_connection()
        connection.connect()
        with self._lock:
            self._connection = connection
            for channel, waiting in self._channels.items():
                self._send("SUBSCRIBE", channel)
                if self._acks[channel].is_set():
                    for subscription in waiting:
                        subscription.miss()

    def _disconnect(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()

    def _listen(self) -> None:
        connection = self._connection
        heard = time.monotonic()
        asked = False
        while not self._closed:
            if not connection.can_read(timeout=1.0):
                quiet = time.monotonic() - heard
                if asked and quiet > 2 * PING_S:
                    raise TimeoutError("the pub/sub connection is silent")
                if quiet > PING_S and not asked:
                    with self._lock:
                        self._send("PING")
                    asked = True
                continue
            self._dispatch(connection.read_response(disable_decoding=True, push_request=True))
            heard, asked = time.monotonic(), False

    def _dispatch(self, reply: Any) -> None:
        kind, channel = reply[0], reply[1]
        if kind == b"message":
            for subscription in self._waiting(channel.decode()):
                subscription.deliver(reply[2])
        elif kind == b"subscribe":
            ack = self._acks.get(channel.decode())
            if ack is not None:
                ack.set()

    def _waiting(self, channel: str) -> list[Subscription]:
        with self._lock:
            return list(self._channels.get(channel, ()))
