"""The one wire format of Prism: msgpack, strict and bounded.

Kept: what `unpack` returns is made of None, bool, int, float, str, bytes, list and dict with string keys only, whoever
wrote the bytes, and no declared length makes it allocate more than the input could hold. No extension types, no
timestamps, no pickle, so reading a value can never run code.
Not promised: canonical bytes. Two writers may order the keys of a map differently; hash what you packed, not what you
read.
"""

from __future__ import annotations

from typing import Any, NoReturn

import msgpack

from prism_core.errors import PrismError

__all__ = ["MAX_BYTES", "MAX_DEPTH", "CodecError", "pack", "unpack"]

MAX_BYTES = 64 << 20
"""Longest value that `unpack` reads and `pack` writes, in bytes, unless the caller asks for less."""

MAX_DEPTH = 32
"""Deepest nesting of lists and maps."""

_SCALARS = (type(None), bool, int, float, str, bytes)


class CodecError(PrismError, ValueError):
    """Bytes are no value of this codec, or a value cannot be written by it."""


def pack(value: Any, *, max_bytes: int = MAX_BYTES) -> bytes:
    """`value` as msgpack bytes. Tuples are refused, because they would come back as lists; `CodecError` says where."""
    _check(value, 0)
    try:
        data: bytes = msgpack.packb(value, use_bin_type=True, strict_types=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise CodecError(f"cannot be written as msgpack: {error}") from error
    if len(data) > max_bytes:
        raise CodecError(f"a value of {len(data)} bytes is over the limit of {max_bytes}")
    return data


def unpack(data: bytes, *, max_bytes: int = MAX_BYTES) -> Any:
    """The one value that `data` holds; `CodecError` for anything cut, trailing, over-long, too deep or not of this
    codec."""
    if len(data) > max_bytes:
        raise CodecError(f"a value of {len(data)} bytes is over the limit of {max_bytes}")
    try:
        value = msgpack.unpackb(
            data,
            raw=False,
            use_list=True,
            strict_map_key=True,
            ext_hook=_no_extension,
            timestamp=0,
            max_str_len=len(data),
            max_bin_len=len(data),
            max_array_len=len(data),
            max_map_len=len(data),
            max_ext_len=0,
        )
    except CodecError:
        raise
    except Exception as error:
        # msgpack raises ValueError, its own FormatError and StackError, UnicodeDecodeError, ... for bad input.
        raise CodecError(f"not a msgpack value ({len(data)} bytes): {error or type(error).__name__}") from error
    _check(value, 0)
    return value


def _no_extension(code: int, data: bytes) -> NoReturn:
    raise CodecError(f"msgpack extension type {code} is not part of this codec")


def _check(value: Any, depth: int) -> None:
    """Refuse what is too deep or has a type that does not come back as it went."""
    kind = type(value)
    if kind is list:
        if depth >= MAX_DEPTH:
            raise CodecError(f"nested deeper than {MAX_DEPTH} levels")
        # A list of token ids is the common case by far: one C-speed test instead of a call for each element.
        if not set(map(type, value)) <= _LEAVES:
            for item in value:
                _check(item, depth + 1)
    elif kind is dict:
        if depth >= MAX_DEPTH:
            raise CodecError(f"nested deeper than {MAX_DEPTH} levels")
        for key, item in value.items():
            if type(key) is not str:
                raise CodecError(f"the map key {key!r} is no string")
            _check(item, depth + 1)
    elif kind not in _LEAVES:
        raise CodecError(f"{kind.__name__} is not part of this codec")


_LEAVES = frozenset(_SCALARS)
