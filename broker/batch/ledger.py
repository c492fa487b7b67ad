"""Finished lines on disk: the one truth about what a batch has done.

Two files grow while a batch runs, `.part` of the output and of the errors. A line is recorded once its text is in one
of them and synced; only then is it counted and never run again. When all lines are recorded, both get their names.

Kept: one writer, who has the batch's lock (`lock`) and, on top, one on each `.part`; whoever reads meanwhile sees whole
lines, save perhaps the last one; a torn last line of a crash is dropped when the next writer opens; each line is in
exactly one of the finished files, because an error that a later try replaced is left out of them. A write that fails
(a full disk) is taken back and recorded nowhere.
"""

from __future__ import annotations

import contextlib
import json
import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.batch.errors import FilesFailed
from broker.batch.lock import lock_file
from broker.batch.plan import Plan, sync_folder
from broker.batch.totals import Totals

__all__ = ["Entry", "Ledger", "part_of", "recorded"]

NOWHERE = 0xFFFFFFFFFFFFFFFF
TORN = -1
OPEN, DONE, FAILED = 0, 1, 2
"""What has become of a line."""


@dataclass(frozen=True)
class Entry:
    """A finished line."""

    index: int
    attempt: int
    ok: bool
    text: bytes
    """The line of output, without its newline."""
    usage: dict[str, Any]
    """The answer's own usage object; empty if there is none."""


def part_of(path: Path) -> Path:
    return path.with_name(path.name + ".part")


@dataclass
class _Part:
    """One growing file."""

    file: int
    path: Path
    final: Path
    size: int = 0
    dirty: bool = False
    """It holds lines that do not belong into the finished file."""


