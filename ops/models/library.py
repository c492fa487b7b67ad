"""What has been pulled: each file of `$PRISM_HOME/models` has a manifest beside it, written last.

A file without a manifest is a leftover of a pull that never ended and does not count.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ops.models.catalog import catalog
from prism_core.errors import ModelError
from prism_core.home import prism_home


@dataclass(frozen=True)
class LocalModel:
    """A pulled model: its short name, file, source as it was asked for, size in bytes and sha256."""

    name: str
    file: str
    source: str
    bytes: int
    sha256: str

    @property
    def path(self) -> Path:
        return models_folder() / self.file


def models_folder() -> Path:
    return prism_home() / "models"


def manifest_path(name: str) -> Path:
    return models_folder() / f"{name}.json"


def write_manifest(model: LocalModel) -> None:
    partial = manifest_path(model.name).with_suffix(".json.part")
    partial.write_text(json.dumps(asdict(model), indent=1) + "\n")
    partial.replace(manifest_path(model.name))


def local_models() -> list[LocalModel]:
    """Every pulled model whose file is still there with the size that was recorded."""
    found = []
    for manifest in sorted(models_folder().glob("*.json")):
        model = _read_manifest(manifest)
        if model is not None:
            found.append(model)
    return found


def _read_manifest(manifest: Path) -> LocalModel | None:
    try:
        model = LocalModel(**json.loads(manifest.read_text()))
        return model if model.path.stat().st_size == model.bytes else None
    except (OSError, ValueError, TypeError):
        return None


def find_local(name: str) -> LocalModel | None:
    if "/" in name or not name:
        return None
    return _read_manifest(manifest_path(name))


def resolve(model: str) -> Path:
    """The file behind MODEL, which is a path or a pulled name; `ModelError` says how to get it if it is neither."""
    local = find_local(model)
    if local is not None:
        return local.path
    path = Path(model).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise ModelError(f"model {model!r} is a directory; name a .gguf file in it")
    if model in catalog():
        raise ModelError(f"model {model!r} has not been pulled; run: prism models pull {model}")
    raise ModelError(f"model {model!r} is neither a file nor a pulled name{_suggestion(model)}")


def _suggestion(model: str) -> str:
    known = sorted(set(catalog()) | {local.name for local in local_models()})
    close = difflib.get_close_matches(model, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known names: {', '.join(known)}"
