"""Errors as OpenAI's clients know them: a status, and `{"error": {message, type, param, code}}`.

Kept: every answer that is no success has this form; its text is one line that names the thing, the limit and the
value, and never a prompt, a key or a broker's address.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from broker.errors import (
    BrokerUnavailable,
    BrokerUnsuitable,
    Conflict,
    Gone,
    InvalidCursor,
    InvalidRequest,
    NotFound,
    QueueFull,
    ResultTimeout,
    StreamLost,
)
from prism_core.errors import PrismError

__all__ = ["ApiError", "invalid", "of_end", "of_error", "unknown_model"]

RETRY_S = 1
"""What `Retry-After` says when the queue is full or the broker is away: the pool is asked again soon."""

_NEVER = {"x-should-retry": "false"}
"""For the statuses that OpenAI's clients try again by themselves although the answer would be the same."""


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = " ".join(message.split())
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """400 for one parameter."""
    return ApiError(400, message, param=param, code=code)


def unknown_model(model: str) -> ApiError:
    return ApiError(
        404, f"The model {model[:256]!r} does not exist in this pool.", param="model", code="model_not_found"
    )


def of_error(error: Exception) -> ApiError:
    """The answer for an exception; anything that is no Prism error is a 500 that tells nothing."""
    if isinstance(error, ApiError):
        return error
    for kind, make in _ANSWERS:
        if isinstance(error, kind):
            return make(error)
    if isinstance(error, PrismError):
        return ApiError(400, str(error))
    return ApiError(500, "The gateway failed on this request.", kind="server_error", code="internal_error")


def _full(error: Exception) -> ApiError:
    headers = {"Retry-After": str(RETRY_S)}
    return ApiError(429, str(error), kind="rate_limit_error", code="queue_full", headers=headers)


def _away(error: Exception) -> ApiError:
    message = "The pool's broker does not answer at the moment; the request may or may not have been accepted."
    headers = {"Retry-After": str(RETRY_S)}
    return ApiError(503, message, kind="server_error", code="broker_unavailable", headers=headers)


_ANSWERS: tuple[tuple[type[Exception], Callable[[Exception], ApiError]], ...] = (
    (InvalidCursor, lambda error: invalid(str(error), code="invalid_cursor")),
    (StreamLost, lambda error: ApiError(404, str(error), code="stream_lost")),
    (NotFound, lambda error: ApiError(404, str(error), code="not_found")),
    (Gone, lambda error: ApiError(409, str(error), code="idempotency_key_expired", headers=_NEVER)),
    (Conflict, lambda error: ApiError(409, str(error), code="conflict", headers=_NEVER)),
    (QueueFull, _full),
    (BrokerUnavailable, _away),
    (BrokerUnsuitable, _away),
    (ResultTimeout, lambda error: ApiError(504, str(error), kind="server_error", code="timeout")),
    (InvalidRequest, lambda error: ApiError(400, str(error))),
)

_INVALID = "invalid_request: "
_INTERNAL = "internal_error: "


def of_end(state: str, reason: str) -> ApiError:
    """The answer for a request that ended as `state`, which is not done."""
    if state == "cancelled":
        return ApiError(409, f"The request was cancelled: {reason}", code="request_cancelled", headers=_NEVER)
    if state == "expired":
        message = f"The request's deadline passed before it was done: {reason}"
        return ApiError(504, message, kind="server_error", code="deadline_exceeded", headers=_NEVER)
    if reason.startswith(_INVALID):
        message = reason.removeprefix(_INVALID)
        code = "context_length_exceeded" if "context_tokens" in message else None
        return ApiError(400, message, code=code)
    if reason == "worker_lost":
        message = "The request was given up: every worker that ran it was lost."
        return ApiError(500, message, kind="server_error", code="worker_lost", headers=_NEVER)
    return ApiError(500, reason.removeprefix(_INTERNAL), kind="server_error", code="generation_failed", headers=_NEVER)
