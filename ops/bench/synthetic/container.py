"""A GGUF writer that writes whatever it is asked to: any type id, any number of keys, wrong values on purpose.

It shares nothing with the reader it is used to test. Metadata values choose their GGUF type by their Python type
(int: u32, or i32 and u64 where that does not hold them; float: f32; lists by their entries; numpy arrays by dtype);
`Typed("u16", 3)` or `Typed("i8", [1, 2])` says it outright.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

KINDS = {"u8": 0, "i8": 1, "u16": 2, "i16": 3, "u32": 4, "i32": 5, "f32": 6, "bool": 7, "string": 8, "array": 9}
KINDS |= {"u64": 10, "i64": 11, "f64": 12}
_CODES = {"u8": "B", "i8": "b", "u16": "H", "i16": "h", "u32": "I", "i32": "i", "f32": "f", "bool": "B"}
_CODES |= {"u64": "Q", "i64": "q", "f64": "d"}
_OF_DTYPE = {"u1": "u8", "i1": "i8", "u2": "u16", "i2": "i16", "u4": "u32", "i4": "i32", "f4": "f32", "b1": "bool"}
_OF_DTYPE |= {"u8": "u64", "i8": "i64", "f8": "f64"}


class Typed(NamedTuple):
    """A value with its GGUF type said outright; `value` is a scalar or a sequence (then an array of `kind`)."""

    kind: str
    value: Any


class Tensor(NamedTuple):
    """A tensor to write: `shape` in ne order, `type_id` as it goes into the file, `data` its bytes in any buffer."""

    name: str
    shape: Sequence[int]
    type_id: int
    data: Any


def string_bytes(text: str | bytes) -> bytes:
    """A GGUF string: its u64 length, then its bytes."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _scalar_kind(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return "bool"
    if isinstance(value, str | bytes):
        return "string"
    if isinstance(value, float | np.floating):
        return "f32"
    if isinstance(value, int | np.integer):
        if value < 0:
            return "i32" if value >= -(1 << 31) else "i64"
        return "u32" if value < 1 << 32 else "u64"
    raise TypeError(f"no GGUF type for {value!r}")


def _array_kind(values: Any) -> str:
    if isinstance(values, np.ndarray):
        return _OF_DTYPE[f"{values.dtype.kind}{values.dtype.itemsize}"]
    kinds = {_scalar_kind(value) for value in values}
    return "i32" if kinds <= {"u32", "i32"} else kinds.pop()


def _payload(kind: str, value: Any) -> bytes:
    return string_bytes(value) if kind == "string" else struct.pack("<" + _CODES[kind], value)


def value_bytes(value: Any) -> bytes:
    """A metadata value with its type in front."""
    kind, inner = value if isinstance(value, Typed) else (None, value)
    if not isinstance(inner, list | tuple | np.ndarray):
        kind = kind or _scalar_kind(inner)
        return struct.pack("<I", KINDS[kind]) + _payload(kind, inner)
    kind = kind or _array_kind(inner)
    if kind == "string":
        body = b"".join(string_bytes(text) for text in inner)
    else:
        body = np.asarray(inner, dtype=np.dtype("<" + _CODES[kind]) if kind != "bool" else np.uint8).tobytes()
    return struct.pack("<IIQ", KINDS["array"], KINDS[kind], len(inner)) + body


def metadata_bytes(metadata: Mapping[str, Any]) -> bytes:
    """All keys and values, in order."""
    return b"".join(string_bytes(key) + value_bytes(value) for key, value in metadata.items())


def header_bytes(tensors: int, keys: int, *, magic: bytes = b"GGUF", version: int = 3) -> bytes:
    """The 24 bytes at the start of a file."""
    return magic + struct.pack("<IQQ", version, tensors, keys)


def record_bytes(name: str, shape: Sequence[int], type_id: int, offset: int) -> bytes:
    """One line of the tensor table."""
    dims = struct.pack(f"<{len(shape)}Q", *(dim & (1 << 64) - 1 for dim in shape))
    return string_bytes(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", type_id, offset)


def padding(count: int, alignment: int) -> int:
    """Bytes that bring `count` to the next multiple of `alignment`."""
    return -count % alignment


def _pieces(metadata: Mapping[str, Any], tensors: Sequence[Tensor], alignment: int) -> Iterator[Any]:
    """The file's bytes in order, tensor data not copied."""
    head = header_bytes(len(tensors), len(metadata)) + metadata_bytes(metadata)
    offset = 0
    table = []
    for tensor in tensors:
        size = memoryview(tensor.data).nbytes
        table.append(record_bytes(tensor.name, tensor.shape, tensor.type_id, offset))
        offset += size + padding(size, alignment)
    head += b"".join(table)
    yield head
    yield bytes(padding(len(head), alignment))
    for tensor in tensors:
        data = memoryview(tensor.data)
        yield data
        yield bytes(padding(data.nbytes, alignment))


def _tensors(tensors: Sequence[Any]) -> list[Tensor]:
    return [Tensor(name, tuple(shape), int(type_id), np.ascontiguousarray(np.frombuffer(data, dtype=np.uint8)
            if isinstance(data, bytes | bytearray) else data)) for name, shape, type_id, data in tensors]  # fmt: skip


def gguf_bytes(metadata: Mapping[str, Any], tensors: Sequence[Any] = (), *, alignment: int = 32) -> bytes:
    """A whole file in memory. `tensors` are `Tensor`s or plain (name, shape in ne order, type id, bytes) tuples.

    `alignment` is what is laid out; say `general.alignment` in the metadata as well where it is not 32.
    """
    return b"".join(bytes(piece) for piece in _pieces(metadata, _tensors(tensors), alignment))


def write_gguf(path: str | Path, metadata: Mapping[str, Any], tensors: Sequence[Any], *, alignment: int = 32) -> Path:
    """Write a file; as `gguf_bytes`, with no second copy of the tensor data. Returns the path."""
    path = Path(path)
    with path.open("wb") as file:
        _write(file, metadata, _tensors(tensors), alignment)
    return path


def _write(file: BinaryIO, metadata: Mapping[str, Any], tensors: Sequence[Tensor], alignment: int) -> None:
    for piece in _pieces(metadata, tensors, alignment):
        file.write(piece)


def write_split(
    folder: str | Path,
    stem: str,
    metadata: Mapping[str, Any],
    tensors: Sequence[Any],
    *,
    parts: int,
    alignment: int = 32,
) -> list[Path]:
    """Write a split model of `parts` files `<stem>-00001-of-0000N.gguf`; returns their paths, first part first."""
    paths = []
    bounds = [len(tensors) * part // parts for part in range(parts + 1)]
    for part in range(parts):
        keys = {
            "split.no": Typed("u16", part),
            "split.count": Typed("u16", parts),
            "split.tensors.count": Typed("i32", len(tensors)),
        }
        if part == 0:
            keys = {**metadata, **keys}
        elif "general.alignment" in metadata:
            keys["general.alignment"] = metadata["general.alignment"]
        path = Path(folder) / f"{stem}-{part + 1:05d}-of-{parts:05d}.gguf"
        paths.append(write_gguf(path, keys, tensors[bounds[part] : bounds[part + 1]], alignment=alignment))
    return paths
