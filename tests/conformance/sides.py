"""The sync and the asyncio client as one test body sees either, and readers in threads of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

from broker import Client
from broker.async_client import AsyncClient
from broker.config import PoolConfig
from broker.events import Event

QUICK = PoolConfig(silence_ms=50, reader_outage_s=10.0)


class SyncSide:
    """The sync client, as the tests see either."""

    def __init__(self, url: str, config: PoolConfig) -> None:
        self.client = Client(url, config=config)
        self.reader: Any = self.client.reader

    def events(self, request: str, **options: Any) -> Iterator[Event]:
        return self.client.request(request).events(**options)

    def handle(self, request: str) -> Any:
        return self.client.request(request)

    def result(self, request: str | Any, **options: Any) -> Any:
        """Of a request's id or its handle."""
        handle = self.handle(request) if isinstance(request, str) else request
        return handle.result(**options)

    def submit(self, **options: Any) -> Any:
        return self.client.submit(**options)

    def close(self) -> None:
        self.client.close()


class AsyncSide:
    """The asyncio client, driven from a loop in another thread."""

    def __init__(self, url: str, config: PoolConfig) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.client = self.run(self._make(url, config))
        self.reader: Any = self.run(self.client.opened()).reader

    async def _make(self, url: str, config: PoolConfig) -> AsyncClient:
        return await AsyncClient(url, config=config).__aenter__()

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def events(self, request: str, **options: Any) -> Iterator[Event]:
        handle = self.run(self.client.request(request))
        source = handle.events(**options)
        try:
            while True:
                try:
                    yield self.run(anext(source))
                except StopAsyncIteration:
                    return
        finally:
            self.run(source.aclose())

    def handle(self, request: str) -> Any:
        return self.run(self.client.request(request))

    def result(self, request: str | Any, **options: Any) -> Any:
        handle = self.handle(request) if isinstance(request, str) else request
        return self.run(handle.result(**options))

    def submit(self, **options: Any) -> Any:
        return self.run(self.client.submit(**options))

    def close(self) -> None:
        self.run(self.client.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


SIDES: dict[str, Callable[[str, PoolConfig], Any]] = {"sync": SyncSide, "async": AsyncSide}


class Collecting:
    """A reader in a thread of its own."""

    def __init__(self, events: Iterator[Event], after_each: Callable[[Event], None] = lambda event: None) -> None:
        self.got: list[Event] = []
        self.error: BaseException | None = None
        self._after_each = after_each
        self._thread = threading.Thread(target=self._run, args=(events,), daemon=True)
        self._thread.start()

    def _run(self, events: Iterator[Event]) -> None:
        try:
            for event in events:
                self.got.append(event)
                self._after_each(event)
        except BaseException as error:
            self.error = error

    def wait(self) -> list[Event]:
        self._thread.join(30)
        assert not self._thread.is_alive(), f"still reading after {len(self.got)} events"
        if self.error is not None:
            raise self.error
        return self.got
