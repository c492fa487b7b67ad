"""`/v1/files`: upload, list, describe, read and delete the files of batches.

The content of a batch's output can be read while the batch runs, up to its last whole line, under the ids that the
batch names `partial_...`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import Any, BinaryIO
from urllib.parse import quote, urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from broker.batch.service import BatchService
from broker.batch.shelf import KEEP_S, Description
from broker.errors import NotFound
from broker.gateway.errors import ApiError, invalid
from broker.gateway.gateway import Gateway, gateway_of
from broker.gateway.upload import Form, read_upload

__all__ = ["ROUTES", "page", "service_of"]

PURPOSE = "batch"
CHUNK_BYTES = 256 << 10
MIN_KEEP_S, MAX_KEEP_S = 3_600, 2_592_000
MOST_LISTED = 10_000
NOT_AGAIN = {"x-should-retry": "false"}


def service_of(gateway: Gateway) -> BatchService:
    """503 where this gateway has another folder than the pool."""
    service: BatchService = gateway.extras["batches"]
    if service.problem:
        raise ApiError(503, service.problem, kind="server_error", code="wrong_file_root", headers=NOT_AGAIN)
    return service


async def _create(request: Request) -> Response:
    _same_origin(request)
    gateway, owner = gateway_of(request), request.state.owner
    config, shelf = gateway.config, service_of(gateway).shelf
    used = await asyncio.to_thread(shelf.used_bytes, owner)
    if used >= config.max_owner_bytes:
        message = f"this key's files have {used} bytes; the limit is {config.max_owner_bytes}: delete some"
        raise ApiError(413, message, code="storage_full", headers={"Connection": "close"})
    upload = await asyncio.to_thread(shelf.upload, owner)
    try:
        form = await read_upload(request, upload, max_bytes=config.max_file_bytes, idle_s=config.read_timeout_s)
        expires_at = _checked(form)
        found = await asyncio.to_thread(upload.keep, str(form.filename), PURPOSE, expires_at)
    except OSError as error:
        upload.drop()
        message = f"the file cannot be stored: {error.strerror}"
        raise ApiError(
            507, message, kind="server_error", code="storage_full", headers={**NOT_AGAIN, "Connection": "close"}
        ) from error
    except BaseException:
        upload.drop()
        raise
    request.state.log["file"] = found.id
    return JSONResponse(found.shown())


def _same_origin(request: Request) -> None:
    """A web page of elsewhere can send forms to a gateway without keys, unasked: it says where it comes from."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != request.headers.get("host", "").lower():
        raise ApiError(403, "files are not taken from other web pages", kind="permission_error", code="cross_origin")


def _checked(form: Form) -> int | None:
    """When the file expires; 400 for anything wrong with the form."""
    fields = dict(form.fields)
    if form.filename is None:
        raise invalid("file is required", "file", "missing_required_parameter")
    purpose = fields.pop("purpose", None)
    if purpose is None:
        raise invalid("purpose is required", "purpose", "missing_required_parameter")
    if purpose != PURPOSE:
        raise invalid(f"purpose must be {PURPOSE!r}: files are for batches here, got {purpose[:40]!r}", "purpose")
    anchor = fields.pop("expires_after[anchor]", None)
    seconds = fields.pop("expires_after[seconds]", None)
    for name in fields:
        raise invalid(f"Unknown parameter: {name[:80]!r}.", name[:80], "unknown_parameter")
    if anchor is None and seconds is None:
        return int(time.time()) + KEEP_S
    return int(time.time()) + keep_seconds(anchor, int(seconds) if seconds and seconds.isdigit() else None)


def keep_seconds(anchor: Any, seconds: Any, param: str = "expires_after") -> int:
    """The time for which a file is kept, from OpenAI's policy object."""
    if anchor != "created_at":
        raise invalid(f'{param}.anchor must be "created_at"', f"{param}.anchor")
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not MIN_KEEP_S <= seconds <= MAX_KEEP_S:
        message = f"{param}.seconds must be an integer from {MIN_KEEP_S} to {MAX_KEEP_S}"
        raise invalid(message, f"{param}.seconds")
    return seconds


