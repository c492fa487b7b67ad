"""The gateway's one configuration record, checked when it is made.

Kept: an address that others can reach is refused without an API key. Durations carry their unit in the name.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from prism_core.errors import InvalidRequest

__all__ = ["GatewayConfig"]

KEYS_VARIABLE = "PRISM_API_KEYS"


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """Address, keys, limits and times of one gateway process."""

    host: str = "127.0.0.1"
    """Address to bind; one that is not loopback needs `api_keys`."""
    port: int = 8000
    """TCP port; 0 takes a free one."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Bearer keys. Each is an owner of its own. Without any, everybody who reaches the address is the local user."""
    max_body_bytes: int = 8 << 20
    """Longest request body of JSON; beyond it 413."""
    max_messages: int = 2_048
    """Most messages (or input items) of one request."""
    max_message_bytes: int = 1 << 20
    """Longest text of one message, or one prompt, in bytes of UTF-8."""
    max_file_bytes: int = 200 << 20
    """Longest uploaded file."""
    max_owner_bytes: int = 20 << 30
    """Bytes of all files of one key, outputs of batches included, beyond which no more are taken."""
    file_root: str = ""
    """Folder of files and batches, the same one for all gateways of a pool; empty: `PRISM_FILE_ROOT`, else one for
    each broker below `$PRISM_HOME/files`."""
    batch_runners: int = 4
    """Batches that this gateway runs at once; 0: it runs none, and leaves them to other gateways."""
    max_choices: int = 16
    """Most answers of one request: `n` times the number of prompts."""
    requests_per_minute: float = 0.0
    """Generations that one key may start per minute in the long run; 0: no limit. Each gateway counts for itself."""
    burst: int = 60
    """Generations that one key may start at once after a pause, where `requests_per_minute` limits it."""
    disconnect_grace_s: float = 5.0
    """Time for a client that went away to come back before its request is cancelled (background requests never are)."""
    keep_alive_s: float = 15.0
    """Silence on a stream after which a comment is sent, so that nobody between cuts it."""
    send_timeout_s: float = 60.0
    """Time for which a client may take nothing before its connection is cut."""
    read_timeout_s: float = 30.0
    """Time for a request to arrive in full, and for a new connection to send one."""
    shutdown_grace_s: float = 10.0
    """Time that running streams get after a stop signal."""
    open_metrics: bool = True
    """Whether `/metrics` answers without a key: it names models and workers, but no owner and no text."""

    def __post_init__(self) -> None:
        if not self.host or not isinstance(self.host, str):
            raise InvalidRequest("gateway config: host must be an address, got an empty one")
        _whole(self, "port", 0, 65_535)
        for name, most in (("max_body_bytes", 1 << 30), ("max_message_bytes", 1 << 30), ("max_messages", 10_000)):
            _whole(self, name, 1, most)
        for name in ("max_file_bytes", "max_owner_bytes"):
            _whole(self, name, 1, 1 << 50)
        _whole(self, "batch_runners", 0, 64)
        _whole(self, "max_choices", 1, 128)
        _whole(self, "burst", 1, 1_000_000)
        for item in fields(self):
            if item.name.endswith("_s"):
                _seconds(self, item.name)
        if not 0 <= self.requests_per_minute <= 1e9:
            raise InvalidRequest(
                f"gateway config: requests_per_minute must be 0 (off) to 1e9, got {self.requests_per_minute!r}"
            )
        for key in self.api_keys:
            if not key.isascii() or not key.isprintable() or not key or " " in key:
                raise InvalidRequest("gateway config: an API key must be printable ASCII without blanks")
        if not self.api_keys and not is_loopback(self.host):
            raise InvalidRequest(
                f"gateway config: host {self.host} can be reached by others and needs an API key: set {KEYS_VARIABLE}"
            )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ, **given: Any) -> GatewayConfig:
        """A config with the keys of `PRISM_API_KEYS` (comma-separated), and `given` over the defaults."""
        keys = tuple(key.strip() for key in environment.get(KEYS_VARIABLE, "").split(",") if key.strip())
        return cls(**{"api_keys": keys, **given})


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`. A name other than `localhost` may stand for anything: no."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _whole(config: GatewayConfig, name: str, low: int, high: int) -> None:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(f"gateway config: {name} must be a whole number from {low} to {high}, got {value!r}")


def _seconds(config: GatewayConfig, name: str) -> None:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 86_400:
        raise InvalidRequest(f"gateway config: {name} must be above 0 and at most 86400 seconds, got {value!r}")
