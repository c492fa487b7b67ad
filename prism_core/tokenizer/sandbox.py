"""The child process in which chat templates run: a script, started by path, that imports nothing of Prism.

A template comes out of a model file and is untrusted. It runs in jinja2's immutable sandbox, and, since no check in
Python can interrupt `10**10**10` or bound `'x'*10**10`, in a process of its own with hard limits on address space, on
CPU time for each request (the kernel's timer kills it), and on files and processes. The parent kills it too if it does
not answer. It ends when its standard input closes, so it outlives its parent by one request at most.

Frames both ways: four bytes of length, little endian, then JSON. Request: `source`, `variables`, `overrides` (a list of
variable changes, one rendering for each), `now`. Reply: a list of `{"text"}` or `{"error", "message"}`. Arguments: CPU
seconds for a request, bytes of address space, characters of a rendering, folders to import from.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

if __name__ == "__main__":
    sys.path.extend(sys.argv[4:])  # where the parent finds jinja2

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_MESSAGE_CHARS = 500


class Refused(Exception):
    """The template called `raise_exception`."""


class OutputTooLong(Exception):
    """The rendering passed its limit."""


class GenerationTag(Extension):
    """`{% generation %}` marks the answer for training masks; here its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object = "") -> NoReturn:
    raise Refused(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escaping of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, GenerationTag]
    )
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    return made


_ENVIRONMENT = environment()
_compiled = lru_cache(maxsize=16)(_ENVIRONMENT.from_string)


def _strftime_at(now: float) -> Callable[[str], str]:
    moment = datetime.fromtimestamp(now)
    return lambda form: moment.strftime(form)


def render(source: str, variables: dict[str, Any], max_chars: int) -> str:
    """One rendering, stopped once it is too long."""
    parts: list[str] = []
    length = 0
    for part in _compiled(source).generate(**variables):
        length += len(part)
        if length > max_chars:
            raise OutputTooLong
        parts.append(part)
    return "".join(parts)


def answer(request: dict[str, Any], max_chars: int) -> Iterator[dict[str, str]]:
    clock = {"strftime_now": _strftime_at(request["now"])}
    for override in request["overrides"]:
        try:
            yield {"text": render(request["source"], {**clock, **request["variables"], **override}, max_chars)}
        except Refused as error:
            yield {"error": "refused", "message": _short(error)}
        except OutputTooLong:
            yield {"error": "length", "message": ""}
        except TemplateSyntaxError as error:
            yield {"error": "syntax", "message": f"line {error.lineno}: {_short(error.message or '')}"}
        except MemoryError:
            yield {"error": "memory", "message": ""}
        except RecursionError:
            yield {"error": "failed", "message": "it is nested too deeply"}
        except TemplateError as error:
            yield {"error": "failed", "message": _short(error.message or type(error).__name__)}
        except Exception as error:
            yield {"error": "failed", "message": f"{type(error).__name__}: {_short(error)}"}


def _short(text: object) -> str:
    return " ".join(str(text).split())[:MAX_MESSAGE_CHARS]


def _confine(memory_bytes: int) -> None:
    limits = {"RLIMIT_AS": memory_bytes, "RLIMIT_CORE": 0, "RLIMIT_FSIZE": 0, "RLIMIT_NPROC": 0}
    for name, limit in limits.items():
        # a limit that this system does not know, or that is lower already, leaves the others in force
        with suppress(AttributeError, ValueError, OSError):
            resource.setrlimit(getattr(resource, name), (limit, limit))


def _read(count: int) -> bytes | None:
    data = sys.stdin.buffer.read(count)
    return data if len(data) == count else None


def _write(value: object) -> None:
    data = json.dumps(value, ensure_ascii=True).encode()
    view = memoryview(struct.pack("<I", len(data)) + data)
    while view:
        view = view[os.write(1, view) :]


def main(cpu_seconds: float, memory_bytes: int, max_chars: int) -> None:
    _confine(memory_bytes)
    _write("ready")
    while (header := _read(4)) is not None:
        body = _read(struct.unpack("<I", header)[0])
        if body is None:
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # its signal, unhandled, ends the process
        replies = list(answer(json.loads(body), max_chars))
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(replies)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
