"""The weights of a model in the layout that the kernels read, shared between the processes of a host.

Every matrix is packed by its family, every small tensor becomes float32, each on a cache line. The packed bytes live in
`$PRISM_HOME/packed/<sha256>-<layout>.bin`, mapped read-only: all workers of a host share one copy, and a start that
finds the file packs nothing. The name covers the model file and the layout (the text of all kernels and packers), so a
stale file is never read. It is written under another name, synced and renamed: a reader sees a whole file or none.

The folder may be deleted at any time, by anyone. It is held to `PRISM_PACKED_BYTES` (default 32 GiB), least recently
used first, and to two layouts of one model. Where it cannot be written, the weights are packed into private memory.

Not promised: protection from somebody who writes to `$PRISM_HOME`. Packed bytes are checked for length only.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from prism_core.gguf import GgufFile, TensorInfo, TensorType, check_scales, dequantize
from prism_core.home import prism_home
from prism_core.kernels.families import Family, family_for
from prism_core.kernels.jit import cache_folder
from prism_core.models.symbols import TensorUse, round_up

MAGIC = b"PRISMPK1"
DATA_START = 64
DEFAULT_CACHE_BYTES = 32 << 30
LAYOUTS_PER_MODEL = 2
LOCK_WAIT_S = 600.0
_LINE = 64

Bytes = NDArray[np.uint8]
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Place:
    """Where one tensor lies in the packed bytes."""

    offset: int
    nbytes: int


class Layout:
    """Families and places of the tensors that a graph uses. With `exact`, matrices are kept as float32."""

    def __init__(self, file: GgufFile, uses: Mapping[str, TensorUse], *, exact: bool) -> None:
        self.uses = uses
        self.exact = exact
        self.places: dict[str, Place] = {}
        self._families: dict[str, Family] = {}
        at = DATA_START
        for name, use in uses.items():
            kind = packed_type(file.tensors[name].type, exact)
            size = 4 * use.cols
            if use.matrix:
                family = self._families[name] = family_for(kind)
                size = family.packed_bytes(kind, use.rows, use.cols)
            self.places[name] = Place(at, size)
            at += round_up(size, _LINE) + _LINE  # a line of slack: kernels may read one vector past the end
        self.nbytes = at

    def family(self, name: str) -> Family:
        """The family that packs matrix `name`."""
        return self._families[name]

    def pack(self, name: str, tensor: TensorInfo) -> Bytes:
        """The packed bytes of one tensor.

        Raises:
            ModelError: a scale or a value is not finite.
        """
        use, place = self.uses[name], self.places[name]
        check_scales(tensor)
        if not use.matrix:
            packed = dequantize(tensor.type, tensor.data, use.cols).astype(np.float32).view(np.uint8)
        else:
            kind, data = tensor.type, tensor.data
            if self.exact:
                data = dequantize(kind, data, use.rows * use.cols).view(np.uint8)
                kind = TensorType.F32
            packed = self._families[name].pack(kind, data, use.rows, use.cols).view(np.uint8).reshape(-1)
        if packed.nbytes != place.nbytes:
            raise RuntimeError(f"tensor {name} was packed into {packed.nbytes} bytes, not the {place.nbytes} announced")
        return packed


def packed_type(kind: TensorType, exact: bool) -> TensorType:
    """The type whose family serves a matrix."""
    return TensorType.F32 if exact else kind


class Weights:
    """Packed tensors at fixed addresses."""

    def __init__(self, layout: Layout, memory: Bytes, shared: bool) -> None:
        self.layout = layout
        self.shared = shared
        self.nbytes = layout.nbytes
        self._memory = memory

    def address(self, name: str) -> int:
        """Where the packed bytes of a tensor begin."""
        return int(self._memory.ctypes.data) + self.layout.places[name].offset


def load_weights(file: GgufFile, layout: Layout, progress: Progress | None = None) -> Weights:
    """Map the packed weights of a file, packing them first where no process has done so.

    Raises:
        ModelError: a tensor holds values that are not finite, or the file changed while it was read.
    """
    if layout.exact:  # several times the file's size, for comparisons only: not worth keeping
        return Weights(layout, _pack_private(file, layout, progress), shared=False)
    path = packed_folder() / f"{file.sha256()}-{cache_folder().name}.bin"
    memory = _map(path, layout)
    if memory is None:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _one_at_a_time(path.parent):
                memory = _map(path, layout)  # somebody else may have made it in the meantime
                if memory is None:
                    _write(path, file, layout, progress)
                    memory = _map(path, layout)
        except OSError:
            memory = None
    if memory is not None:
        return Weights(layout, memory, shared=True)
    return Weights(layout, _pack_private(file, layout, progress), shared=False)


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that workers which start together pack once; it ends with the process that holds it.

    After `LOCK_WAIT_S`, or where there are no locks, go on without: the file is right whoever writes it last.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    deadline = time.monotonic() + LOCK_WAIT_S
    with (folder / ".lock").open("wb") as lock:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:
                break
        yield


def packed_folder() -> Path:
    """Where packed weights are kept; it may be deleted at any time."""
    return prism_home() / "packed"


def _header(layout: Layout) -> bytes:
    return MAGIC + layout.nbytes.to_bytes(8, "little") + len(layout.places).to_bytes(8, "little")


def _map(path: Path, layout: Layout) -> Bytes | None:
    """The packed bytes, or None where there is no whole file of this layout."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != layout.nbytes or file.read(24) != _header(layout):
                return None
            memory = mmap.mmap(file.fileno(), layout.nbytes, access=mmap.ACCESS_READ)
    except OSError:
        return None
    with suppress(OSError):
        os.utime(path)
    return np.frombuffer(memory, dtype=np.uint8)


