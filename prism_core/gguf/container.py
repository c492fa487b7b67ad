"""The bounded parser of one GGUF file: header, keys, tensor table.

Invariant: nothing here trusts a length. Every count and length is compared with the bytes that really remain before
anything is read or allocated, so memory is bounded by a small multiple of the header's own bytes and time is linear in
them; whatever the bytes are, the outcome is a `Shard` or a `ModelError`. Tensor data is never touched, and whether the
offsets of the table make sense is decided later (`spans.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from ..errors import ModelError
from .metadata import Metadata, show

HEADER_BYTES = 24
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 15
MAX_KEY_BYTES = (1 << 16) - 1
MAX_NAME_BYTES = 63
MAX_STRING_BYTES = 16 << 20
MAX_STRINGS = 1 << 20
MAX_ARRAY_BYTES = 256 << 20
MAX_DIMS = 4
MAX_DIM = 1 << 40
MAX_ALIGNMENT = 1 << 20
MAX_HEADER_BYTES = 128 << 20
FIRST_READ = 16 << 20
"""What is read of a file before it is known how long its header is: most have less."""
MIN_KEY_BYTES = 8 + 1 + 4 + 1
MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8

BOOL, STRING, ARRAY = 7, 8, 9
_SCALARS = {
    number: struct.Struct("<" + code)
    for number, code in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "B",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_DTYPES = {
    number: np.dtype("<" + code)
    for number, code in {
        0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "u1", 10: "u8", 11: "i8", 12: "f8"
    }.items()
}  # fmt: skip
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One line of the tensor table, as written: `shape` is ne (fastest first), `offset` relative to the data start."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int

    @property
    def elements(self) -> int:
        count = 1
        for dim in self.shape:
            count *= dim
        return count


@dataclass(frozen=True, slots=True)
class Shard:
    """One parsed file of a model: `size` is the whole file's bytes, `data_start` where tensor data begins."""

    source: str
    version: int
    metadata: Metadata
    alignment: int
    data_start: int
    size: int
    records: tuple[TensorRecord, ...]


class _MoreNeeded(Exception):
    """The header goes on to byte `end` at least, which is in the file but not in the part that was given."""

    def __init__(self, end: int) -> None:
        super().__init__(end)
        self.end = end


def parse(buffer: Any, source: str = "GGUF") -> Shard:
    """Parse the header of a whole GGUF file in `buffer` (bytes, mmap, memoryview); `source` names it in errors."""
    with memoryview(buffer) as view, view.cast("B") as raw:
        return _Parser(raw, source).shard()


def parse_start(read: Callable[[int], Any], size: int, source: str) -> Shard:
    """Parse the header of a file of `size` bytes whose first n bytes are `read(n)`: as much is read as is needed."""
    count = min(size, FIRST_READ)
    while True:
        try:
            with memoryview(read(count)) as view, view.cast("B") as raw:
                return _Parser(raw, source, size).shard()
        except _MoreNeeded as more:
            count = min(size, max(2 * count, more.end))


