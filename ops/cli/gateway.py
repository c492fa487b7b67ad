"""`prism gateway`: the HTTP door alone, for machines that run no worker; and the same door inside `prism serve`.

Kept: a gateway that cannot start (no broker, a port that is taken, a public address without a key) is one clear line
and an exit code, in both commands. SIGTERM gives running streams their grace and ends with 0; the requests go on.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from ops.cli import options
from ops.cli.output import say
from prism_core.errors import PrismError

if TYPE_CHECKING:
    from broker.gateway.server import Server

START_SECONDS = 30.0


class GatewayFailed(PrismError):
    """The gateway ended before it was ready; its log says why."""


def gateway(
    redis_url: options.RedisUrl = None,
    host: options.Host = "127.0.0.1",
    port: options.Port = 8000,
    rate_limit: options.RateLimit = 0.0,
    grace: Annotated[
        float, typer.Option(min=0.001, max=86_400, help="Seconds that running streams get after SIGTERM.")
    ] = 10.0,
) -> None:
    """The OpenAI-compatible HTTP door of a pool whose workers run elsewhere; keys come from PRISM_API_KEYS."""
    from broker import log

    log.set_up()
    # The server puts this handler back before it passes on the signal that stopped it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with options.kept_broker(redis_url) as broker:
        server = build(host, port, broker.url, rate_limit=rate_limit, grace=grace)
        say(f"http://{host}:{port}/v1; broker {broker.shown}")
        run(server)


def build(host: str, port: int, url: str, *, rate_limit: float = 0.0, grace: float = 10.0) -> Server:
    """A server on the broker at `url`, with the API keys of this process's environment; `InvalidRequest`."""
    from broker.gateway.config import GatewayConfig
    from broker.gateway.server import Server

    config = GatewayConfig.from_environment(
        host=host, port=port, requests_per_minute=rate_limit, shutdown_grace_s=grace
    )
    return Server(config, url)


def run(server: Server) -> None:
    """Serves until told to stop; `GatewayFailed` if it never listened, and what kept it from binding."""
    try:
        server.run()
    except SystemExit as leaving:
        if server.started or not leaving.code:  # a stop, also one that came before it listened
            raise
        raise GatewayFailed("the gateway did not start: see its log") from leaving
    if not server.started:
        raise GatewayFailed("the gateway did not start: see its log")


class GatewayThread:
    """The server beside a supervisor, which keeps the main thread."""

    def __init__(self, server: Server, on_end: Callable[[], None]) -> None:
        """`on_end` is called, on the server's thread, when it ends for whatever reason."""
        self._server, self._on_end = server, on_end
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)

    def start(self) -> None:
        """Returns once it listens; raises what kept it from that."""
        self._thread.start()
        for _ in range(round(START_SECONDS * 100)):
            if self._server.started or self._ended.wait(0.01):
                break
        if self._error is not None:
            raise self._error
        if not self._server.started:
            raise GatewayFailed(f"the gateway was not ready after {START_SECONDS:g} s: see its log")

    def stop(self) -> None:
        self._server.stop()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        try:
            run(self._server)
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()
            self._on_end()
