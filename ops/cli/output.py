"""What the commands print: data on standard output, progress and errors on standard error."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

PLAIN_LINE_SECONDS = 10.0
WIDE = 200
"""Columns of a table that goes into a pipe or file, where no terminal limits it."""

stderr = Console(stderr=True, highlight=False)


def print_json(value: object) -> None:
    print(json.dumps(value, ensure_ascii=False, default=str), flush=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table for people; a terminal's width does not cut it when the output is piped."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    width = None if sys.stdout.isatty() else WIDE
    Console(width=width, highlight=False).print(table)


def say(text: str) -> None:
    """One line for a person, never part of the data."""
    stderr.print(f"prism: {text}", markup=False, soft_wrap=True)


def human_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def parse_size(text: str) -> int:
    """`4k` -> 4096, `2G` -> 2 GiB, plain digits as they are; ValueError otherwise."""
    factors = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
    body = text.strip().lower().removesuffix("ib").removesuffix("b")
    factor = factors.get(body[-1:], 1)
    digits = body[:-1] if factor > 1 else body
    if not digits.isascii() or not digits.isdigit():
        raise ValueError(f"{text!r} is not a size such as 4096, 32k or 2G")
    return int(digits) * factor


class StepProgress:
    """Progress of long work: a bar on a terminal, a plain line every ten seconds elsewhere."""

    def __init__(self, bar: Progress | None) -> None:
        self._bar = bar
        self._tasks: dict[str, object] = {}
        self._next_line = time.monotonic() + PLAIN_LINE_SECONDS

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._bar is not None:
            self._draw(self._bar, what, done, total)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + PLAIN_LINE_SECONDS
            say(f"{what}: {done} of {total}" if total else what)

    def _draw(self, bar: Progress, what: str, done: int, total: int) -> None:
        task = self._tasks.get(what)
        if task is None:
            task = self._tasks[what] = bar.add_task(what, total=total or None)
        bar.update(task, completed=done, total=total or None)  # type: ignore[arg-type]


@contextmanager
def progress() -> Iterator[StepProgress]:
    """A `StepProgress` that is drawn while the block runs."""
    if not stderr.is_terminal:
        yield StepProgress(None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr, transient=True) as bar:
        yield StepProgress(bar)
