"""The pub/sub parser: the same replies in whatever pieces the bytes come."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.wire import MAX_REPLY_BYTES, Replies, command

VALUES = st.recursive(
    st.none() | st.integers(-(10**9), 10**9) | st.binary(max_size=20), lambda inner: st.lists(inner, max_size=4)
)


def encode(value: Any) -> bytes:
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, bytes):
        return b"$%d\r\n%s\r\n" % (len(value), value)
    return b"*%d\r\n" % len(value) + b"".join(map(encode, value))


@given(st.lists(VALUES, max_size=6), st.lists(st.integers(1, 30), min_size=1))
def test_replies_come_whole_however_the_bytes_are_cut(values: list[Any], cuts: list[int]) -> None:
    data = b"".join(map(encode, values))
    replies, got, at, turn = Replies(), [], 0, 0
    while at < len(data):
        step = cuts[turn % len(cuts)]
        got += replies.feed(data[at : at + step])
        at, turn = at + step, turn + 1
    assert got == values


def test_simple_replies_and_errors_are_lines() -> None:
    assert Replies().feed(b"+PONG\r\n-ERR no\r\n") == [b"PONG", b"ERR no"]


@pytest.mark.parametrize("data", [b"hello\r\n", b"$x\r\n", b"*1.5\r\n", b"!3\r\nabc\r\n", b"%1\r\n+a\r\n+b\r\n"])
def test_other_bytes_are_an_error(data: bytes) -> None:
    with pytest.raises(ConnectionError):
        Replies().feed(data)


def test_a_reply_without_an_end_is_an_error_and_not_all_of_memory() -> None:
    replies = Replies()
    replies.feed(b"$99999999999\r\n")
    for _ in range(63):
        assert replies.feed(b"x" * (MAX_REPLY_BYTES // 64)) == []
    with pytest.raises(ConnectionError):
        replies.feed(b"x" * (MAX_REPLY_BYTES // 64))


def test_a_command_is_spelled_as_the_server_reads_it() -> None:
    assert command("SUBSCRIBE", "a", "é") == b"*3\r\n$9\r\nSUBSCRIBE\r\n$1\r\na\r\n$2\r\n\xc3\xa9\r\n"
