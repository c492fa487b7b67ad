"""What a model file is: the SHA-256 of its bytes, remembered between starts.

Invariant: a remembered digest is used only for a file with the same real path, device, inode, size, modification time
and status-change time as when it was hashed. Whoever can write to `$PRISM_HOME/identity`, or can set the clock and
write to the file, can make Prism believe a wrong digest; both are taken to be the user's own. A file that changed less
than `SETTLE_NS` before it was hashed is not remembered, since a second change could hide in the same clock tick.

Not promised: that the bytes are still the same later. `Source.check_unchanged` is for that.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import ModelError
from ..home import prism_home
from .source import Source

READ_BYTES = 4 << 20
SETTLE_NS = 2_000_000_000


def sha256_of(sources: Sequence[Source], clock: Callable[[], int] = time.time_ns) -> str:
    """The hex digest of a model: of one file its plain SHA-256; of a split model that of its shards' digests in order.

    Raises ModelError where a file changed while it was read.
    """
    return _joined([_digest(source, clock) for source in sources])


def sha256_of_buffers(buffers: Sequence[Any]) -> str:
    """The digest that files with these contents would have."""
    return _joined([hashlib.sha256(buffer).hexdigest() for buffer in buffers])


def _joined(digests: list[str]) -> str:
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _digest(source: Source, clock: Callable[[], int]) -> str:
    key = _key(source)
    sidecar = prism_home() / "identity" / (hashlib.sha256("\0".join(key).encode()).hexdigest()[:32] + ".json")
    found = _remembered(sidecar, key)
    if found is not None:
        return found
    digest = _hash(source)
    source.check_unchanged()
    changed_ns = max(source.status.st_mtime_ns, source.status.st_ctime_ns)
    if clock() - changed_ns > SETTLE_NS:
        _remember(sidecar, key, digest)
    return digest


def _key(source: Source) -> list[str]:
    source.check_open()
    status = os.fstat(source.fd)
    numbers = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return [os.fspath(source.real), *map(str, numbers)]


def _hash(source: Source) -> str:
    digest = hashlib.sha256()
    buffer = bytearray(READ_BYTES)
    view = memoryview(buffer)
    at = 0
    # Read, not mapped: a file cut short while it is hashed ends the loop, where a map would end the process.
    try:
        while count := os.preadv(source.fd, [buffer], at):
            digest.update(view[:count])
            at += count
    except OSError as error:
        raise ModelError(f"{source.path}: byte {at} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _remembered(sidecar: Path, key: list[str]) -> str | None:
    try:
        entry = json.loads(sidecar.read_bytes())
        digest = entry["sha256"]
        if entry["key"] == key and isinstance(digest, str) and len(bytes.fromhex(digest)) == 32:
            return digest
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _remember(sidecar: Path, key: list[str], digest: str) -> None:
    """Write the sidecar in one step; a home that cannot be written only costs the next start its hash."""
    try:
        sidecar.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=sidecar.parent, delete=False) as file:
            json.dump({"key": key, "sha256": digest}, file)
        os.replace(file.name, sidecar)
    except OSError:
        pass