class _Parser:
    """`view`: the file's first bytes, or all of the `size` bytes that it has."""

    def __init__(self, view: memoryview, source: str, size: int | None = None) -> None:
        self.view = view
        self.source = source
        self.size = len(view) if size is None else size
        self.at = 0
        self.strings_left = MAX_STRINGS

    def fail(self, what: str) -> NoReturn:
        raise ModelError(f"{self.source}: {what}")

    def need(self, count: int, what: str) -> int:
        """Claim `count` bytes and return where they begin."""
        at = self.at
        if count > self.size - at:
            self.fail(f"{what} needs {count} bytes at offset {at}, but the file ends after {self.size - at}")
        end = at + count
        if end > len(self.view) or end > MAX_HEADER_BYTES:
            if end > MAX_HEADER_BYTES:
                self.fail(f"{what} ends at offset {end}; a header may have {MAX_HEADER_BYTES} bytes")
            raise _MoreNeeded(end)
        self.at = end
        return at

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.view, self.need(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.view, self.need(8, what))[0])

    def string(self, what: str, limit: int) -> str:
        length = self.u64(f"the length of {what}")
        if length > limit:
            self.fail(f"{what} is {length} bytes long; the limit is {limit}")
        at = self.need(length, what)
        try:
            return str(self.view[at : at + length], "utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not valid UTF-8 at byte {error.start}")

    def identifier(self, what: str, limit: int) -> str:
        text = self.string(what, limit)
        if not text:
            self.fail(f"{what} is empty")
        if "\0" in text:
            self.fail(f"{what} {show(text)} contains a NUL")
        return text

    def shard(self) -> Shard:
        version = self.header()
        tensor_count = self.count("tensors", MIN_TENSOR_BYTES, MAX_TENSORS)
        key_count = self.count("keys", MIN_KEY_BYTES, MAX_KEYS)
        values: dict[str, object] = {}
        for index in range(key_count):
            key = self.identifier(f"the name of key {index}", MAX_KEY_BYTES)
            if key in values:
                self.fail(f"key {show(key)} appears twice")
            values[key] = self.value(key)
        metadata = Metadata(values, self.source)
        alignment = self.alignment(metadata)
        records = self.table(tensor_count)
        data_start = -(-self.at // alignment) * alignment
        return Shard(self.source, version, metadata, alignment, data_start, self.size, records)

    def header(self) -> int:
        if self.size < HEADER_BYTES:
            self.fail(f"{self.size} bytes are too short for a GGUF file, whose header alone has {HEADER_BYTES}")
        magic = bytes(self.view[:4])
        if magic != b"GGUF":
            self.fail(f"not a GGUF file: it begins with {magic!r} instead of b'GGUF'")
        self.at = 4
        version = self.u32("the version")
        if version and not version & 0xFFFF:
            self.fail(f"version 0x{version:08x}: a big-endian GGUF file; only little-endian files can be read")
        if version not in (2, 3):
            self.fail(f"GGUF version {version} is not supported; versions 2 and 3 are")
        return version

    def count(self, what: str, least_bytes: int, limit: int) -> int:
        count = self.u64(f"the number of {what}")
        if count > limit:
            self.fail(f"the header announces {count} {what}; the limit is {limit}")
        if count * least_bytes > self.size - self.at:
            self.fail(f"the header announces {count} {what}, but only {self.size - self.at} bytes follow")
        return count

    def value(self, key: str) -> object:
        what = f"key {show(key)}"
        kind = self.u32(f"the type of {what}")
        if kind == STRING:
            return self.string(what, MAX_STRING_BYTES)
        if kind == ARRAY:
            return self.array(what)
        form = _SCALARS.get(kind)
        if form is None:
            self.fail(f"{what} has the unknown value type {kind}")
        value = form.unpack_from(self.view, self.need(form.size, what))[0]
        if kind != BOOL:
            return value
        if value > 1:
            self.fail(f"{what} is a boolean with the value {value}; it must be 0 or 1")
        return bool(value)

    def array(self, what: str) -> object:
        kind = self.u32(f"the element type of {what}")
        count = self.u64(f"the length of {what}")
        if kind == STRING:
            return self.string_array(what, count)
        if kind == ARRAY:
            self.fail(f"{what} is an array of arrays, which is not supported")
        dtype = _DTYPES.get(kind)
        if dtype is None:
            self.fail(f"{what} is an array of the unknown element type {kind}")
        if count * dtype.itemsize > MAX_ARRAY_BYTES:
            self.fail(f"{what} is an array of {count} values; the limit is {MAX_ARRAY_BYTES // dtype.itemsize}")
        at = self.need(count * dtype.itemsize, what)
        values = np.frombuffer(self.view, dtype, count, at).copy() if count else np.zeros(0, dtype)
        if kind == BOOL:
            if count and values.max() > 1:
                self.fail(f"{what} is an array of booleans with the value {values.max()}; they must be 0 or 1")
            values = values.view(np.bool_)
        values.flags.writeable = False
        return values

    def string_array(self, what: str, count: int) -> tuple[str, ...]:
        if count > self.strings_left:
            self.fail(f"{what} is an array of {count} strings; the limit over all keys is {MAX_STRINGS}")
        if count * 8 > self.size - self.at:
            self.fail(f"{what} is an array of {count} strings, but only {self.size - self.at} bytes follow")
        self.strings_left -= count
        # The one hot loop of the parser (a vocabulary has 262,144 entries), hence no calls to self in it.
        view, at, length_at = self.view, self.at, _U64.unpack_from
        size = min(len(view), MAX_HEADER_BYTES)
        out: list[str] = []
        try:
            for _ in range(count):
                start = at + 8
                if start > size:
                    break
                (length,) = length_at(view, at)
                at = start + length
                if length > MAX_STRING_BYTES or at > size:
                    at = start - 8
                    break
                out.append(str(view[start:at], "utf-8"))
        except UnicodeDecodeError as error:
            self.fail(f"{what}: string {len(out)} is not valid UTF-8 at byte {error.start}")
        self.at = at
        if len(out) < count:
            self.string(f"string {len(out)} of {what}", MAX_STRING_BYTES)
        return tuple(out)

    def alignment(self, metadata: Metadata) -> int:
        key = "general.alignment"
        value = metadata.optional(key, int, 32, low=8, high=MAX_ALIGNMENT)
        if value & (value - 1):
            self.fail(f"key {key!r} must be a power of two, not {value}")
        return value

    def table(self, count: int) -> tuple[TensorRecord, ...]:
        records: dict[str, TensorRecord] = {}
        for index in range(count):
            name = self.identifier(f"the name of tensor {index}", MAX_NAME_BYTES)
            if name in records:
                self.fail(f"tensor {show(name)} appears twice")
            records[name] = self.record(name)
        return tuple(records.values())

    def record(self, name: str) -> TensorRecord:
        what = f"tensor {show(name)}"
        dims = self.u32(f"the dimension count of {what}")
        if not 1 <= dims <= MAX_DIMS:
            self.fail(f"{what} has {dims} dimensions; 1 to {MAX_DIMS} are allowed")
        at = self.need(8 * dims, f"the shape of {what}")
        shape = struct.unpack_from(f"<{dims}q", self.view, at)
        for dim in shape:
            if not 1 <= dim <= MAX_DIM:
                self.fail(f"{what} has the dimension {dim} in {list(shape)}; 1 to {MAX_DIM} are allowed")
        type_id = self.u32(f"the type of {what}")
        offset = self.u64(f"the offset of {what}")
        record = TensorRecord(name, shape, type_id, offset)
        if record.elements >= 1 << 60:
            self.fail(f"{what} has {record.elements} elements in {list(shape)}; the limit is {(1 << 60) - 1}")
        return record