async def _list(request: Request) -> Response:
    shelf = service_of(gateway_of(request)).shelf
    found = await asyncio.to_thread(shelf.files, request.state.owner)
    purpose = request.query_params.get("purpose")
    items = [item.shown() for item in found if purpose is None or item.purpose == purpose]
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid(f"order must be asc or desc, got {order[:40]!r}", "order")
    return JSONResponse(page(request, items if order == "asc" else items[::-1], most=MOST_LISTED, default=MOST_LISTED))


def page(request: Request, items: list[dict[str, Any]], *, most: int, default: int) -> dict[str, Any]:
    """OpenAI's list object: `limit` items after the one that `after` names."""
    text = request.query_params.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 7 and 1 <= int(text) <= most):
        raise invalid(f"limit must be an integer from 1 to {most}, got {text[:40]!r}", "limit")
    after = request.query_params.get("after")
    begin = 0
    if after is not None:
        begin = next((index + 1 for index, item in enumerate(items) if item["id"] == after), -1)
        if begin < 0:
            raise invalid(f"after names {after[:80]!r}, which is not in the list", "after")
    shown = items[begin : begin + int(text)]
    ends = {"first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None}
    return {"object": "list", "data": shown, **ends, "has_more": begin + len(shown) < len(items)}


async def _describe(request: Request) -> Response:
    found = await _found(request)
    return JSONResponse(found.shown())


async def _found(request: Request) -> Description:
    shelf, name = service_of(gateway_of(request)).shelf, request.path_params["id"]
    try:
        return await asyncio.to_thread(shelf.file, request.state.owner, name)
    except NotFound:
        raise unknown_file(name) from None


def unknown_file(name: str, param: str = "id") -> ApiError:
    return ApiError(404, f"No such File object: {name[:80]!r}", param=param, code="not_found")


async def _delete(request: Request) -> Response:
    shelf, owner, name = service_of(gateway_of(request)).shelf, request.state.owner, request.path_params["id"]
    if name in await asyncio.to_thread(shelf.inputs, owner):
        raise ApiError(409, f"file {name[:80]} is the input of a batch that is not over: cancel that first")
    try:
        await asyncio.to_thread(shelf.remove, owner, name)
    except NotFound:
        raise unknown_file(name) from None
    return JSONResponse({"id": name, "object": "file", "deleted": True})


async def _content(request: Request) -> Any:
    gateway = gateway_of(request)
    found = await _found(request)
    try:
        file, size = await asyncio.to_thread(service_of(gateway).shelf.open, request.state.owner, found.id)
    except NotFound:
        raise unknown_file(found.id) from None
    return _Content(gateway, file, size, found.filename)


class _Content:
    """The bytes of a file, read as fast as the client takes them."""

    def __init__(self, gateway: Gateway, file: BinaryIO, size: int, filename: str) -> None:
        self._gateway, self._file, self._size = gateway, file, size
        self._headers = {
            "content-type": "application/octet-stream",
            "content-length": str(size),
            "content-disposition": f"attachment; filename*=UTF-8''{quote(filename)}",
            "x-content-type-options": "nosniff",
            "cache-control": "no-store",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.encode(), value.encode("latin-1")) for name, value in self._headers.items()]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            done = 0
            while done < self._size:
                data = await asyncio.to_thread(os.pread, self._file.fileno(), min(CHUNK_BYTES, self._size - done), done)
                if not data:
                    raise OSError("the file is shorter than it was")
                done += len(data)
                async with asyncio.timeout(self._gateway.config.send_timeout_s):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (TimeoutError, OSError):
            # Half an answer must not look like a whole one.
            self._gateway.abort(scope.get("client"))
        finally:
            with contextlib.suppress(OSError):
                self._file.close()


ROUTES = (
    Route("/v1/files", _create, methods=["POST"]),
    Route("/v1/files", _list, methods=["GET"]),
    Route("/v1/files/{id}", _describe, methods=["GET"]),
    Route("/v1/files/{id}", _delete, methods=["DELETE"]),
    Route("/v1/files/{id}/content", _content, methods=["GET"]),
)
