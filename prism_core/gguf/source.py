"""One model file on disk, opened once, read-only, and watched for change.

Invariant: what is mapped, hashed and watched is one open file description; a symbolic link is followed once, when the
file is opened (download caches are made of links), and what it led to must be a regular file. A change of size, time,
inode or device after that is reported by `check_unchanged`.

Not promised: a process that truncates the file while its mapped pages are being read kills this one with SIGBUS. `read`
copies instead, and has no such weakness: opening, hashing and packing a model use nothing else.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import weakref
from pathlib import Path

from ..errors import ModelError
from .container import HEADER_BYTES

MAX_READ = 1 << 30


class Source:
    """An open model file: `path` as the user gave it, `real` where links led, `size` bytes, `map` its read-only map."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.real = Path(os.path.realpath(path))
        except ValueError as error:  # a NUL in the name
            raise ModelError(f"{str(path)!r} cannot be opened: {error}") from error
        self.fd = self._open()
        self._finalizer = weakref.finalize(self, os.close, self.fd)
        self.status = os.fstat(self.fd)
        if not stat.S_ISREG(self.status.st_mode):
            raise ModelError(f"{path}: not a regular file")
        self.size = self.status.st_size
        if self.size < HEADER_BYTES:
            raise ModelError(
                f"{path}: {self.size} bytes are too short for a GGUF file, whose header alone has {HEADER_BYTES}"
            )
        try:
            self.map = mmap.mmap(self.fd, self.size, access=mmap.ACCESS_READ)
        except (OSError, OverflowError, ValueError) as error:
            raise ModelError(f"{path}: its {self.size} bytes cannot be mapped: {error}") from error

    def _open(self) -> int:
        # O_NONBLOCK: opening a FIFO must not wait for its writer. O_NOFOLLOW: the name cannot turn into a link now.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        try:
            return os.open(self.real, flags)
        except OSError as error:
            raise ModelError(f"{self.path}: cannot be opened: {error.strerror}") from error

    def check_open(self) -> None:
        """Raise ModelError after `close`."""
        if self.fd < 0:
            raise ModelError(f"{self.path}: is closed")

    def check_unchanged(self) -> None:
        """Raise ModelError where the file is not the one that was opened, byte count and times included, or closed."""
        self.check_open()
        try:
            named = os.stat(self.real, follow_symlinks=False)
        except OSError as error:
            raise ModelError(f"{self.path}: is gone since it was opened: {error.strerror}") from error
        for now in (os.fstat(self.fd), named):
            for what, before, after in (
                ("size", self.status.st_size, now.st_size),
                ("modification time", self.status.st_mtime_ns, now.st_mtime_ns),
                ("inode", (self.status.st_dev, self.status.st_ino), (now.st_dev, now.st_ino)),
            ):
                if before != after:
                    raise ModelError(f"{self.path}: changed since it was opened: its {what} was {before}, is {after}")

    def read(self, begin: int, count: int) -> bytearray:
        """Bytes [begin, begin + count), read and not mapped: a file cut short is a ModelError here, never a signal."""
        self.check_open()
        out = bytearray(count)
        view, done = memoryview(out), 0
        while done < count:
            try:
                got = os.preadv(self.fd, [view[done : done + MAX_READ]], begin + done)
            except OSError as error:
                raise ModelError(f"{self.path}: byte {begin + done} cannot be read: {error.strerror}") from error
            if not got:
                raise ModelError(
                    f"{self.path}: byte {begin + done} is gone; it had {self.size} bytes when it was opened"
                )
            done += got
        return out

    def close(self) -> None:
        """Drop the file and its map. Arrays that still look into the map keep the map (not the file) alive."""
        with contextlib.suppress(BufferError):  # arrays still look into it: the end of the last one unmaps it
            self.map.close()
        self._finalizer()
        self.fd = -1
