"""Split models: the names of the shards, and the checks that they belong together.

Invariant: a model is opened by its first shard; every shard says its own number and the same count, their tensors add
up to the announced total, and no name appears in two of them. Keys other than `split.*` count in the first shard only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ..errors import ModelError
from .container import Shard

MAX_SHARDS = 999
_NAME = re.compile(r"(?P<prefix>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf")


def _count(shard: Shard) -> int:
    """How many files the model has; 1 where the shard says nothing of a split."""
    return max(1, shard.metadata.optional("split.count", int, 1, low=0, high=MAX_SHARDS))


def shard_paths(path: Path, first: Shard) -> list[Path]:
    """The paths of the shards after the first, which is at `path`; empty for a model of one file."""
    count = _count(first)
    if count == 1:
        return []
    number = first.metadata.require("split.no", int, low=0, high=count - 1)
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ModelError(f"{path}: part {number + 1} of {count}, but not named like <name>-00001-of-{count:05d}.gguf")
    names = [f"{match['prefix']}-{n + 1:05d}-of-{count:05d}.gguf" for n in range(count)]
    if number:
        raise ModelError(f"{path}: part {number + 1} of {count} of a split model; open its first part, {names[0]}")
    if path.name != names[0]:
        raise ModelError(f"{path}: part 1 of {count} must be named {names[0]}")
    return [path.with_name(name) for name in names[1:]]


def check_shards(shards: Sequence[Shard]) -> None:
    """Check numbers, counts and names over all the shards of a model. Raises ModelError."""
    count = _count(shards[0])
    if count != len(shards):
        raise ModelError(f"{shards[0].source}: key 'split.count' says {count} parts, but there are {len(shards)}")
    if count == 1:
        return
    owner: dict[str, str] = {}
    for number, shard in enumerate(shards):
        said = shard.metadata.require("split.no", int)
        if said != number:
            raise ModelError(f"{shard.source}: key 'split.no' must be {number} here, not {said}")
        said = shard.metadata.require("split.count", int)
        if said != count:
            raise ModelError(f"{shard.source}: key 'split.count' must be {count} as in the first part, not {said}")
        for record in shard.records:
            if record.name in owner:
                raise ModelError(f"{shard.source}: tensor {record.name!r} is in {owner[record.name]} as well")
            owner[record.name] = shard.source
    announced = shards[0].metadata.require("split.tensors.count", int)
    if announced != len(owner):
        raise ModelError(
            f"{shards[0].source}: key 'split.tensors.count' says {announced} tensors, but the {count} parts hold "
            f"{len(owner)}"
        )
