"""`/v1/batches`: create, follow, list and cancel batches; any gateway of the pool answers for all of them."""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from broker.batch.lines import ENDPOINTS
from broker.batch.records import FINAL, new_record, shown
from broker.batch.shelf import Shelf
from broker.errors import NotFound
from broker.gateway.body import Body, digest_text
from broker.gateway.errors import ApiError, invalid
from broker.gateway.gateway import gateway_of
from broker.gateway.routes.files import PURPOSE, keep_seconds, page, service_of, unknown_file
from broker.keys import new_ulid

__all__ = ["ROUTES"]

MAX_HOURS = 168
MAX_ACTIVE = 100
"""Batches of one key that are not over."""
MAX_PAIRS, MAX_NAME_CHARS, MAX_VALUE_CHARS = 16, 64, 512


async def _create(request: Request) -> Response:
    gateway, owner = gateway_of(request), request.state.owner
    service = service_of(gateway)
    value = await gateway.body(request)
    body = Body(value)
    name = f"batch_{new_ulid()}"
    record = _read(body, name)
    await asyncio.to_thread(_check_input, service.shelf, owner, record["input_file_id"])
    key = request.headers.get("idempotency-key")
    replayed = False
    if key is not None:
        name, replayed = await asyncio.to_thread(_claim, service.shelf, owner, key, digest_text(value), name)
    if not replayed:
        await asyncio.to_thread(_check_count, service.shelf, owner)
        gateway.rate.take(owner)
        await asyncio.to_thread(service.shelf.add_batch, owner, name, {**record, "id": name})
        service.poke()
    request.state.log["batch"] = name
    headers = {"Idempotency-Replayed": "true"} if replayed else {}
    return JSONResponse(await asyncio.to_thread(_shown, service.shelf, owner, name), headers=headers)


def _read(body: Body, name: str) -> dict[str, Any]:
    """The record of a new batch; `ApiError` (400) names the field at fault."""
    source = body.text("input_file_id")
    if source is None:
        raise invalid("input_file_id is required", "input_file_id", "missing_required_parameter")
    endpoint = body.text("endpoint")
    if endpoint not in ENDPOINTS:
        raise body.fail("endpoint", " or ".join(ENDPOINTS))
    window = body.text("completion_window")
    hours = int(window[:-1]) if window and len(window) <= 4 and window[-1:] == "h" and window[:-1].isdecimal() else 0
    if window is None or not 1 <= hours <= MAX_HOURS:
        raise body.fail("completion_window", f'"24h" (or another number of hours up to "{MAX_HOURS}h")')
    keep = body.object("output_expires_after")
    record = new_record(
        name,
        endpoint=endpoint,
        input_file=source,
        window=window,
        expires_at=int(time.time()) + hours * 3_600,
        files=(f"file-{new_ulid()}", f"file-{new_ulid()}"),
        metadata=_metadata(body),
        keep_s=None if keep is None else keep_seconds(keep.get("anchor"), keep.get("seconds"), "output_expires_after"),
    )
    body.finish()
    return record


def _metadata(body: Body) -> dict[str, str] | None:
    found = body.object("metadata")
    if found is None:
        return None
    for key, value in found.items():
        if not isinstance(value, str) or len(key) > MAX_NAME_CHARS or len(value) > MAX_VALUE_CHARS:
            what = f"strings of at most {MAX_VALUE_CHARS} characters under names of at most {MAX_NAME_CHARS}"
            raise invalid(f"metadata must hold {what}", "metadata")
    if len(found) > MAX_PAIRS:
        raise invalid(f"metadata has {len(found)} entries; the limit is {MAX_PAIRS}", "metadata")
    return found


def _check_input(shelf: Shelf, owner: str, name: str) -> None:
    try:
        found = shelf.file(owner, name)
    except NotFound:
        raise unknown_file(name, "input_file_id") from None
    if found.purpose != PURPOSE:
        raise invalid(f"file {name} has purpose {found.purpose!r}, not {PURPOSE!r}", "input_file_id")


def _check_count(shelf: Shelf, owner: str) -> None:
    if sum(its_owner == owner for its_owner, _ in shelf.active()) >= MAX_ACTIVE:
        message = f"this key has {MAX_ACTIVE} batches that are not over, the most it may: try again later"
        raise ApiError(429, message, kind="rate_limit_error", code="too_many_batches", headers={"Retry-After": "60"})


def _claim(shelf: Shelf, owner: str, key: str, body: str, name: str) -> tuple[str, bool]:
    """The batch that an idempotency key stands for, and whether an earlier call made it; 409 for another body."""
    first, digest = shelf.claim(owner, key, name, hashlib.sha256(body.encode()).hexdigest())
    if digest != hashlib.sha256(body.encode()).hexdigest():
        message = "this Idempotency-Key was used with a different batch"
        raise ApiError(409, message, code="conflict", headers={"x-should-retry": "false"})
    try:
        shelf.batch(owner, first)
    except NotFound:
        return first, False  # the earlier call broke off before its batch was there
    return first, first != name


def _shown(shelf: Shelf, owner: str, name: str) -> dict[str, Any]:
    try:
        return shown(shelf.batch(owner, name), shelf.cancelled_at(owner, name))
    except NotFound:
        raise ApiError(404, f"No batch found with id {name[:80]!r}.", param="id", code="not_found") from None


async def _retrieve(request: Request) -> Response:
    shelf = service_of(gateway_of(request)).shelf
    return JSONResponse(await asyncio.to_thread(_shown, shelf, request.state.owner, request.path_params["id"]))


async def _list(request: Request) -> Response:
    shelf, owner = service_of(gateway_of(request)).shelf, request.state.owner
    names = await asyncio.to_thread(shelf.batches, owner)
    listed = page(request, [{"id": name} for name in names], most=100, default=20)
    listed["data"] = [await asyncio.to_thread(_shown, shelf, owner, item["id"]) for item in listed["data"]]
    return JSONResponse(listed)


async def _cancel(request: Request) -> Response:
    service, owner, name = service_of(gateway_of(request)), request.state.owner, request.path_params["id"]
    now = await asyncio.to_thread(_shown, service.shelf, owner, name)
    if now["status"] in FINAL and now["status"] != "cancelled":
        message = f"batch {name} is {now['status']}: it can no longer be cancelled"
        raise ApiError(409, message, code="batch_over", headers={"x-should-retry": "false"})
    if now["status"] not in FINAL:
        await asyncio.to_thread(service.cancel, owner, name)
        now = await asyncio.to_thread(_shown, service.shelf, owner, name)
    return JSONResponse(now)


ROUTES = (
    Route("/v1/batches", _create, methods=["POST"]),
    Route("/v1/batches", _list, methods=["GET"]),
    Route("/v1/batches/{id}", _retrieve, methods=["GET"]),
    Route("/v1/batches/{id}/cancel", _cancel, methods=["POST"]),
)
