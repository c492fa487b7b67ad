"""From a URL (or none) to a checked broker connection.

    None                 PRISM_REDIS_URL, else the embedded broker of PRISM_HOME
    unix:///path         a Unix socket
    redis://[user:password@]host[:port][/db]        rediss://... is the same with TLS (redis-py's ssl_* query options)

Kept: a server that would lose turns is refused before anything is written: older than 6.2, a cluster, or one that
evicts keys at will (`allkeys-*`). Lost connections and time-outs are tried again with back-off, because every script
survives a blind resend; after the last try they become `BrokerUnavailable`. Passwords never appear in a message.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
import redis.asyncio as aredis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.connection import UnixDomainSocketConnection
from redis.exceptions import AuthenticationError, ConnectionError, ResponseError, TimeoutError
from redis.retry import Retry

from broker import embedded, keys
from broker.embedded import Embedded
from broker.errors import BrokerUnavailable, BrokerUnsuitable
from broker.failures import translated
from broker.wire import uncounted

__all__ = ["Connection", "connect", "connect_async", "shown"]

OLDEST = (6, 2)
TRIES = 4
"""Tries of a call on a lost connection, the first one included (about half a second with the back-off)."""
TIMEOUT_S = 5.0
HEALTH_CHECK_S = 15
THREADS = 4_096
"""Most connections of one synchronous client: one for each thread that calls at the same time."""
FEWEST = 8
"""Least of them, whatever the URL says: a worker's threads call side by side, and its turn holds one."""
CONNECTIONS = 64
"""Most connections of one asyncio client (a reader's pub/sub connection not counted)."""
CONNECTION_WAIT_S = 30.0
"""Longest wait for one of them."""

_FORM = {"protocol": 2, "decode_responses": False}
"""What the hubs and lines, which read the bytes themselves, and the parsers of replies rely on."""

_AGAIN: Any = (ConnectionError, TimeoutError, OSError)
"""What a call is tried again for."""

_log = logging.getLogger("prism.broker")


@dataclass
class Connection:
    """A broker that was reached and found fit. `redis` gives bytes; it is safe to share between threads."""

    redis: redis.Redis
    url: str
    """Where it is, without a password."""
    embedded: Embedded | None = None
    warnings: list[str] = field(default_factory=list)
    """What an operator should know about this server, such as that it does not persist."""

    def close(self) -> None:
        """Close the sockets and give back the share in an embedded broker."""
        self.redis.connection_pool.disconnect()
        if self.embedded is not None:
            self.embedded.close()

    def asynchronous(self, **options: Any) -> aredis.Redis:
        """An asyncio client of the same broker, for the running loop; the caller closes it."""
        return _asynchronous(self.redis.connection_pool, options)


def connect(url: str | None = None, *, home: Path | None = None, tries: int = TRIES, **options: Any) -> Connection:
    """Reach the broker at `url` (None: see the module) and check that it is fit to be one.

    `options` go to redis-py's connection pool (timeouts, TLS files, ...). Errors: `BrokerUnavailable`,
    `BrokerUnsuitable`.
    """
    url = url or os.environ.get("PRISM_REDIS_URL") or None
    share = embedded.ensure(home) if url is None else None
    try:
        found = _open(share.url if share else url or "", share, tries, options)
        found.warnings = _examine(found.redis, found.url)
    except BaseException:
        if share is not None:
            share.close()
        raise
    for warning in found.warnings:
        _log.warning("%s: %s", found.url, warning)
    return found


async def connect_async(
    url: str | None = None, *, home: Path | None = None, tries: int = TRIES
) -> tuple[aredis.Redis, Connection]:
    """The same for asyncio: the checks run in a thread, so the loop is not held up."""
    found = await asyncio.to_thread(connect, url, home=home, tries=tries)
    return found.asynchronous(), found


def shown(url: str) -> str:
    """`url` without user and password."""
    return re.sub(r"//[^@/]*@", "//", url).split("?")[0]


def _open(url: str, share: Embedded | None, tries: int, options: dict[str, Any]) -> Connection:
    url = re.sub(r"^valkey(s?)://", r"redis\1://", url)
    settings: dict[str, Any] = {
        **_FORM,
        "socket_timeout": TIMEOUT_S,
        "socket_connect_timeout": TIMEOUT_S,
        "health_check_interval": HEALTH_CHECK_S,
        "max_connections": THREADS,
        "retry": Retry(ExponentialWithJitterBackoff(cap=1.0, base=0.05), tries - 1, _AGAIN),
        **options,
    }
    if share is not None:
        pool = redis.ConnectionPool(connection_class=_Reviving, path=str(share.socket), home=share.home, **settings)
    else:
        try:
            pool = redis.ConnectionPool.from_url(url, **settings)
            uncounted(pool)
        except (ValueError, TypeError) as error:  # TypeError: an option that redis-py does not know
            raise BrokerUnsuitable(f"broker URL {shown(url)!r}: {error}") from error
    for option, needed in _FORM.items():
        if (given := pool.connection_kwargs.get(option, needed)) != needed:
            raise BrokerUnsuitable(f"broker URL {shown(url)!r}: Prism needs {option}={needed}, not {given}")
    pool.max_connections = max(pool.max_connections, FEWEST)
    return Connection(redis.Redis(connection_pool=pool), shown(url), share)


