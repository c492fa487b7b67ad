"""Errors of the broker side. All are `PrismError`; each text names the thing, the limit and the value."""

from __future__ import annotations

from prism_core.errors import InvalidRequest, PrismError

__all__ = [
    "BrokerFull",
    "BrokerUnavailable",
    "BrokerUnsuitable",
    "ClientClosed",
    "Conflict",
    "Gone",
    "InvalidCursor",
    "InvalidRequest",
    "NotFound",
    "NotMember",
    "QueueFull",
    "ResultTimeout",
    "StreamLost",
]


class BrokerUnavailable(PrismError, ConnectionError):
    """The broker did not answer within the configured tries; whether the last call was done is unknown: send it
    again."""


class BrokerFull(BrokerUnavailable):
    """The broker is out of memory and refused the write; nothing was written."""


class BrokerUnsuitable(PrismError):
    """The server is no broker for Prism: too old, evicting keys, a cluster, or not ours to use."""


class ClientClosed(PrismError):
    """The client was closed, or is used in another process than the one that made it."""


class NotFound(PrismError, LookupError):
    """No such request, conversation or worker, or it belongs to another owner."""


class Conflict(PrismError):
    """The same id or idempotency key was used before with other content, or the conversation has another tokenizer."""


class Gone(Conflict):
    """The idempotency key was used by a request whose record has expired; it is not run a second time."""


class QueueFull(PrismError):
    """The pool or the conversation holds as many open turns as it may; try again later."""


class NotMember(PrismError):
    """This worker incarnation was reaped (or the broker lost its data): it must exit and a new one start."""


class StreamLost(PrismError, LookupError):
    """The rest of a stream cannot be read: the request or its log is gone, or the broker lost its data."""


class InvalidCursor(PrismError, ValueError):
    """A cursor does not name an event of this stream; nothing was read."""


class ResultTimeout(PrismError, TimeoutError):
    """The request did not end, or its record did not come, within the time that the caller gave; it is left alone."""
