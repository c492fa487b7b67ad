"""Who may ask, and how often.

Kept: with API keys configured, every request to the API names one, and becomes that key's owner; the key itself is
stored and logged nowhere. Without keys only names of this machine are answered, so no web page can reach the API by
pointing a name of its own here. Not promised: one rate over several gateways; each counts for itself.
"""

from __future__ import annotations

import hmac
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import Headers

from broker.gateway.config import GatewayConfig, is_loopback
from broker.gateway.errors import ApiError
from broker.keys import LOCAL_OWNER, owner_of

__all__ = ["Access", "RateLimit"]


class Access:
    """Finds the owner that a request speaks for."""

    def __init__(self, config: GatewayConfig) -> None:
        self._keys = [key.encode() for key in config.api_keys]
        self._host = config.host.lower()

    def owner(self, headers: Headers) -> str:
        """401 for a missing or wrong key."""
        if not self._keys:
            self.check_host(headers)
            return LOCAL_OWNER
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise _unauthorised("No API key was given: send it as 'Authorization: Bearer KEY'.", None)
        key = given.strip().encode(errors="replace")
        matches = [known for known in self._keys if hmac.compare_digest(known, key)]
        if not matches:
            raise _unauthorised("The API key is not one of this pool's.", "invalid_api_key")
        return owner_of(matches[0].decode())

    def check_host(self, headers: Headers) -> None:
        """403 for a `Host` that is no name of this machine, where no key is asked for."""
        if self._keys:
            return
        host = headers.get("host", "").lower()
        name = host if host.startswith("[") and host.endswith("]") else host.rpartition(":")[0] or host
        if not (is_loopback(name) or name == self._host):
            message = f"Host {name[:80]!r} is not a name of this machine; set an API key to be reached by others"
            raise ApiError(403, message, kind="permission_error", code="host_not_allowed")


def _unauthorised(message: str, code: str | None) -> ApiError:
    headers = {"WWW-Authenticate": "Bearer"}
    return ApiError(401, message, kind="authentication_error", code=code, headers=headers)


@dataclass
class _Bucket:
    tokens: float
    at: float


class RateLimit:
    """A token bucket for each owner; there are no more owners than keys."""

    def __init__(self, per_minute: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`per_minute` 0: no limit."""
        self._per_s = per_minute / 60
        self._burst = burst
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def take(self, owner: str, count: int = 1) -> None:
        """Counts `count` generations; 429 with `Retry-After` if the owner has to wait.

        More at once than the burst are let in when the bucket is full, and paid back after.
        """
        if not self._per_s:
            return
        now = self._clock()
        bucket = self._buckets.setdefault(owner, _Bucket(float(self._burst), now))
        bucket.tokens = min(self._burst, bucket.tokens + (now - bucket.at) * self._per_s)
        bucket.at = now
        need = min(count, self._burst)
        if bucket.tokens < need:
            wait = math.ceil((need - bucket.tokens) / self._per_s)
            raise ApiError(
                429,
                f"This key may start {self._per_s * 60:g} generations per minute: try again in {wait} s.",
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(wait)},
            )
        bucket.tokens -= count
