"""What happens to every HTTP request before and after its endpoint: an id, an owner, one log line, one form of error.

Kept: every answer bears `X-Request-Id`; an exception never reaches the server, a traceback never the client, and a
prompt never the log, which tells names, sizes and times only.
"""

from __future__ import annotations

import logging
import re
import time
import traceback
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from broker.gateway import trace
from broker.gateway.errors import ApiError, of_error
from broker.gateway.gateway import Gateway
from broker.gateway.routes.operations import OPEN_PATHS
from broker.gateway.usage import timings_ms
from broker.keys import new_ulid

__all__ = ["Front", "refused"]

_log = logging.getLogger("prism.gateway")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_PAGE = ("/", "/static/")


class Front:
    """The outermost ASGI layer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        gateway: Gateway = scope["app"].state.gateway
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        name = given if _REQUEST_ID.match(given) else f"req_{new_ulid()}"
        call = _Call(name, send)
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"], state["log"] = name, call.log
        state["trace"] = trace.parent(headers.get("traceparent"))
        try:
            state["owner"] = self._owner(gateway, scope["path"], headers)
            await self._app(scope, receive, call.send)
        except Exception as error:
            await self._fail(call, scope, receive, error)
        finally:
            self._tell(gateway, scope, call)

    def _owner(self, gateway: Gateway, path: str, headers: Headers) -> str:
        if path in OPEN_PATHS or path == _PAGE[0] or path.startswith(_PAGE[1]):
            gateway.access.check_host(headers)
            return ""
        if path == "/metrics" and gateway.config.open_metrics:
            return ""
        return gateway.access.owner(headers)

    async def _fail(self, call: _Call, scope: Scope, receive: Receive, error: Exception) -> None:
        answer = of_error(error)
        if answer.code == "internal_error":
            # The frames only: a message may quote the prompt.
            frames = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
            _log.error(
                "request failed", extra={"request_id": call.name, "error": repr(type(error)), "frames": frames[-8:]}
            )
        call.log["code"] = answer.code
        if call.status is None:
            await JSONResponse(answer.body(), answer.status, answer.headers)(scope, receive, call.send)

    def _tell(self, gateway: Gateway, scope: Scope, call: _Call) -> None:
        route = getattr(scope.get("route"), "path", "")
        # A client may send any word as a method; a label has few values.
        method = scope["method"] if scope["method"] in _METHODS else "other"
        gateway.metrics.http.labels(route, method, str(call.status or 499)).inc()
        usage = call.log.pop("usage", {})
        known = {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "reused_tokens") if name in usage}
        level = logging.DEBUG if route in OPEN_PATHS or route in ("/metrics", "/pool") else logging.INFO
        _log.log(
            level,
            "request",
            extra={
                "request_id": call.name,
                "method": method,
                "route": route,
                "status": call.status,
                "ms": round((time.monotonic() - call.began) * 1000, 1),
                "owner": scope["state"].get("owner", "")[:8],
                "trace": scope["state"]["trace"],
                **call.log,
                **known,
                **({"phases_ms": timings_ms(usage)} if usage else {}),
            },
        )


async def refused(request: Request, error: Exception) -> JSONResponse:
    """Starlette's own refusals, no such route and no such method, in our form."""
    assert isinstance(error, HTTPException)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    message = {404: "There is no such address.", 405: "This address does not know that method."}
    text = message.get(error.status_code, str(error.detail))
    answer = ApiError(error.status_code, text, code=code)
    return JSONResponse(answer.body(), answer.status, error.headers)


class _Call:
    """One HTTP request on its way."""

    def __init__(self, name: str, send: Send) -> None:
        self.name = name
        self.began = time.monotonic()
        self.status: int | None = None
        self.log: dict[str, Any] = {}
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", []), (b"x-request-id", self.name.encode())]
        await self._send(message)
