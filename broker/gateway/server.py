"""The gateway as a Starlette application, and as a process on uvicorn.

Kept: importing this brings in neither numba nor rq; the broker is reached before the port is bound, so a gateway that
answers at all can work; on SIGTERM it stops taking connections, gives running streams their grace and leaves, and the
pool's requests go on without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import BaseRoute

from broker.batch.service import BatchService
from broker.batch.shelf import Shelf
from broker.config import PoolConfig
from broker.gateway.config import GatewayConfig
from broker.gateway.front import Front, refused
from broker.gateway.gateway import Gateway
from broker.gateway.pool import GatewayPool
from broker.gateway.routes import batches, files, generate, models, operations, page, responses
from broker.log import set_up
from prism_core.errors import InvalidRequest

__all__ = ["Server", "create_app", "run"]

_log = logging.getLogger("prism.gateway")
SWEEP_S = 5.0
"""Time between two looks for connections that never sent a request."""

ROUTES: tuple[BaseRoute, ...] = (
    *generate.ROUTES,
    *responses.ROUTES,
    *files.ROUTES,
    *batches.ROUTES,
    *models.ROUTES,
    *operations.ROUTES,
    *page.ROUTES,
)


def create_app(
    config: GatewayConfig,
    url: str | None = None,
    *,
    pool: PoolConfig | None = None,
    home: Path | None = None,
    routes: Iterable[BaseRoute] = (),
) -> Starlette:
    """The application. `url`: the broker, as for `broker.connect`. `routes`: more endpoints, before ours."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        gateway = Gateway.over(config, await GatewayPool.open(url, pool, home))
        app.state.gateway = gateway
        shelf = Shelf.of(config, url, home)
        runners = gateway.extras["batches"] = BatchService(shelf, config, url, pool=pool, home=home)
        try:
            await asyncio.to_thread(runners.start)
            yield
        finally:
            await asyncio.to_thread(runners.close)
            await gateway.close()

    return Starlette(
        routes=[*routes, *ROUTES],
        middleware=[Middleware(Front)],
        exception_handlers={HTTPException: refused},
        lifespan=lifespan,
    )


class Server(uvicorn.Server):
    """One gateway process's server: `run()` in any thread, `stop()` from any other."""

    def __init__(
        self,
        config: GatewayConfig,
        url: str | None = None,
        *,
        pool: PoolConfig | None = None,
        home: Path | None = None,
        routes: Iterable[BaseRoute] = (),
    ) -> None:
        """Arguments as for `create_app`."""
        self.app = create_app(config, url, pool=pool, home=home, routes=routes)
        super().__init__(
            uvicorn.Config(
                self.app,
                http="h11",
                ws="none",
                loop="asyncio",
                lifespan="on",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=max(1, round(config.shutdown_grace_s)),
            )
        )
        self._limits = config
        self._reach: Callable[[], Awaitable[GatewayPool]] = partial(GatewayPool.open, url, pool, home)
        self._idle_since: dict[Any, float] = {}
        self.port = 0
        """The port that was bound."""

    def stop(self) -> None:
        """Begins the end: no new connections, running streams get their grace."""
        self.should_exit = True

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Binds, serves until told to stop, and closes what it opened."""
        # A first connection, at once given back: an unusable broker is an error of ours, not a traceback of uvicorn's.
        await (await self._reach()).close()
        own = sockets or [_bind(self._limits)]
        self.port = own[0].getsockname()[1]
        sweep = asyncio.create_task(self._sweep())
        try:
            await super().serve(own)
        finally:
            sweep.cancel()
            for listener in own:
                listener.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.app.state.gateway.abort = self.abort
            _log.info("gateway listens", extra={"host": self._limits.host, "port": self.port})

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.app.state.gateway.stopping = True
        await super().shutdown(sockets)

    @property
    def connections(self) -> int:
        """Open client connections."""
        return len(self.server_state.connections)

    def abort(self, client: Any) -> None:
        """Cuts the connection of a client's address: a polite close would wait for a client that reads nothing."""
        for connection in list(self.server_state.connections):
            if client is not None and tuple(client) == getattr(connection, "client", None):
                connection.transport.abort()

    async def _sweep(self) -> None:
        """Cuts connections that have not sent a request within the read timeout."""
        while True:
            await asyncio.sleep(min(SWEEP_S, self._limits.read_timeout_s))
            now = time.monotonic()
            silent = [one for one in self.server_state.connections if getattr(one, "cycle", None) is None]
            self._idle_since = {one: self._idle_since.get(one, now) for one in silent}
            for connection, since in self._idle_since.items():
                if now - since >= self._limits.read_timeout_s:
                    connection.transport.abort()


def _bind(config: GatewayConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # The protocol is named, since asyncio turns off the delay of small writes only where it is.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host.strip("[]"), config.port))
    except OSError as error:
        listener.close()
        why = error.strerror or str(error)
        raise InvalidRequest(f"cannot listen on {config.host} port {config.port}: {why}") from error
    listener.listen(1024)
    listener.setblocking(False)
    return listener


def run(
    config: GatewayConfig, url: str | None = None, *, pool: PoolConfig | None = None, home: Path | None = None
) -> None:
    """A gateway process: logs as JSON to standard error, serves until SIGTERM or SIGINT."""
    set_up()
    Server(config, url, pool=pool, home=home).run()