class _Reviving(UnixDomainSocketConnection):
    """A connection to the embedded broker that sees to it that a guardian lives when nobody listens."""

    def __init__(self, home: Path, **settings: Any) -> None:
        super().__init__(**settings)  # type: ignore[no-untyped-call]
        self._home = home

    def _connect(self) -> Any:
        try:
            return super()._connect()  # type: ignore[no-untyped-call]
        except (FileNotFoundError, ConnectionRefusedError):
            embedded.revive(self._home)
            raise


class _AsyncReviving(aredis.UnixDomainSocketConnection):
    """The same for asyncio."""

    def __init__(self, home: Path, **settings: Any) -> None:
        super().__init__(**settings)
        self._home = home

    async def _connect(self) -> None:
        try:
            await super()._connect()  # type: ignore[no-untyped-call]
        except (FileNotFoundError, ConnectionRefusedError):
            await asyncio.to_thread(embedded.revive, self._home)
            raise


def _asynchronous(pool: redis.ConnectionPool, options: dict[str, Any]) -> aredis.Redis:
    """An asyncio pool with the settings of `pool`."""
    settings = {name: value for name, value in pool.connection_kwargs.items() if name not in _SYNC_ONLY}
    retry = pool.connection_kwargs["retry"]
    settings["retry"] = AsyncRetry(ExponentialWithJitterBackoff(cap=1.0, base=0.05), retry.get_retries(), _AGAIN)
    settings.update(options)
    kind: type[aredis.Connection] = aredis.Connection
    if "path" in settings:
        kind = _AsyncReviving if "home" in settings else aredis.UnixDomainSocketConnection  # type: ignore[assignment]
    elif issubclass(pool.connection_class, redis.SSLConnection):
        kind = aredis.SSLConnection
    # However many calls run at once: those beyond the limit wait for a connection instead of failing.
    settings = {"max_connections": CONNECTIONS, "timeout": CONNECTION_WAIT_S, **settings}
    return aredis.Redis.from_pool(aredis.BlockingConnectionPool(connection_class=kind, **settings))


_SYNC_ONLY = frozenset(("retry", "maint_notifications_config", "oss_cluster_maint_notifications_handler"))


def _examine(client: redis.Redis, url: str) -> list[str]:
    """Check version, mode and eviction; set the boot id if the data have none. Returns warnings."""
    try:
        with translated():
            _knock(client.connection_pool)
            facts: dict[str, Any] = client.info()
    except BrokerUnavailable as error:
        raise BrokerUnavailable(f"cannot reach the broker at {url}: {_root(error)}") from error
    except ResponseError as error:
        raise BrokerUnsuitable(f"the server at {url} does not answer INFO: {error}") from error
    version = tuple(int(part) for part in re.findall(r"\d+", str(facts.get("redis_version", "")))[:2])
    if version < OLDEST:
        raise BrokerUnsuitable(f"the server at {url} is version {facts.get('redis_version')}; Prism needs 6.2 or newer")
    if facts.get("redis_mode") == "cluster" or facts.get("cluster_enabled") == 1:
        raise BrokerUnsuitable(f"the server at {url} is a cluster; Prism needs a single (or Sentinel-managed) server")
    if facts.get("role") in ("slave", "replica"):
        raise BrokerUnsuitable(f"the server at {url} is a replica; Prism needs the one that takes writes")
    policy = str(facts.get("maxmemory_policy", "noeviction"))
    if policy.startswith("allkeys"):
        raise BrokerUnsuitable(
            f"the server at {url} evicts any key when memory is short (maxmemory-policy {policy}), so turns vanish:"
            " set it to noeviction"
        )
    warnings = []
    if policy.startswith("volatile"):
        warnings.append(f"maxmemory-policy {policy} may evict leases and results when memory is short: use noeviction")
    if facts.get("aof_enabled") == 0:
        warnings.append("no append-only file: a restart of the server loses what came since its last snapshot")
    with translated():
        client.set(keys.BOOT, secrets.token_hex(13), nx=True)
    return warnings


def _knock(pool: redis.ConnectionPool) -> None:
    """One try without back-off: a refused password stays refused, and redis-py would try it again."""
    probe = uncounted(pool)
    probe.retry = Retry(NoBackoff(), 0)
    try:
        probe.connect()
    except AuthenticationError:
        raise
    except _AGAIN:
        pass
    finally:
        probe.disconnect()


def _root(error: BaseException) -> str:
    """The first cause in one line, without redis-py's wrapping."""
    text = str(error.__cause__ or error)
    return re.sub(r"^Error \d+ (while )?connecting to \S+\.\s*", "", text).strip().rstrip(".")
