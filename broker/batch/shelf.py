"""The folder that all gateways of a pool share: uploaded files, batches, and which batches are not over.

    files/OWNER/ID  ID.json  ID.part      content, description, and the growing output of a batch
    batches/OWNER/ID/batch.json  plan  cancel
    active/ID                             names the owner of a batch that is not over
    keys/OWNER/SHA256                     the batch that an idempotency key stands for

Kept: owners are folders, so a foreign id is "not found"; ids are checked before they become part of a path. A file
exists once its description does, and that is written last. What a batch is lies here, not in the broker, so a broker
that lost its data costs no batch. Not promised: a quota that two gateways cannot overrun by one file each.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from broker.batch.ledger import part_of
from broker.batch.plan import sync_folder, written_whole
from broker.connect import shown
from broker.embedded import socket_path
from broker.errors import InvalidRequest, NotFound
from broker.gateway.config import GatewayConfig
from broker.keys import new_ulid
from prism_core.home import prism_home

__all__ = ["Description", "Shelf", "Upload"]

ROOT_VARIABLE = "PRISM_FILE_ROOT"
KEEP_S = 30 * 86_400
"""Age at which files of batches, and batches, are removed, unless told otherwise."""
STALE_S = 86_400
"""Age at which an upload that never ended is removed."""

_FILE_ID = re.compile(r"file-[0-9A-Z]{26}\Z")
_BATCH_ID = re.compile(r"batch_[0-9A-Z]{26}\Z")
_OWNER = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")


@dataclass(frozen=True)
class Description:
    """A file, as it is told of."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None
    """Unix seconds."""

    def shown(self) -> dict[str, Any]:
        """OpenAI's file object."""
        return {"object": "file", **asdict(self), "status": "processed", "status_details": None}