class Ledger:
    """The finished lines of `plan`, in two files. Made by whoever holds the batch's lock, and closed before it."""

    def __init__(self, plan: Plan, output: Path, errors: Path) -> None:
        """Reads what earlier runs recorded. `FilesFailed`; `Busy` if a process without the batch's lock writes them."""
        self._plan = plan
        self.state = bytearray(plan.count)
        """OPEN, DONE or FAILED by index."""
        self.attempts = array("H", bytes(2 * plan.count))
        """The last try recorded of each line; 0 before the first."""
        self.totals = Totals(plan.count)
        self._at = array("Q", [NOWHERE]) * plan.count
        self._parts: list[_Part] = []
        try:
            self._good, self._bad = self._open(output), self._open(errors)
            self._scan(self._good, ok=True)
            self._scan(self._bad, ok=False)
        except OSError as error:
            self.close()
            raise FilesFailed(f"cannot write {part_of(output)}: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def _open(self, final: Path) -> _Part:
        """The `.part` of a file, a finished one moved back to it."""
        path = part_of(final)
        if not path.exists():
            with contextlib.suppress(FileNotFoundError):
                os.rename(final, path)
        part = _Part(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644), path, final)
        self._parts.append(part)
        lock_file(part.file, path)
        sync_folder(path.parent)
        return part

    def close(self) -> None:
        """Gives up writing; what is recorded stays."""
        for part in self._parts:
            os.close(part.file)
        self._parts = []

    def retry_failed(self) -> int:
        """Opens failed lines for another try; returns how many. Their errors stay until that try is recorded."""
        count = 0
        for index, state in enumerate(self.state):
            if state == FAILED:
                self.state[index] = OPEN
                count += 1
        self.totals.failed -= count
        return count

    def record(self, entries: Iterable[Entry]) -> None:
        """Writes and syncs finished lines, then counts them. `FilesFailed` if that failed: then none is recorded."""
        entries = [entry for entry in entries if self.state[entry.index] == OPEN]
        for part, ok in ((self._good, True), (self._bad, False)):
            group = [entry for entry in entries if entry.ok is ok]
            if not group:
                continue
            begin = part.size
            self._append(part, b"".join(entry.text + b"\n" for entry in group))
            for entry in group:
                self._note(part, entry, begin)
                begin += len(entry.text) + 1

    def finish(self, *, ordered: bool = False) -> None:
        """Gives both files their names (and no file to errors that there are none of), and closes."""
        self._publish(self._bad, ordered, wanted=FAILED)
        self._publish(self._good, ordered, wanted=DONE)
        self.close()

    def _note(self, part: _Part, entry: Entry, at: int) -> None:
        """Counts an entry that stands at `at` of `part`."""
        index = entry.index
        if self._at[index] != NOWHERE:
            # Only an error is ever tried again, so this replaces one.
            self._bad.dirty = True
        self.state[index] = DONE if entry.ok else FAILED
        self.attempts[index] = max(self.attempts[index], entry.attempt)
        self._at[index] = at
        self.totals.add(entry.ok, entry.usage)

    def _append(self, part: _Part, data: bytes) -> None:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(part.file, view) :]
            os.fsync(part.file)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(part.file, part.size)
            raise FilesFailed(f"cannot write {part.path}: {error.strerror}") from error
        part.size += len(data)

    def _scan(self, part: _Part, ok: bool) -> None:
        for at, end, entry in _entries(self._plan, part.path, ok):
            if end == TORN:
                os.ftruncate(part.file, at)
                break
            part.size = end
            if entry is None or not self._counts(entry):
                part.dirty = True
            else:
                self._note(part, entry, at)

    def _counts(self, entry: Entry) -> bool:
        """Whether a line found on disk is the one that stands for its index, so far."""
        known = self.state[entry.index]
        if known == FAILED and entry.attempt > self.attempts[entry.index]:
            self.totals.failed -= 1
            return True
        return known == OPEN

    def _publish(self, part: _Part, ordered: bool, wanted: int) -> None:
        final = part.final
        if wanted == FAILED and not self.totals.failed:
            part.path.unlink(missing_ok=True)
            final.unlink(missing_ok=True)
        elif ordered or part.dirty:
            temporary = final.with_name(f"{final.name}.{os.getpid()}.tmp")
            try:
                self._copy(part, temporary, ordered, wanted)
            except OSError as error:
                temporary.unlink(missing_ok=True)
                raise FilesFailed(f"cannot write {temporary}: {error.strerror}") from error
            os.replace(temporary, final)
            part.path.unlink()
        else:
            os.replace(part.path, final)
        sync_folder(final.parent)

    def _copy(self, part: _Part, to: Path, ordered: bool, wanted: int) -> None:
        indices: Iterable[int] = (index for index, state in enumerate(self.state) if state == wanted)
        if not ordered:
            indices = sorted(indices, key=self._at.__getitem__)
        with open(to, "wb") as copy, open(part.path, "rb") as source:
            for index in indices:
                source.seek(self._at[index])
                copy.write(source.readline())
            copy.flush()
            os.fsync(copy.fileno())


def _entries(plan: Plan, path: Path, ok: bool) -> Iterator[tuple[int, int, Entry | None]]:
    """(begin, end, line) of each whole line; None for what is no line at all. The end of a torn last one is `TORN`."""
    at = 0
    with open(path, "rb") as file:
        for data in file:
            if not data.endswith(b"\n"):
                yield at, TORN, None
                return
            yield at, at + len(data), _entry(plan, path, data[:-1], ok)
            at += len(data)


def _entry(plan: Plan, path: Path, data: bytes, ok: bool) -> Entry | None:
    """A recorded line, or None for what a crash left; `FilesFailed` for the line of another batch."""
    try:
        value = json.loads(data)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    found = plan.parse_id(value.get("id"))
    if found is None:
        raise FilesFailed(f"{path} holds a line that is none of this batch: id {str(value.get('id'))[:80]}")
    response = value.get("response")
    body = response.get("body") if isinstance(response, dict) else None
    usage = body.get("usage") if isinstance(body, dict) else None
    return Entry(*found, ok=ok, text=data, usage=usage if isinstance(usage, dict) else {})


def recorded(plan: Plan, output: Path, errors: Path) -> Totals:
    """What finished files hold; they are only read."""
    totals = Totals(plan.count)
    for path, ok in ((output, True), (errors, False)):
        if path.exists():
            for _, _, entry in _entries(plan, path, ok):
                if entry is not None:
                    totals.add(ok, entry.usage)
    return totals
