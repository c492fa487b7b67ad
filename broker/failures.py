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
    ResponseError,
    TimeoutError,
)

from broker.errors import BrokerFull, BrokerUnavailable, BrokerUnsuitable

__all__ = ["translated"]

PASSING = ("MISCONF", "BUSY ", "NOREPLICAS", "MASTERDOWN", "LOADING", "TRYAGAIN")
"""Refusals that end by themselves or by an operator's hand (a full disk, a long script), not by another request."""


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
    except ResponseError as error:
        if str(error).startswith(PASSING):
            raise BrokerUnavailable(f"the broker cannot write just now: {error}") from error
        raise