class Upload:
    """A file on its way in. Ends with `keep` or `drop`."""

    def __init__(self, shelf: Shelf, owner: str) -> None:
        self._shelf, self._owner = shelf, owner
        self._folder = shelf.folder("files", owner)
        self._path = self._folder / f".upload-{new_ulid()}"
        self._file: BinaryIO = open(self._path, "xb", buffering=1 << 16)  # noqa: SIM115
        self.size = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.size += len(data)

    def keep(self, filename: str, purpose: str, expires_at: int | None) -> Description:
        """Makes it a file, on disk for good when this returns."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        name = f"file-{new_ulid()}"
        os.rename(self._path, self._folder / name)
        return self._shelf.describe(self._owner, name, filename, purpose, expires_at)

    def drop(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


class Shelf:
    """One root. Any number of processes may use it at once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def of(cls, config: GatewayConfig, url: str | None = None, home: Path | None = None) -> Shelf:
        """The shelf that a gateway is configured for; without a word, one of its own for each broker of this machine.

        url, home: the broker, as for `broker.connect`.
        """
        given = config.file_root or os.environ.get(ROOT_VARIABLE)
        if given:
            return cls(Path(given).expanduser().absolute())
        home = (home or prism_home()).expanduser().absolute()
        broker = url or os.environ.get("PRISM_REDIS_URL") or f"unix://{socket_path(home / 'broker')}"
        return cls(home / "files" / hashlib.sha256(shown(broker).encode()).hexdigest()[:12])

    def name(self) -> str:
        """What tells this folder from others, on whatever machine it is looked at."""
        path = self.folder() / "id"
        if not path.exists():
            _written_first(path, new_ulid().encode())
        return path.read_text()

    def folder(self, *names: str) -> Path:
        """A folder below the root, made if need be, for this user alone."""
        if len(names) > 1 and not _OWNER.match(names[1]):
            raise InvalidRequest(f"no owner {names[1][:80]!r}")
        path = self.root.joinpath(*names)
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        return path

    def upload(self, owner: str) -> Upload:
        """A new file on its way in."""
        return Upload(self, owner)

    # --- files ---------------------------------------------------------------------------------------------------

    def path(self, owner: str, name: str) -> Path:
        """Where the content of a file is or will be; `NotFound` for what is no file id."""
        if not _FILE_ID.match(name):
            raise NotFound(f"no file {name[:80]!r}")
        return self.folder("files", owner) / name

    def describe(self, owner: str, name: str, filename: str, purpose: str, expires_at: int | None) -> Description:
        """Makes the content at `path` a file."""
        path = self.path(owner, name)
        found = Description(name, path.stat().st_size, int(time.time()), filename, purpose, expires_at)
        written_whole(path.with_name(f"{name}.json"), json.dumps(asdict(found)).encode())
        return found

    def file(self, owner: str, name: str) -> Description:
        """`NotFound`. Of the output of a batch that is not over: what there is so far."""
        path = self.path(owner, name)
        found = _description(path.with_name(f"{name}.json"))
        if found is None:
            try:
                facts = part_of(path).stat()
            except FileNotFoundError:
                raise NotFound(f"no file {name[:80]!r}") from None
            return Description(name, facts.st_size, int(facts.st_mtime), "partial.jsonl", "batch_output")
        if found.expires_at is not None and found.expires_at <= time.time():
            raise NotFound(f"no file {name[:80]!r}: it has expired")
        return found

    def files(self, owner: str) -> list[Description]:
        """All of an owner, the oldest first."""
        names = sorted(self.folder("files", owner).glob("file-*.json"))
        return [found for name in names if (found := _description(name)) is not None]

    def open(self, owner: str, name: str) -> tuple[BinaryIO, int]:
        """A file's content and how many bytes to read of it: whole lines, where it still grows. `NotFound`."""
        path = self.path(owner, name)
        for _ in range(3):  # it may get its name between two looks
            for where, grows in ((path, False), (part_of(path), True)):
                with contextlib.suppress(FileNotFoundError):
                    file = open(where, "rb")  # noqa: SIM115
                    return file, _whole_lines(file) if grows else os.fstat(file.fileno()).st_size
        raise NotFound(f"no file {name[:80]!r}")

    def remove(self, owner: str, name: str) -> None:
        """`NotFound`."""
        path = self.path(owner, name)
        description = path.with_name(f"{name}.json")
        if not description.exists():
            raise NotFound(f"no file {name[:80]!r}")
        path.unlink(missing_ok=True)
        description.unlink(missing_ok=True)

    def used_bytes(self, owner: str) -> int:
        """Bytes of all files of an owner."""
        total = 0
        with os.scandir(self.folder("files", owner)) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    total += entry.stat().st_size
        return total

    # --- batches -------------------------------------------------------------------------------------------------

    def batch_folder(self, owner: str, name: str) -> Path:
        """`NotFound` for what is no batch id, or not this owner's."""
        path = self.root / "batches" / owner / name
        if not _BATCH_ID.match(name) or not _OWNER.match(owner) or not path.is_dir():
            raise NotFound(f"no batch {name[:80]!r}")
        return path

    def add_batch(self, owner: str, name: str, record: dict[str, Any]) -> None:
        """Once this returns, some gateway will run it. If it is there already, that one stands."""
        if not _BATCH_ID.match(name):
            raise NotFound(f"no batch {name[:80]!r}")
        written_whole(self.folder("active") / name, owner.encode())
        folder = self.folder("batches", owner, name)
        _written_first(folder / "batch.json", json.dumps(record).encode())
        sync_folder(folder.parent)

    def save_batch(self, owner: str, name: str, record: dict[str, Any]) -> None:
        written_whole(self.batch_folder(owner, name) / "batch.json", json.dumps(record).encode())

    def batch(self, owner: str, name: str) -> dict[str, Any]:
        """`NotFound`. The record as its runner wrote it."""
        try:
            record: dict[str, Any] = json.loads((self.batch_folder(owner, name) / "batch.json").read_bytes())
        except FileNotFoundError:
            raise NotFound(f"no batch {name[:80]!r}") from None
        return record

    def batches(self, owner: str) -> list[str]:
        """Ids of all batches of an owner, the newest first."""
        return sorted((path.name for path in self.folder("batches", owner).glob("batch_*")), reverse=True)

    def cancel(self, owner: str, name: str) -> None:
        """Has a batch cancelled; again: no change."""
        path = self.batch_folder(owner, name) / "cancel"
        if not path.exists():
            written_whole(path, str(int(time.time())).encode())

    def cancelled_at(self, owner: str, name: str) -> int | None:
        """When a batch was asked to be cancelled, in Unix seconds."""
        try:
            return int((self.batch_folder(owner, name) / "cancel").read_bytes())
        except FileNotFoundError:
            return None

    def active(self) -> list[tuple[str, str]]:
        """(owner, id) of the batches that are not over, the oldest first."""
        found = []
        for path in sorted((self.root / "active").glob("batch_*")):
            with contextlib.suppress(FileNotFoundError):
                if _BATCH_ID.match(path.name):
                    found.append((path.read_text(), path.name))
        return found

    def claim(self, owner: str, key: str, name: str, digest: str) -> tuple[str, str]:
        """(id, digest) of the first caller that came with this idempotency key; it may be this one."""
        path = self.folder("keys", owner) / hashlib.sha256(key.encode()).hexdigest()
        _written_first(path, json.dumps([name, digest]).encode())
        first, its_digest = json.loads(path.read_bytes())
        return first, its_digest

    def over(self, name: str) -> None:
        """Nobody has to run the batch any more."""
        (self.folder("active") / name).unlink(missing_ok=True)

    def inputs(self, owner: str) -> set[str]:
        """Files that batches of an owner still need."""
        needed = set()
        for its_owner, name in self.active():
            if its_owner == owner:
                with contextlib.suppress(NotFound):
                    needed.add(str(self.batch(owner, name)["input_file_id"]))
        return needed

    # --- keeping order -------------------------------------------------------------------------------------------

    def sweep(self, now: float) -> int:
        """Removes what has expired, and what a crash left; returns how much."""
        removed = 0
        for folder in self.root.glob("files/*"):
            needed = self.inputs(folder.name)
            for path in list(folder.iterdir()):
                if path.name.removesuffix(".json") not in needed and _is_stale(path, now):
                    path.unlink(missing_ok=True)
                    path.with_name(path.name.removesuffix(".json")).unlink(missing_ok=True)
                    removed += 1
        active = {name for _, name in self.active()}
        for path in self.root.glob("batches/*/batch_*"):
            if path.name not in active and _age(path, now) > KEEP_S:
                _remove_folder(path)
                removed += 1
        for path in [*self.root.glob("keys/*/*"), *self.root.glob("active/*")]:
            # A batch that is not over by then was never made: its maker died between two steps.
            if _age(path, now) > KEEP_S and not any(self.root.glob(f"batches/*/{path.name}/batch.json")):
                path.unlink(missing_ok=True)
                removed += 1
        return removed


