"""The host's cache of packed weights: files under `$PRISM_HOME/packed`, mapped read-only by every process of a model.

Invariant: what `shared` returns are the bytes that were packed for this entry. A file is named after the model's digest
and that of all kernels and packers; its header says which tensor lies where and holds a checksum of all that follows,
which is compared at every start (some 10 GB/s, of pages that the first token would touch anyway). A file that is short,
stale, foreign or damaged is made again. It is written under another name, synced and renamed: a reader sees a whole
file or none, and what a killed writer left is removed by the next one.

The folder may be deleted at any time, by anyone. It is held to `PRISM_PACKED_BYTES` (default 32 GiB; 0: nothing is
kept), least recently used first, and to two layouts of one model.

Not promised: protection from somebody who means harm and can write to `$PRISM_HOME`, or from damage to a file while it
is in use. A file whose pages cannot be read from a failing disk ends the process that touches them.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from prism_core.errors import InvalidRequest
from prism_core.home import prism_home
from prism_core.kv import HUGE

MAGIC = b"PRISMPK2"
DATA_START = 64
"""Where the tensors begin; files are whole lines of this many bytes."""
DEFAULT_CACHE_BYTES = 32 << 30
LAYOUTS_PER_MODEL = 2
LOCK_WAIT_S = 600.0
WRITING = ".writing-"
_SUMMED_TOGETHER = 512
"""Words of 8 bytes to a sum: one memory page."""

Bytes = NDArray[np.uint8]
Pieces = Callable[[], Iterable[tuple[int, Bytes]]]
"""Makes the (offset, bytes) of every tensor, in the order of their offsets."""
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Entry:
    """One file of the cache: its name, its size in bytes (a multiple of 64) and the digest of its layout."""

    name: str
    nbytes: int
    layout: bytes

    @property
    def start(self) -> bytes:
        """What its header begins with; the checksum follows."""
        return MAGIC + self.nbytes.to_bytes(8, "little") + self.layout

    @property
    def path(self) -> Path:
        return packed_folder() / self.name


def packed_folder() -> Path:
    """Where packed weights are kept; it may be deleted at any time."""
    return prism_home() / "packed"


def shared(entry: Entry, pieces: Pieces, progress: Progress | None = None) -> Bytes | None:
    """The mapped bytes of an entry, written first where there is no good file; None where no file can be had.

    Errors of `pieces` pass through. Raises InvalidRequest where `PRISM_PACKED_BYTES` is no number.
    """
    memory, limit = _mapped(entry), cache_bytes()
    if memory is not None or entry.nbytes > limit:
        return memory
    folder = packed_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _one_at_a_time(folder, progress) as alone:
            memory = _mapped(entry)  # somebody else may have made it in the meantime
            if memory is None:
                if alone:
                    _remove_what_was_left(folder)
                _write(entry, pieces(), limit)
                memory = _mapped(entry)
    except OSError:  # no such folder, no room, no right: private memory will do
        return None
    return memory


def cache_bytes() -> int:
    """The cap of the folder, `PRISM_PACKED_BYTES` or its default."""
    text = os.environ.get("PRISM_PACKED_BYTES") or str(DEFAULT_CACHE_BYTES)
    if not text.isdecimal() or len(text) > 18:
        raise InvalidRequest(f"PRISM_PACKED_BYTES must be a number of bytes like {DEFAULT_CACHE_BYTES}, not {text!r}")
    return int(text)


@contextmanager
def _one_at_a_time(folder: Path, progress: Progress | None) -> Iterator[bool]:
    """Hold the folder's lock, so that workers which start together pack once; it ends with the process that holds it.

    Gives False after `LOCK_WAIT_S`, or where there are no locks: the file is right whoever writes it last.
    """
    if sys.platform == "win32":
        yield False
        return
    import fcntl

    alone, deadline = False, time.monotonic() + LOCK_WAIT_S
    with (folder / ".lock").open("wb") as lock:
        while not alone and time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
            except BlockingIOError:
                if progress is not None:
                    progress("waiting for another process that packs weights", 0.0)
                time.sleep(0.05)
            except OSError:
                break
        yield alone


def _remove_what_was_left(folder: Path) -> None:
    """Half-written files of processes that were killed; only for who holds the lock."""
    for entry in folder.glob(WRITING + "*"):
        with suppress(OSError):
            entry.unlink()


def _mapped(entry: Entry) -> Bytes | None:
    """The bytes of a whole and undamaged file, or None."""
    try:
        with entry.path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != entry.nbytes:
                return None
            memory = _map(file, entry.nbytes)
    except OSError:
        return None
    if memory[:DATA_START].tobytes() != _header(entry, memory):
        return None
    with suppress(OSError):
        os.utime(entry.path)
    return memory


def _map(file: BinaryIO, count: int) -> Bytes:
    """Read-only bytes of a file, in huge pages where its file system has them."""
    memory = mmap.mmap(file.fileno(), count, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


def _header(entry: Entry, memory: Bytes) -> bytes:
    return (entry.start + checksum(memory[DATA_START:])).ljust(DATA_START, b"\0")


def checksum(memory: Bytes) -> bytes:
    """16 bytes that change with any word of `memory`, a whole number of words: the sums of its pages, hashed."""
    words = memory.view(np.uint64)
    whole = len(words) - len(words) % _SUMMED_TOGETHER
    sums = np.add.reduce(words[:whole].reshape(-1, _SUMMED_TOGETHER), axis=1)
    digest = hashlib.blake2b(sums.tobytes(), digest_size=16)
    digest.update(words[whole:].tobytes())
    return digest.digest()


def _write(entry: Entry, pieces: Iterable[tuple[int, Bytes]], limit: int) -> None:
    _make_room(entry, limit)
    descriptor, temporary = tempfile.mkstemp(prefix=WRITING, dir=entry.path.parent)
    try:
        with os.fdopen(descriptor, "w+b") as out:
            _fill(out, entry, pieces)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, entry.path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _fill(out: BinaryIO, entry: Entry, pieces: Iterable[tuple[int, Bytes]]) -> None:
    if hasattr(os, "posix_fallocate"):  # no room is noticed now, not when a mapped page is written
        os.posix_fallocate(out.fileno(), 0, entry.nbytes)
    else:
        out.truncate(entry.nbytes)
    # Linux keeps what is written at once in pages of up to that size.
    chunk, begin = np.zeros(HUGE, dtype=np.uint8), 0
    for offset, piece in pieces:
        done = 0
        while done < piece.nbytes:
            if offset + done >= begin + HUGE:
                out.write(chunk.data)
                chunk[:] = 0
                begin += HUGE
                continue
            at = offset + done - begin
            count = min(piece.nbytes - done, HUGE - at)
            chunk[at : at + count] = piece[done : done + count]
            done += count
    out.write(chunk[: entry.nbytes - begin].data)
    out.flush()
    written = _map(out, entry.nbytes)
    out.seek(0)
    out.write(_header(entry, written))


def _make_room(wanted: Entry, limit: int) -> None:
    """Remove the packed files used least recently; whoever has one mapped keeps it."""
    digest = wanted.name.partition("-")[0]
    known: list[tuple[float, int, Path]] = []
    for entry in wanted.path.parent.glob("*.bin"):
        with suppress(OSError):
            status = entry.stat()
            known.append((status.st_mtime, status.st_size, entry))
    known.sort(reverse=True)
    total, siblings = wanted.nbytes, 1
    for _, size, entry in known:
        total += size
        siblings += entry.name.startswith(digest)
        if total > limit or (entry.name.startswith(digest) and siblings > LAYOUTS_PER_MODEL):
            total -= size
            with suppress(OSError):
                entry.unlink()
