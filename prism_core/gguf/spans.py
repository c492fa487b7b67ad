"""Where each tensor lies, and which block layout the ambiguous type ids 40 and 42 stand for.

Invariant: tensors lie in table order, each padded to the file's alignment, with no gap and no overlap, and all inside
the file. That makes a file's spans (the next tensor's offset minus its own) evidence of block sizes that no metadata
can contradict: the two meanings of id 42 (64 and 128 weights to a block) and of id 40 (NVFP4, or the first fork's
32-weight Q1_0) give different spans for every tensor of more than a few thousand weights. The decision is made once
per model, over all its shards; a model whose tensors disagree is refused. Where every tensor is so small that both
meanings fit, today's meaning is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..errors import ModelError
from .container import Shard, TensorRecord
from .types import AMBIGUOUS, BY_ID, REMOVED_IDS, TensorType

GROUP_WORDS = {
    TensorType.Q2_0: "Q2_0 with 64-weight groups",
    TensorType.PQ2_0: "Q2_0 with 128-weight groups",
    TensorType.NVFP4: "NVFP4",
    TensorType.Q1_0_V1: "Q1_0 with 32-weight groups",
}


@dataclass(frozen=True, slots=True)
class Placement:
    """A tensor of shard number `shard`: its resolved type, and where its bytes are in that file."""

    record: TensorRecord
    type: TensorType
    shard: int
    begin: int
    nbytes: int


def place(shards: Sequence[Shard]) -> list[Placement]:
    """Resolve every type and check every offset of a model's shards. Raises ModelError."""
    meanings = {type_id: _meaning(shards, type_id) for type_id in AMBIGUOUS}
    placements: list[Placement] = []
    for number, shard in enumerate(shards):
        expected = 0
        for record in shard.records:
            kind = _type_of(shard, record, meanings)
            nbytes = _check_place(shard, record, kind, expected)
            placements.append(Placement(record, kind, number, shard.data_start + record.offset, nbytes))
            expected = _padded(record.offset + nbytes, shard.alignment)
    return placements


def _padded(count: int, alignment: int) -> int:
    return -(-count // alignment) * alignment


def _type_of(shard: Shard, record: TensorRecord, meanings: dict[int, TensorType | None]) -> TensorType:
    type_id = record.type_id
    kind = meanings[type_id] if type_id in meanings else BY_ID.get(type_id)
    what = f"{shard.source}: tensor {record.name!r}"
    if kind is None:
        why = "was removed from the format" if type_id in REMOVED_IDS else "is unknown"
        raise ModelError(f"{what}: type id {type_id} {why}")
    if record.shape[0] % kind.block_size:
        raise ModelError(
            f"{what}: rows of {record.shape[0]} values are not a multiple of the {kind.name} block of {kind.block_size}"
        )
    return kind


def _check_place(shard: Shard, record: TensorRecord, kind: TensorType, expected: int) -> int:
    """Check one tensor's offset and end; returns its bytes."""
    nbytes = kind.nbytes(record.elements)
    what = f"{shard.source}: tensor {record.name!r}"
    if record.offset % shard.alignment:
        raise ModelError(f"{what}: offset {record.offset} is not a multiple of the alignment {shard.alignment}")
    if record.offset < expected:
        raise ModelError(f"{what}: offset {record.offset} overlaps the tensor before it, which ends at {expected}")
    if record.offset > expected:
        raise ModelError(f"{what}: offset {record.offset} leaves a gap; the tensor before it ends at {expected}")
    end = shard.data_start + record.offset + nbytes
    if end > shard.size:
        raise ModelError(
            f"{what}: its {nbytes} bytes end at {end}, but the file has {shard.size}: the file is truncated"
        )
    return nbytes


def _spans(shards: Sequence[Shard], type_id: int) -> Iterator[tuple[Shard, TensorRecord, int, bool]]:
    """(shard, record, span, is the last of its file) of every tensor with this id."""
    for shard in shards:
        for index, record in enumerate(shard.records):
            if record.type_id != type_id:
                continue
            last = index + 1 == len(shard.records)
            end = shard.size - shard.data_start if last else shard.records[index + 1].offset
            yield shard, record, end - record.offset, last


def _fits(kind: TensorType, shard: Shard, record: TensorRecord, span: int, last: bool) -> bool:
    if record.shape[0] % kind.block_size:
        return False
    nbytes = kind.nbytes(record.elements)
    if last:
        # Padding after the last tensor may be absent, and may be all the way to the next multiple.
        return nbytes <= span < nbytes + shard.alignment
    return span == _padded(nbytes, shard.alignment)


def _meaning(shards: Sequence[Shard], type_id: int) -> TensorType | None:
    """What `type_id` means in this model; None where no tensor has it."""
    candidates = AMBIGUOUS[type_id]
    decided: tuple[TensorType, TensorRecord] | None = None
    undecided: tuple[Shard, TensorRecord, int] | None = None
    seen = False
    for shard, record, span, last in _spans(shards, type_id):
        seen = True
        fits = [kind for kind in candidates if _fits(kind, shard, record, span, last)]
        if not fits:
            # The last tensor of a damaged file proves nothing; the others may still decide, and the end is checked.
            if last:
                undecided = undecided or (shard, record, span)
                continue
            raise _neither(shard, record, span, candidates)
        if len(fits) > 1:
            continue
        if decided and decided[0] is not fits[0]:
            raise ModelError(
                f"{shard.source}: tensor {record.name!r} is laid out as {GROUP_WORDS[fits[0]]}, but "
                f"{decided[1].name!r} as {GROUP_WORDS[decided[0]]}: type id {type_id} must mean one thing in a file"
            )
        decided = decided or (fits[0], record)
    if decided:
        return decided[0]
    if undecided:
        raise _neither(*undecided, candidates)
    return candidates[0] if seen else None


def _neither(shard: Shard, record: TensorRecord, span: int, candidates: tuple[TensorType, TensorType]) -> ModelError:
    sizes = " nor ".join(
        f"{GROUP_WORDS[kind]} ({_padded(record.elements // kind.block_size * kind.block_bytes, shard.alignment)} bytes)"
        for kind in candidates
    )
    return ModelError(
        f"{shard.source}: tensor {record.name!r} with type id {record.type_id} and shape {list(record.shape)} spans "
        f"{span} bytes, which is neither {sizes}: the file is damaged or truncated"
    )