def _written_first(path: Path, data: bytes) -> None:
    """Puts `data` at `path`, whole, unless something is there."""
    own = path.with_name(f".{path.name}-{new_ulid()}")
    written_whole(own, data)
    try:
        with contextlib.suppress(FileExistsError):
            os.link(own, path)
    finally:
        own.unlink()


def _description(path: Path) -> Description | None:
    try:
        return Description(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None


def _is_stale(path: Path, now: float) -> bool:
    """A description whose time is over, or what has had none for a day. A growing output is its batch's."""
    if path.name.endswith(".json"):
        found = _description(path)
        return found is not None and found.expires_at is not None and found.expires_at <= now
    if path.name.endswith(".part") or path.with_name(f"{path.name}.json").exists():
        return False
    return _age(path, now) > STALE_S


def _age(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _remove_folder(path: Path) -> None:
    for inside in path.iterdir():
        inside.unlink(missing_ok=True)
    path.rmdir()


def _whole_lines(file: BinaryIO) -> int:
    """Bytes up to the last newline."""
    end = os.fstat(file.fileno()).st_size
    while end:
        begin = max(0, end - _BLOCK)
        at = os.pread(file.fileno(), end - begin, begin).rfind(b"\n")
        if at >= 0:
            return begin + at + 1
        end = begin
    return 0


_BLOCK = 1 << 16
