"""The codec: what goes comes back, and nothing else does."""

from __future__ import annotations

import contextlib
import datetime
import math
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism_core import codec

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES)
def test_a_value_comes_back_as_it_went(value: object) -> None:
    back = codec.unpack(codec.pack(value))
    assert back == value
    assert type(back) is type(value)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_an_error_of_the_codec(data: bytes) -> None:
    try:
        value = codec.unpack(data)
    except codec.CodecError:
        return
    assert codec.unpack(codec.pack(value)) == value or any(math.isnan(x) for x in _floats(value))


def _floats(value: object) -> list[float]:
    if isinstance(value, float):
        return [value]
    if isinstance(value, list):
        return [x for item in value for x in _floats(item)]
    if isinstance(value, dict):
        return [x for item in value.values() for x in _floats(item)]
    return []


@pytest.mark.parametrize(
    "value",
    [(1, 2), [(1,)], {1, 2}, object(), {"a": {1: 2}}, 1 << 64, datetime.datetime.now(), b"x".__class__, "\ud800"],
)
def test_what_would_not_come_back_is_refused(value: object) -> None:
    with pytest.raises(codec.CodecError):
        codec.pack(value)


@pytest.mark.parametrize("bad", [1 << 64, -(1 << 63) - 1, "\ud800"])
@pytest.mark.parametrize(
    "where", [lambda bad: bad, lambda bad: [1, "one", bad], lambda bad: {"a": [b"x"], "b": {"c": bad}}]
)
def test_a_refused_value_leaves_nothing_in_the_next(bad: object, where: Callable[[object], object]) -> None:
    with pytest.raises(codec.CodecError):
        codec.pack(where(bad))
    assert codec.pack({"a": 1}) == msgpack.packb({"a": 1})


@pytest.mark.parametrize("last", [0, 1 << 64])
def test_a_large_value_leaves_no_memory_behind(last: int) -> None:
    value = [b"x" * (8 << 20), last]
    tracemalloc.start()
    try:
        with contextlib.suppress(codec.CodecError):
            codec.pack(value)
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()


def test_threads_do_not_share_what_they_pack() -> None:
    values = [[str(number) * 50, number] * 200 for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        packed = list(threads.map(lambda value: [codec.pack(value) for _ in range(200)], values))
    assert all(set(each) == {msgpack.packb(value)} for each, value in zip(packed, values, strict=True))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        codec.pack([1, 2]) + b"\x00",
        codec.pack("hello")[:-1],
        msgpack.packb({1: 2}),
        msgpack.packb({b"a": 2}),
        msgpack.packb(msgpack.ExtType(5, b"x")),
        msgpack.packb(msgpack.ExtType(5, b"")),
        msgpack.packb(msgpack.Timestamp(1, 2)),
        msgpack.packb(b"\xff", use_bin_type=False),
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000 + b"\xc0",
    ],
)
def test_foreign_cut_and_oversized_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(codec.CodecError):
        codec.unpack(data)


def test_depth_is_bounded_both_ways() -> None:
    fits: object = 0
    for _ in range(codec.MAX_DEPTH):
        fits = [fits]
    assert codec.unpack(codec.pack(fits)) == fits
    with pytest.raises(codec.CodecError, match="32"):
        codec.pack([fits])
    with pytest.raises(codec.CodecError, match="32"):
        codec.unpack(msgpack.packb({"a": fits}))


def test_size_is_bounded_both_ways() -> None:
    with pytest.raises(codec.CodecError, match="limit of 10"):
        codec.pack("x" * 20, max_bytes=10)
    with pytest.raises(codec.CodecError, match="limit of 10"):
        codec.unpack(codec.pack("x" * 20), max_bytes=10)
