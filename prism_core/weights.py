"""The weights of a model in the layout that the kernels read, shared between the processes of a host.

Every matrix is packed by its family, every small tensor becomes float32, each on a cache line. The packed bytes are
mapped from the host's cache (`packed.py`), where the first process puts them; where that cannot be, and for float32
weights, which are for comparisons only, they are made in private memory.

The model's file is read and never mapped: whoever cuts it short meanwhile causes an error, not the end of the process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prism_core import packed
from prism_core.gguf import GgufFile, TensorInfo, TensorType, check_scales, dequantize
from prism_core.kernels.families import Family, family_for
from prism_core.kernels.jit import cache_folder
from prism_core.kv import large
from prism_core.models.symbols import TensorUse, round_up

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
        at = packed.DATA_START
        for name, use in uses.items():
            kind = packed_type(file.tensors[name].type, exact)
            size = 4 * use.cols
            if use.matrix:
                family = self._families[name] = family_for(kind)
                size = family.packed_bytes(kind, use.rows, use.cols)
            self.places[name] = Place(at, size)
            at += round_up(size, _LINE) + _LINE  # a line of slack: kernels may read one vector past the end
        self.nbytes = at

    @property
    def digest(self) -> bytes:
        """16 bytes that say which tensor lies where, in which form."""
        table = [
            (name, place.offset, place.nbytes, use.rows, use.cols, self._families[name].name if use.matrix else "f32")
            for (name, place), use in zip(self.places.items(), self.uses.values(), strict=True)
        ]
        return hashlib.blake2b(repr(table).encode(), digest_size=16).digest()

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
            result = dequantize(tensor.type, tensor.data, use.cols).astype(np.float32).view(np.uint8)
        else:
            kind, data = tensor.type, tensor.data
            if self.exact:
                data = dequantize(kind, data, use.rows * use.cols).view(np.uint8)
                kind = TensorType.F32
            result = self._families[name].pack(kind, data, use.rows, use.cols).view(np.uint8).reshape(-1)
        if result.nbytes != place.nbytes:
            raise RuntimeError(f"tensor {name} was packed into {result.nbytes} bytes, not the {place.nbytes} announced")
        return result


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
        InvalidRequest: an environment variable of the cache is no number. MemoryError: the system refuses memory.
    """
    memory = None
    if not layout.exact:  # those have several times the file's size: not worth keeping
        name = f"{file.sha256()}-{cache_folder().name}.bin"
        entry = packed.Entry(name, layout.nbytes, layout.digest)
        memory = packed.shared(entry, lambda: _pieces(file, layout, progress), progress)
    if memory is not None:
        return Weights(layout, memory, shared=True)
    return Weights(layout, _private(file, layout, progress), shared=False)


def _pieces(file: GgufFile, layout: Layout, progress: Progress | None) -> Iterator[tuple[int, Bytes]]:
    """(offset, packed bytes) of every tensor."""
    for number, name in enumerate(layout.uses):
        if progress is not None:
            progress("packing weights", number / len(layout.uses))
        yield layout.places[name].offset, layout.pack(name, replace(file.tensors[name], data=file.read(name)))
    file.check_unchanged()


def _private(file: GgufFile, layout: Layout, progress: Progress | None) -> Bytes:
    whole = large(layout.nbytes)
    for offset, piece in _pieces(file, layout, progress):
        whole[offset : offset + piece.nbytes] = piece
    return whole
