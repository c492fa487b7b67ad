"""The right to run one batch on its files, by a lock on a file that stays where it is.

Kept: at most one process of all that share the file's locks has it; it ends with the process. The file is the batch's
plan, which is never renamed while anybody may have the lock; the outputs, which are, are touched by its holder only.
Not promised: a lock between machines whose shared folder has none; there the lease fences.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from broker.batch.errors import Busy, FilesFailed

__all__ = ["BatchLock", "lock_file"]


class BatchLock:
    """Taken when made; given back by `close`."""

    def __init__(self, path: Path) -> None:
        """`Busy` if another process has it; `FilesFailed`."""
        self.path = path
        self.file = -1
        try:
            while not self._taken():
                pass  # the file was removed between our opening and our locking
        except OSError as error:
            raise FilesFailed(f"cannot write {path}: {error.strerror}") from error

    def _taken(self) -> bool:
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            lock_file(self.file, self.path)
            if self._is_current():
                return True
        except BaseException:
            self.close()
            raise
        self.close()
        return False

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.file))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


def lock_file(file: int, path: Path) -> None:
    """Locks an open file for this process; `Busy` if another has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Busy(f"{path} is being written by another process") from None
