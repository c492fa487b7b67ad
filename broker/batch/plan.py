"""The index of one batch's input file: where each line stands, in which order lines are fed, which begin alike.

Kept: a plan is written once, before the first line runs, and names the input by its SHA-256, so a resumed batch meets
the very lines that were checked. 16 bytes a line, in memory and on disk; the lines themselves stay in the file.
"""

from __future__ import annotations

import os
import re
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from broker.batch.errors import FilesFailed
from prism_core import codec

__all__ = ["BYTE_ORDER_MARK", "Plan", "PlanUnreadable", "line_id", "request_ids", "sync_folder", "written_whole"]

VERSION = 1
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""What some editors put before the first line."""
_LINE_ID = re.compile(r"batch_req_([0-9A-Z]{26})-([1-9][0-9]{0,5})-([1-9][0-9]{0,4})\Z")


class PlanUnreadable(FilesFailed):
    """The file is no plan of this version."""


@dataclass
class Plan:
    """One batch's index. Line numbers count from 1, indices from 0."""

    batch: str
    """A ULID."""
    sha256: str
    size: int
    """Bytes of the input."""
    offsets: array[int]
    """Where each line begins, and where the last one ends."""
    order: array[int]
    families: array[int]
    endpoint: str = ""
    model: str = ""
    """What takes the place of every body's model; empty for none."""
    models: dict[str, int] = field(default_factory=dict)
    """Models that bodies name -> the first line that does."""
    created: int = 0
    """Unix seconds."""

    @property
    def count(self) -> int:
        return len(self.order)

    def read(self, file: int, index: int) -> bytes:
        """Line `index` from the open input."""
        begin = self.offsets[index]
        return os.pread(file, self.offsets[index + 1] - begin, begin).removeprefix(
            b"\xef\xbb\xbf" if not begin else b""
        )

    def save(self, path: Path) -> None:
        """Written in place, since the file is the batch's lock; a crash in the middle leaves what `load` refuses."""
        value = {
            **{name: getattr(self, name) for name in _PLAIN},
            **{name: getattr(self, name).tobytes() for name in _ARRAYS},
            "version": VERSION,
        }
        with open(path, "r+b" if path.exists() else "w+b") as file:
            file.write(codec.pack(value))
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        sync_folder(path.parent)

    @classmethod
    def load(cls, path: Path) -> Plan:
        """`PlanUnreadable`, or OSError."""
        try:
            value: Any = codec.unpack(path.read_bytes())
            if value.pop("version") != VERSION:
                raise PlanUnreadable(f"{path} is of another version of Prism")
            for name, kind in _ARRAYS.items():
                numbers = array(kind)
                numbers.frombytes(value[name])
                value[name] = numbers
            plan = cls(**value)
            if not plan.count == len(plan.families) == len(plan.offsets) - 1:
                raise ValueError("lengths differ")
        except (codec.CodecError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanUnreadable(f"{path} is no plan of a batch: {error}") from error
        return plan

    def line_id(self, index: int, attempt: int) -> str:
        return line_id(self.batch, index + 1, attempt)

    def requests(self, index: int, attempt: int, count: int) -> list[str]:
        return request_ids(self.batch, index + 1, attempt, count)

    def parse_id(self, text: object) -> tuple[int, int] | None:
        """(index, try) of a line's id in an output; None if it is none of this batch."""
        match = _LINE_ID.match(text) if isinstance(text, str) else None
        if match is None or match[1] != self.batch or not int(match[2]) <= self.count:
            return None
        return int(match[2]) - 1, int(match[3])


_PLAIN = ("batch", "sha256", "size", "endpoint", "model", "models", "created")
_ARRAYS = {"offsets": "Q", "order": "I", "families": "I"}


def line_id(batch: str, line: int, attempt: int) -> str:
    """The id of a line of output."""
    return f"batch_req_{batch}-{line}-{attempt}"


def request_ids(batch: str, line: int, attempt: int, count: int) -> list[str]:
    """The requests of a line's `count` answers: always the same, so that a submission may be repeated."""
    first = f"b{batch}-{line}-{attempt}"
    return [first, *(f"{first}-{answer}" for answer in range(1, count))]


def written_whole(path: Path, data: bytes) -> None:
    """Puts `data` at `path` so that a crash leaves the old file or the new one, and the new one once this returns."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames and new names in `folder` outlast a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
