"""A GGUF model: one file, or the shards of a split one, as keys and tensors.

Invariant: an open `GgufFile` has passed every check of its container: bounds, types, the place of each tensor, the
agreement of its shards, and the rotation it declares. What its keys mean to an architecture or a tokenizer is not
checked here, and tensor data is looked at only by `check_scales`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from .container import Shard, parse, parse_start
from .hadamard import HadamardSpec, read_hadamard
from .identity import sha256_of, sha256_of_buffers
from .metadata import Metadata, T
from .source import Source
from .spans import Placement, place
from .split import check_shards, shard_paths
from .types import TensorType


@dataclass(frozen=True, eq=False)
class TensorInfo:
    """One tensor. `shape` is in ne order (shape[0] is the row length); `data` is its bytes, a read-only uint8 view.

    `type_id` is the number in the file, which differs from `type.id` for a legacy 128-weight Q2_0; `offset` is where
    the bytes begin in shard number `shard`.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    type_id: int
    nbytes: int
    offset: int
    shard: int
    data: NDArray[np.uint8]

    @property
    def elements(self) -> int:
        count = 1
        for dim in self.shape:
            count *= dim
        return count

    @property
    def rows(self) -> int:
        """How many rows of `shape[0]` values there are."""
        return self.elements // self.shape[0]


class GgufFile:
    """An open model file; made by `open_gguf` or `gguf_from_buffers`."""

    def __init__(
        self, path: Path, shards: Sequence[Shard], buffers: Sequence[Any], sources: Sequence[Source], inspect: bool
    ) -> None:
        self.path = path
        self.shards = tuple(shards)
        self.sources = tuple(sources)
        self._buffers = tuple(buffers)
        self.metadata: Metadata = shards[0].metadata
        self.architecture = self.metadata.require("general.architecture", str, low=1, high=64)
        check_shards(shards)
        placements = place(shards)
        if not inspect:
            _refuse_unsupported(shards, placements)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(_tensors(placements, buffers))
        self.hadamard: HadamardSpec | None = read_hadamard(
            self.metadata, {name: tensor.shape for name, tensor in self.tensors.items()}
        )

    @property
    def file_bytes(self) -> int:
        """The bytes of all the model's files."""
        return sum(shard.size for shard in self.shards)

    def require(self, key: str, kind: type[T], *, low: float | None = None, high: float | None = None) -> T:
        """`metadata.require`: the value of a key in the asked type and range, or a ModelError that says why not."""
        return self.metadata.require(key, kind, low=low, high=high)

    def optional(
        self, key: str, kind: type[T], default: T, *, low: float | None = None, high: float | None = None
    ) -> T:
        """`metadata.optional`: as `require`, or `default` where the key is absent."""
        return self.metadata.optional(key, kind, default, low=low, high=high)

    def tensor(self, name: str) -> TensorInfo:
        """The tensor called `name`; ModelError where there is none."""
        found = self.tensors.get(name)
        if found is None:
            raise ModelError(f"{self.path}: tensor {name!r} is missing")
        return found

    def read(self, name: str) -> NDArray[np.uint8]:
        """A private copy of a tensor's bytes (uint8, 1-D), safe even where the file is cut short meanwhile."""
        tensor = self.tensor(name)
        if not self.sources:
            return tensor.data.copy()
        return np.frombuffer(self.sources[tensor.shard].read(tensor.offset, tensor.nbytes), dtype=np.uint8)

    def sha256(self) -> str:
        """Hex digest of the file, remembered under `$PRISM_HOME/identity` (see identity.py for what that trusts)."""
        return sha256_of(self.sources) if self.sources else sha256_of_buffers(self._buffers)

    def check_unchanged(self) -> None:
        """Raise ModelError where a file of this model has changed since it was opened."""
        for source in self.sources:
            source.check_unchanged()

    def close(self) -> None:
        """Let go of the files. Arrays made from `data` stay valid, and keep their pages mapped, until they end."""
        self.tensors = MappingProxyType({})
        self._buffers = ()
        for source in self.sources:
            source.close()

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_gguf(path: str | Path, *, inspect: bool = False) -> GgufFile:
    """Open the GGUF file at `path`, or a split model by its first shard.

    With `inspect`, tensor types that Prism cannot run are let through, so that the file can be described; their data
    cannot be decoded. Raises ModelError with one sentence for anything else that is wrong.
    """
    path = Path(path)
    sources = [Source(path)]
    try:
        shards = [_parsed(sources[0])]
        for other in shard_paths(path, shards[0]):
            sources.append(Source(other))
            shards.append(_parsed(sources[-1]))
        return GgufFile(path, shards, [source.map for source in sources], sources, inspect)
    except MemoryError as error:
        for source in sources:
            source.close()
        raise ModelError(f"{path}: the system refuses the memory for its header") from error
    except BaseException:
        for source in sources:
            source.close()
        raise


def _parsed(source: Source) -> Shard:
    """The header, read and not mapped: a file that is cut short meanwhile must not end the process."""
    return parse_start(lambda count: source.read(0, count), source.size, str(source.path))


def gguf_from_buffers(buffers: Sequence[Any], source: str = "GGUF", *, inspect: bool = False) -> GgufFile:
    """A model whose files are already in memory, one buffer to a shard, checked as strictly as files are."""
    names = [source] if len(buffers) == 1 else [f"{source}[{number}]" for number in range(len(buffers))]
    shards = [parse(buffer, name) for buffer, name in zip(buffers, names, strict=True)]
    return GgufFile(Path(source), shards, buffers, (), inspect)


def _tensors(placements: Sequence[Placement], buffers: Sequence[Any]) -> dict[str, TensorInfo]:
    wholes = [np.frombuffer(buffer, dtype=np.uint8) for buffer in buffers]
    for whole in wholes:
        whole.flags.writeable = False
    return {
        p.record.name: TensorInfo(
            p.record.name,
            p.record.shape,
            p.type,
            p.record.type_id,
            p.nbytes,
            p.begin,
            p.shard,
            wholes[p.shard][p.begin : p.begin + p.nbytes],
        )
        for p in placements
    }


def _refuse_unsupported(shards: Sequence[Shard], placements: Sequence[Placement]) -> None:
    for p in placements:
        if not p.type.supported:
            raise ModelError(
                f"{shards[p.shard].source}: tensor {p.record.name!r} has type {p.type.name} "
                f"(id {p.record.type_id}), which Prism does not support"
            )