def _packed(file: GgufFile, layout: Layout, progress: Progress | None) -> Iterator[tuple[int, Bytes]]:
    for number, name in enumerate(layout.uses):
        if progress is not None:
            progress("packing weights", number / len(layout.uses))
        yield layout.places[name].offset, layout.pack(name, file.tensors[name])
        _forget(file, file.tensors[name])
    file.check_unchanged()


def _forget(file: GgufFile, tensor: TensorInfo) -> None:
    """Give the pages of a tensor that has been read back to the system; they are the file's, and can be read again."""
    if file.sources and hasattr(mmap, "MADV_DONTNEED"):
        start = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
        with suppress(OSError):
            file.sources[tensor.shard].map.madvise(mmap.MADV_DONTNEED, start, tensor.offset + tensor.nbytes - start)


def _write(path: Path, file: GgufFile, layout: Layout, progress: Progress | None) -> None:
    _make_room(path, layout.nbytes)
    descriptor, temporary = tempfile.mkstemp(prefix=".writing-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as out:
            _fill(out, file, layout, progress)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _fill(out: BinaryIO, file: GgufFile, layout: Layout, progress: Progress | None) -> None:
    os.posix_fallocate(out.fileno(), 0, layout.nbytes) if hasattr(os, "posix_fallocate") else out.truncate(
        layout.nbytes
    )
    out.write(_header(layout))
    for offset, packed in _packed(file, layout, progress):
        out.seek(offset)
        out.write(packed.data)


def _make_room(path: Path, needed: int) -> None:
    """Remove the packed files used least recently; whoever has one mapped keeps it."""
    limit = int(os.environ.get("PRISM_PACKED_BYTES") or DEFAULT_CACHE_BYTES)
    digest = path.name.partition("-")[0]
    known: list[tuple[float, int, Path]] = []
    for entry in path.parent.glob("*.bin"):
        with suppress(OSError):
            status = entry.stat()
            known.append((status.st_mtime, status.st_size, entry))
    known.sort(reverse=True)
    total, siblings = needed, 1
    for _, size, entry in known:
        total += size
        siblings += entry.name.startswith(digest)
        if total > limit or (entry.name.startswith(digest) and siblings > LAYOUTS_PER_MODEL):
            total -= size
            with suppress(OSError):
                entry.unlink()


def _pack_private(file: GgufFile, layout: Layout, progress: Progress | None) -> Bytes:
    memory: Any = mmap.mmap(-1, layout.nbytes)
    whole = np.frombuffer(memory, dtype=np.uint8)
    for offset, packed in _packed(file, layout, progress):
        whole[offset : offset + packed.nbytes] = packed
    return whole
