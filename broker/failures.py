"""redis-py's exceptions as ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    TimeoutError,
)

from broker.errors import BrokerFull, BrokerUnavailable, BrokerUnsuitable

__all__ = ["translated"]


@contextmanager
def translated() -> Iterator[None]:
    """Inside, a broker that is away, busy, full or closed to us raises an error of `broker.errors`."""
    try:
        yield
    except (AuthenticationError, NoPermissionError) as error:
        raise BrokerUnsuitable(f"the broker refuses this user: {error}") from error
    except OutOfMemoryError as error:
        raise BrokerFull(f"the broker is out of memory: {error}") from error
    except (ConnectionError, TimeoutError, BusyLoadingError, ReadOnlyError) as error:
        raise BrokerUnavailable(f"the broker did not answer: {error}") from error
