"""A file that arrives as `multipart/form-data`, written to disk while it comes.

Kept: memory holds one part of the network's at a time, whatever the file's size; a file over the limit is refused when
the limit is passed, one that stops coming after `idle_s`. One file and a few short fields are read; more is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from broker.batch.shelf import Upload
from broker.gateway.errors import ApiError, invalid

__all__ = ["Form", "read_upload"]

MAX_FIELDS = 16
MAX_FIELD_BYTES = 1_024
MAX_FILENAME_CHARS = 255
OVERHEAD_BYTES = 64 << 10
"""What headers and boundaries may add to the file."""


@dataclass
class Form:
    """What came beside the file."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None
    """None: there was no file."""


async def read_upload(request: Request, upload: Upload, *, max_bytes: int, idle_s: float) -> Form:
    """Writes the field `file` of the body to `upload`. 400, 408, 413 or 415 as an `ApiError`."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise ApiError(415, "Content-Type must be multipart/form-data with a boundary", code="unsupported_media_type")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes + OVERHEAD_BYTES:
        raise _too_large(max_bytes)
    reading = _Reading(upload, max_bytes)
    chunks = request.stream()
    try:
        parser = MultipartParser(boundary, reading.callbacks())
        while True:
            async with asyncio.timeout(idle_s):
                chunk = await anext(chunks, None)
            if chunk is None:
                break
            parser.write(chunk)
        parser.finalize()
    except TimeoutError:
        raise ApiError(408, f"nothing of the file came for {idle_s:g} s", code="request_timeout") from None
    except ClientDisconnect:
        raise ApiError(400, "the client went away before its file was complete") from None
    except FormParserError as error:
        raise invalid(f"the body is no valid multipart/form-data: {error}", code="invalid_multipart") from None
    if not reading.ended:
        raise invalid("the body ends in the middle of its multipart/form-data", code="invalid_multipart")
    return reading.form


def _too_large(limit: int) -> ApiError:
    message = f"the file is larger than the limit of {limit} bytes"
    return ApiError(413, message, code="file_too_large", headers={"Connection": "close"})


class _Reading:
    """The parser's events, gathered."""

    def __init__(self, upload: Upload, max_bytes: int) -> None:
        self.form = Form()
        self.ended = False
        self._upload = upload
        self._max_bytes = max_bytes
        self._parts = 0
        self._header = b""
        self._value = b""
        self._name = ""
        self._is_file = False
        self._text = b""

    def callbacks(self) -> Any:
        calls: dict[str, Callable[..., None]] = {
            "on_part_begin": self._part_begin,
            "on_part_data": self._part_data,
            "on_part_end": self._part_end,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_end": self._end,
        }
        return calls

    def _part_begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_FIELDS:
            raise invalid(f"the form has more than {MAX_FIELDS} parts", code="invalid_multipart")
        self._name, self._is_file, self._text = "", False, b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            self._name = options.get(b"name", b"").decode(errors="replace")
            if b"filename" in options and self._name == "file":
                if self.form.filename is not None:
                    raise invalid("give one file only", "file")
                self._is_file = True
                self.form.filename = _base_name(options[b"filename"].decode(errors="replace"))
        self._header = self._value = b""

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            if self._upload.size + end - start > self._max_bytes:
                raise _too_large(self._max_bytes)
            self._upload.write(data[start:end])
            return
        self._text += data[start:end]
        if len(self._text) > MAX_FIELD_BYTES:
            raise invalid(f"field {self._name[:40]!r} is longer than {MAX_FIELD_BYTES} bytes", self._name[:40])

    def _part_end(self) -> None:
        if not self._is_file:
            self.form.fields[self._name] = self._text.decode(errors="replace")

    def _end(self) -> None:
        self.ended = True


def _base_name(given: str) -> str:
    """The last part of a path, printable, short: it is shown, never opened."""
    name = given.replace("\\", "/").rpartition("/")[2]
    return "".join(letter for letter in name if letter.isprintable())[:MAX_FILENAME_CHARS] or "file"
