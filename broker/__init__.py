"""What clients and workers of the pool share: keys, scripts, store, readers, clients and the embedded broker.

Names are imported on first use; none of them brings in numba, the kernels or rq.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from broker.async_client import AsyncClient, AsyncRequest
    from broker.client import Client, Request, Result
    from broker.config import PoolConfig
    from broker.events import Event
    from broker.spec import RequestSpec

_HOME_OF = {
    "AsyncClient": "broker.async_client",
    "AsyncRequest": "broker.async_client",
    "Client": "broker.client",
    "Request": "broker.client",
    "Result": "broker.client",
    "Event": "broker.events",
    "PoolConfig": "broker.config",
    "RequestSpec": "broker.spec",
}

__all__ = ["AsyncClient", "AsyncRequest", "Client", "Event", "PoolConfig", "Request", "RequestSpec", "Result"]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'broker' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
