"""A request body read field by field, and its arrival within limits.

Kept: every field is read with its type and range, an error names the field, and a name that nobody asked for is
refused with the nearest known one. A field that is null counts as absent.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import math
from collections.abc import Iterable
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from broker.gateway.errors import ApiError, invalid

__all__ = ["Body", "digest_text", "read_body"]


async def read_body(request: Request, *, max_bytes: int, timeout_s: float) -> Any:
    """The JSON value of a request. 413, 415, 408 or 400 as an `ApiError`.

    Only `application/json` is read: no web page of another origin can send that without being asked first.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"Content-Type must be application/json, got {kind[:60]!r}", code="unsupported_media_type")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(int(declared), max_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise _too_large(size, max_bytes)
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the request did not arrive in {timeout_s:g} s", code="request_timeout") from None
    except ClientDisconnect:
        raise ApiError(400, "the client went away before its request was complete") from None
    return _parse(b"".join(parts))


def _too_large(size: int, limit: int) -> ApiError:
    message = f"the request body has {size} bytes or more; the limit is {limit}"
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data, parse_constant=_no_constant)
    except RecursionError:
        raise invalid("the request body is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        where = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise invalid(f"the request body is no valid JSON{where}", code="invalid_json") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def digest_text(value: Any) -> str:
    """One text for all spellings of the same JSON value, so that two bodies can be compared."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        raise invalid("the request body is nested too deeply", code="invalid_json") from None


class Body:
    """The fields of one object; `finish` must be called once all are read."""

    def __init__(self, value: object, where: str = "") -> None:
        """`where` stands before the names in errors, as in `stream_options.`."""
        if not isinstance(value, dict):
            raise invalid(f"{where.rstrip('.') or 'the request body'} must be a JSON object", where.rstrip(".") or None)
        self._values = value
        self._where = where
        self._known: dict[str, None] = {}

    def get(self, name: str) -> Any:
        """The value as it is, or None."""
        self._known[name] = None
        return self._values.get(name)

    def fail(self, name: str, what: str) -> ApiError:
        """400 saying what `name` must be, with a glimpse of the value if it is no text of the user's."""
        value = self._values.get(name)
        got = json.dumps(value)[:40] if isinstance(value, bool | int | float) else _kind(value)
        param = self._where + name
        return invalid(f"{param} must be {what}, got {got}", param)

    def text(self, name: str, *, most: int = 256) -> str | None:
        value = self.get(name)
        if value is not None and (not isinstance(value, str) or len(value) > most):
            raise self.fail(name, f"a string of at most {most} characters")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.fail(name, "true or false")
        return default if value is None else value

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.get(name)
        if value is None:
            return None
        fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not fits or not low <= value <= high:
            raise self.fail(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def object(self, name: str) -> dict[str, Any] | None:
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.fail(name, "an object")
        return value

    def array(self, name: str, *, most: int) -> list[Any] | None:
        value = self.get(name)
        if value is not None and (not isinstance(value, list) or len(value) > most):
            raise self.fail(name, f"an array of at most {most} entries")
        return value

    def ignore(self, *names: str) -> None:
        """Fields that are accepted and have no effect."""
        self._known.update(dict.fromkeys(names))

    def refuse(self, name: str, why: str, *, allowed: Iterable[Any] = ()) -> None:
        """A field that would change the answer and cannot be honoured, unless it is null, empty or `allowed`."""
        value = self.get(name)
        if value in (None, [], {}, "") or any(value == other and type(value) is type(other) for other in allowed):
            return
        param = self._where + name
        raise invalid(f"{param} is not supported: {why}", param, "unsupported_parameter")

    def finish(self) -> None:
        """Refuses what was not asked for, with the nearest known name."""
        for name in self._values:
            if name not in self._known:
                near = difflib.get_close_matches(name, self._known, 1)
                hint = f" Did you mean {self._where + near[0]!r}?" if near else ""
                param = self._where + name[:80]
                raise invalid(f"Unknown parameter: {param!r}.{hint}", param, "unknown_parameter")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", type(None): "null"}
    return names.get(type(value), type(value).__name__)
