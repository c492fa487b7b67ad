"""Checks every line of a batch file before the first one runs, and makes its plan.

Kept: the file is read once, front to back, one line at a time; whatever its size, memory holds one line and about 200
bytes for each. Each problem names its line. A file with a problem is not run at all.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from broker.batch.errors import BadFile, BadLine, Problem
from broker.batch.lines import MAX_LINE_BYTES, opening, read_line
from broker.batch.plan import BYTE_ORDER_MARK, Plan
from broker.batch.prefix import LONGEST, Prefixes
from broker.gateway.config import GatewayConfig
from broker.keys import new_ulid

__all__ = ["MAX_BYTES", "MAX_LINES", "digest", "validate"]

MAX_LINES = 50_000
MAX_BYTES = 200 << 20
MAX_PROBLEMS = 100
"""Problems that are told one by one; the rest are counted."""
MAX_MODELS = 1_000
REPORT_LINES = 16

_CHUNK = 1 << 20


def validate(
    path: Path,
    config: GatewayConfig,
    *,
    endpoint: str = "",
    model: str = "",
    batch: str = "",
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
    """The plan of a file of which every line may be run; else `BadFile` with its problems.

    `report` is called with bytes read and in all, every few lines; it may raise to stop. Names as for `read_line`.
    """
    with _opened(path) as file:
        return _Pass(file, config, endpoint, model, report).run(batch or new_ulid())


def digest(path: Path, report: Callable[[int, int], None] = lambda done, total: None) -> str:
    """SHA-256 of a file, in hexadecimal."""
    found, done = hashlib.sha256(), 0
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        while part := file.read(_CHUNK):
            found.update(part)
            done += len(part)
            report(done, size)
    return found.hexdigest()


def _opened(path: Path) -> BinaryIO:
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise BadFile([Problem(None, "unreadable", f"cannot read {path}: {error.strerror}")]) from error
    facts = os.fstat(file.fileno())
    problem = None
    if not stat.S_ISREG(facts.st_mode):
        problem = Problem(None, "not_a_file", f"{path} is no regular file: a batch is read more than once")
    elif facts.st_size > MAX_BYTES:
        problem = Problem(None, "file_too_large", f"{path} has {facts.st_size} bytes; the limit is {MAX_BYTES}")
    if problem is not None:
        file.close()
        raise BadFile([problem])
    return file


class _Pass:
    """One reading of a file."""

    def __init__(
        self, file: BinaryIO, config: GatewayConfig, endpoint: str, model: str, report: Callable[[int, int], None]
    ) -> None:
        self._file, self._config, self._endpoint, self._model, self._report = file, config, endpoint, model, report
        self._size = os.fstat(file.fileno()).st_size
        self._hash = hashlib.sha256()
        self._offsets = array("Q")
        self._end = 0
        self._prefixes = Prefixes()
        self._seen: dict[bytes, int] = {}
        self._models: dict[str, int] = {}
        self._problems: list[Problem] = []
        self._total = 0
        self._line = 0

    def run(self, batch: str) -> Plan:
        blank: int | None = None
        while data := self._next():
            if not data.strip():
                # Blank lines may only end the file.
                blank = blank or self._line
                continue
            if blank is not None:
                self._add(Problem(blank, "blank_line", "is blank"))
                blank = None
            if self._line > MAX_LINES:
                self._add(Problem(self._line, "too_many_lines", f"the file has more than {MAX_LINES} lines"))
                break
            self._take(data)
            if self._line % REPORT_LINES == 0:
                self._report(self._file.tell(), self._size)
        if not self._offsets and not self._total:
            self._add(Problem(None, "empty_file", "the file holds no request"))
        if self._total:
            raise BadFile(self._problems, self._total)
        order, families = self._prefixes.order()
        self._offsets.append(self._end)
        return Plan(
            batch=batch,
            sha256=self._hash.hexdigest(),
            size=self._size,
            offsets=self._offsets,
            order=order,
            families=families,
            endpoint=self._endpoint,
            model=self._model,
            models=self._models,
            created=int(time.time()),
        )

    def _next(self) -> bytes:
        """The next line with its newline; of one that is too long, its beginning."""
        data = self._file.readline(MAX_LINE_BYTES + 2)
        self._hash.update(data)
        if data:
            self._line += 1
        return data

    def _take(self, data: bytes) -> None:
        begin = self._file.tell() - len(data)
        if len(data.rstrip(b"\r\n")) > MAX_LINE_BYTES:
            self._skip(data)
            self._add(Problem(self._line, "line_too_long", f"is longer than {MAX_LINE_BYTES} bytes"))
            return
        self._offsets.append(begin)
        self._end = self._file.tell()
        try:
            line = read_line(
                data.removeprefix(BYTE_ORDER_MARK) if not begin else data,
                self._config,
                endpoint=self._endpoint,
                model=self._model,
            )
            self._check(line.custom_id, line.asked.model)
        except BadLine as error:
            self._add(error.at(self._line))
        else:
            self._prefixes.add(opening(line, LONGEST))

    def _check(self, custom_id: str, model: str) -> None:
        first = self._seen.setdefault(hashlib.blake2b(custom_id.encode(), digest_size=16).digest(), self._line)
        if first != self._line:
            message = f"custom_id {custom_id[:80]!r} was used before, in line {first}"
            raise BadLine(message, "duplicate_custom_id", "custom_id")
        if model and model not in self._models:
            if len(self._models) >= MAX_MODELS:
                raise BadLine(f"the file names more than {MAX_MODELS} models", "too_many_models", "body.model")
            self._models[model] = self._line

    def _skip(self, data: bytes) -> None:
        while data and not data.endswith(b"\n"):
            data = self._file.readline(_CHUNK)
            self._hash.update(data)

    def _add(self, problem: Problem) -> None:
        self._total += 1
        if len(self._problems) < MAX_PROBLEMS:
            self._problems.append(problem)
