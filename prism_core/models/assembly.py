"""From a symbolic graph to the tables of `kernels/program.py`: every name becomes an address.

Invariant: an assembled program refers only to memory that it keeps alive itself (scratch, constants, compiled entries)
or that its caller does (weights).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism_core.kernels.families import Family
from prism_core.kernels.jit import Entry
from prism_core.kernels.operations import OPERATIONS
from prism_core.kernels.tiles import ROWS
from prism_core.kernels.words import ARGUMENTS, BLOCKS, OPERATION_WORDS, PHASE_WORDS, SEGMENT_TOKENS
from prism_core.kv import aligned
from prism_core.models import symbols
from prism_core.models.graph import PLAIN, Graph
from prism_core.models.symbols import (
    Argument,
    Buffer,
    Encoded,
    Encoder,
    FamilyEntry,
    Operation,
    PageOffset,
    Partials,
    Phase,
    Stride,
    Weight,
    Workspace,
    round_up,
)

Words = NDArray[np.int64]

_LINE = 64


class Scratch:
    """Where the buffers of a graph lie, for calls of up to `tokens` tokens by `threads` threads in a context."""

    def __init__(self, graph: Graph, tokens: int, threads: int, context_tokens: int) -> None:
        self.nbytes = 0
        self._at: dict[object, int] = {}
        for name, width in graph.widths.items():
            self._place(name, 4 * round_up(width, 16) * tokens)
        for encoded in sorted(graph.encodings, key=lambda each: (each.buffer.name, each.coding.name)):
            if encoded.coding.name != PLAIN:
                self._place(encoded, coding_stride(encoded) * tokens)
        self._place(Workspace(), graph.workspace_bytes * threads)
        self._place(Partials(), graph.partial_bytes * (context_tokens // SEGMENT_TOKENS + 1))

    def _place(self, key: object, size: int) -> None:
        self._at[key] = self.nbytes
        self.nbytes += round_up(size, _LINE) + _LINE

    def offset(self, key: object) -> int:
        """Of a buffer name, an encoding or the workspace."""
        return self._at[key]


def coding_stride(encoded: Encoded) -> int:
    """Bytes from one token to the next."""
    if encoded.coding.name == PLAIN:
        return 4 * encoded.buffer.pitch
    return encoded.coding.coding_bytes(encoded.buffer.width)


class Program:
    """The tables of one graph.

    `weight_address(name)` gives the address of a tensor, `family_of(name)` the family of a matrix; `cache_bytes` is
    the size of an element of the KV cache, 2 or 4.
    """

    def __init__(
        self,
        graph: Graph,
        weight_address: Callable[[str], int],
        family_of: Callable[[str], Family],
        *,
        tokens: int,
        threads: int,
        context_tokens: int,
        cache_bytes: int,
        progress: Callable[[str, float], None] | None = None,
    ) -> None:
        self._weight_address, self._family_of, self._cache_bytes = weight_address, family_of, cache_bytes
        self._layout = Scratch(graph, tokens, threads, context_tokens)
        self._scratch = aligned(self._layout.nbytes)
        self._kept: list[Any] = []
        self._warm(graph, progress)
        self.tokens = tokens
        self.ingest_phases = graph.ingest_phases
        count = sum(len(phase.operations) for phase in graph.phases)
        self.operations: Words = np.zeros(count * OPERATION_WORDS, dtype=np.int64)
        self.phases: Words = np.zeros(len(graph.phases) * PHASE_WORDS, dtype=np.int64)
        self._ahead = _ahead([operation for phase in graph.phases for operation in phase.operations])
        number = 0
        for index, phase in enumerate(graph.phases):
            row = self.phases[index * PHASE_WORDS :][:PHASE_WORDS]
            row[:] = number, len(phase.operations), phase.split, grain(phase, family_of)
            for operation in phase.operations:
                self._write(operation, self.operations[number * OPERATION_WORDS :][:OPERATION_WORDS])
                number += 1
        self.phase_count = len(graph.phases)
        self.labels = [_label(phase.operations) for phase in graph.phases]

    def _warm(self, graph: Graph, progress: Callable[[str, float], None] | None) -> None:
        """Compile, or load, every kernel of the graph, the slow part of a first start."""
        entries = dict.fromkeys(
            entry for phase in graph.phases for operation in phase.operations for entry in self._entries(operation)
        )
        for number, entry in enumerate(entries):
            if progress is not None:
                progress("preparing kernels", number / len(entries))
            entry.warm()

    def _entries(self, operation: Operation) -> Iterator[Entry]:
        yield self._kernel(operation.kernel)
        for argument in operation.arguments:
            if isinstance(argument, FamilyEntry):
                yield self._family_entry(argument)
            elif isinstance(argument, Encoder):
                yield argument.coding.encode

    def _family_entry(self, argument: FamilyEntry) -> Entry:
        family = self._family_of(argument.name)
        return family.matmul if argument.entry == "matmul" else family.row

    def _write(self, operation: Operation, row: Words) -> None:
        units = operation.units
        if operation.tiles_of:
            rows = operation.arguments[2]
            assert isinstance(rows, int)
            units = self._family_of(operation.tiles_of).tiles(rows)
        span = -BLOCKS if operation.span == symbols.BLOCKS else operation.span
        row[:ARGUMENTS] = self._entry(self._kernel(operation.kernel)), units, span
        for index, argument in enumerate(operation.arguments):
            row[ARGUMENTS + index] = self._value(argument)

    def _kernel(self, name: str) -> Entry:
        if name in ("attention", "store_kv"):
            name += f"_f{8 * self._cache_bytes}"
        return OPERATIONS[name]

    def _entry(self, entry: Entry) -> int:
        self._kept.append(entry)
        return entry.address

    def _value(self, argument: Argument) -> int:
        match argument:
            case int():
                return argument
            case float():
                return int(np.float32(argument).view(np.uint32))
            case np.ndarray():
                constant = aligned(argument.nbytes).view(argument.dtype)
                constant[:] = argument
                self._kept.append(constant)
                return int(constant.ctypes.data)
            case Weight(name):
                return self._weight_address(name)
            case FamilyEntry():
                return self._entry(self._family_entry(argument))
            case PageOffset(elements):
                return elements * self._cache_bytes
            case Stride(of):
                return coding_stride(of)
            case Encoder(coding):
                return self._entry(coding.encode)
            case Encoded(buffer, coding) if coding.name == PLAIN:
                return self._scratch_address(buffer.name)
            case Buffer(name, _):
                return self._scratch_address(name)
            case Encoded() | Workspace() | Partials():
                return self._scratch_address(argument)
        raise TypeError(f"{argument!r} has no value")

    def _scratch_address(self, key: object) -> int:
        return int(self._scratch.ctypes.data) + self._layout.offset(key)

    def tensor_at(self, address: int) -> str:
        """The tensor that the operation at an address of `operations` reads, or the next one that does."""
        return self._ahead[(address - int(self.operations.ctypes.data)) // (8 * OPERATION_WORDS)]

    @property
    def scratch_bytes(self) -> int:
        """Memory that belongs to this program alone."""
        return self._layout.nbytes


def grain(phase: Phase, family_of: Callable[[str], Family]) -> int:
    """Row tiles that a product of several tokens does together; 1 for other work, as for the logits of one token."""
    families = [family_of(each.tiles_of) for each in phase.operations if each.kernel == "matmul"]
    return max([1, *(ROWS // family.tile_rows for family in families)])


def _ahead(operations: list[Operation]) -> list[str]:
    """Of each operation, the first tensor that it or a later one reads."""
    names, name = [], ""
    for operation in reversed(operations):
        read = (argument.name for argument in operation.arguments if isinstance(argument, FamilyEntry | Weight))
        name = next(read, name)
        names.append(name)
    return names[::-1]


def _label(operations: list[Operation]) -> str:
    return "+".join(dict.fromkeys(operation.kernel for operation in operations))
