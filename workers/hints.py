"""Listens on the worker's hint channels, so that a cancellation or a command is looked at at once.

Invariant: nothing depends on a hint. Whatever a hint says is read again from its key by those who act on it; a hint
that is lost, late or forged costs at most one needless poll. (RQ's own commands are the exception: they have no key.)
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

import redis

log = logging.getLogger(__name__)

RETRY_S = 1.0


class Hints:
    """A thread with one pub/sub connection; `handlers` maps a channel to what is called with each message."""

    def __init__(self, client: redis.Redis, handlers: Mapping[str, Callable[[bytes], None]]) -> None:
        self._client, self._handlers = client, {name.encode(): handler for name, handler in handlers.items()}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hints", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with self._client.pubsub(ignore_subscribe_messages=True) as pubsub:  # type: ignore[no-untyped-call]
                    pubsub.subscribe(*self._handlers)
                    self._listen(pubsub)
            except redis.RedisError:
                self._stop.wait(RETRY_S)
            except Exception as error:
                log.error("hint failed", extra={"error": type(error).__name__})
                self._stop.wait(RETRY_S)

    def _listen(self, pubsub: redis.client.PubSub) -> None:
        while not self._stop.is_set():
            message = pubsub.get_message(timeout=0.5)
            if message is None:
                continue
            handler = self._handlers.get(message["channel"])
            if handler is not None and isinstance(message["data"], bytes):
                handler(message["data"])
