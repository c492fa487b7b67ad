"""The scripts of the pool protocol: composed once from their parts, called by EVALSHA.

Kept: `place`, `close` and the other shared parts exist once, in `scripts/_*.lua`; a script names the last part that it
needs (`-- needs: close`) and gets that one and those before it. The numbers of `PoolConfig` are written into the
text, so two pools with other numbers never share a script. A script that the server does not know (new, restarted,
flushed) is sent in full once, in the same call.
Not promised: Redis Cluster. The scripts name keys that are not in KEYS.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from importlib.resources import files
from typing import Any

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import NoScriptError

from broker.config import PoolConfig
from broker.failures import translated

__all__ = ["AsyncScripts", "Scripts", "compose"]

PARTS = ("base", "members", "rq", "place", "close", "rescue")
"""Shared parts in their order; each may use those before it."""

Argument = str | bytes | int | float


@lru_cache(maxsize=256)
def compose(name: str, config: PoolConfig) -> tuple[str, str]:
    """Text and SHA-1 of script `name` under `config`."""
    body = _read(name)
    needs = next(line.removeprefix("-- needs: ") for line in body.splitlines() if line.startswith("-- needs: "))
    parts = [_read(f"_{part}") for part in PARTS[: PARTS.index(needs) + 1]]
    text = "\n".join([_constants(config), *parts, body])
    return text, hashlib.sha1(text.encode()).hexdigest()


def _read(name: str) -> str:
    return files("broker").joinpath("scripts", f"{name}.lua").read_text()


def _constants(config: PoolConfig) -> str:
    pairs = [(item.name.upper(), getattr(config, item.name)) for item in fields(config)]
    return "".join(f"local {name} = {value}\n" for name, value in pairs if name in _USED)


_USED = frozenset(
    (
        *("LEASE_MS", "PIN_S", "CONVERSATION_S", "RESULT_S", "LOG_S", "IDEMPOTENCY_S", "OVERDUE_MS", "PREEMPT_MS"),
        *("MAX_OPEN", "MAX_OPEN_BATCH", "MAX_BOX", "BARREN_TAKES", "TOTAL_TAKES", "TAKE_STEP", "REAP_STEP"),
    )
)


class Scripts:
    """Runs scripts on one connection pool. Safe to share between threads."""

    def __init__(self, redis: Redis, config: PoolConfig) -> None:
        self._redis = redis
        self._config = config

    def run(self, name: str, keys: Sequence[str], arguments: Sequence[Argument]) -> Any:
        """The script's raw reply; `BrokerUnavailable` if there was none (it may have run: call again)."""
        text, sha = compose(name, self._config)
        with translated():
            try:
                return self._redis.evalsha(sha, len(keys), *keys, *arguments)
            except NoScriptError:
                return self._redis.eval(text, len(keys), *keys, *arguments)


class AsyncScripts:
    """The same for asyncio."""

    def __init__(self, redis: AsyncRedis, config: PoolConfig) -> None:
        self._redis = redis
        self._config = config

    async def run(self, name: str, keys: Sequence[str], arguments: Sequence[Argument]) -> Any:
        text, sha = compose(name, self._config)
        with translated():
            try:
                return await self._redis.evalsha(sha, len(keys), *keys, *arguments)
            except NoScriptError:
                return await self._redis.eval(text, len(keys), *keys, *arguments)
