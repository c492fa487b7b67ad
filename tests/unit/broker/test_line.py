"""A turn's line at a socket: what it takes for an answer, and what cuts it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from redis.exceptions import ConnectionError

from broker.line import Line
from broker.wire import command


class Wire:
    """Connection and pool in one: one end of a socket pair, and what was done with it."""

    def __init__(self) -> None:
        self._sock, self.server = socket.socketpair()
        self._sock.settimeout(5)
        self.released = self.cut = False

    def get_connection(self) -> Wire:
        return self

    def release(self, connection: Wire) -> None:
        assert connection is self
        self.released = True

    def disconnect(self) -> None:
        self._sock.close()
        self.cut = True


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire._sock.close()
    wire.server.close()


def line_on(wire: Any) -> Line:
    line = Line.open(wire, "sha", "R", "W", 3)
    assert line is not None
    return line


def answered(wire: Wire, reply: bytes) -> Any:
    wire.server.sendall(reply)
    return line_on(wire).append(7, [b"one", b"two"], 12)


def test_a_line_sends_the_call_that_redis_py_would(wire: Wire) -> None:
    answered(wire, b"*4\r\n:0\r\n:8\r\n$0\r\n\r\n:0\r\n")
    sent = wire.server.recv(4096)
    assert sent == command("EVALSHA", "sha", "1", "prism:r:R", "R", "W", "3", "7", "12", "one", "two")


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        (b"*4\r\n:0\r\n:8\r\n$0\r\n\r\n:0\r\n", [0, 8, b"", 0]),
        (b"*4\r\n:0\r\n:9\r\n$0\r\n\r\n:0\r\n", [0, 9, b"", 0]),
        (b"*4\r\n:0\r\n:8\r\n$3\r\nwhy\r\n:0\r\n", [0, 8, b"why", 0]),
        (b"*4\r\n:0\r\n:8\r\n$0\r\n\r\n:1\r\n", [0, 8, b"", 1]),
        (b"*1\r\n:-1\r\n", [-1]),
        (b"*2\r\n:-3\r\n:4\r\n", [-3, 4]),
    ],
)
def test_a_whole_reply_of_the_script_is_an_answer_and_the_line_stays(wire: Wire, reply: bytes, value: Any) -> None:
    assert answered(wire, reply) == value
    assert not wire.cut
    assert not wire.released


@pytest.mark.parametrize(
    "reply",
    [
        b"-NOSCRIPT No matching script.\r\n",
        b"-LOADING the dataset\r\n",
        b"+OK\r\n",
        b":0\r\n",
        b"*4\r\n:0\r\n:8\r\n$0\r\n",
        b"*4\r\n:0\r\n:8\r\n$0\r\n\r\n:0\r\n*1\r\n:-1\r\n",
        b"*4\r\n:0\r\n:8\r\n$0\r\n\r\n:0\r\n*4\r\n:0\r\n",
        b"HTTP/1.1 400 Bad Request\r\n",
    ],
)
def test_anything_else_is_no_answer_and_cuts_the_line(wire: Wire, reply: bytes) -> None:
    assert answered(wire, reply) is None
    assert wire.cut
    assert wire.released


def test_a_closed_connection_is_no_answer(wire: Wire) -> None:
    wire.server.close()
    assert line_on(wire).append(1, [b"one"], 1) is None
    assert wire.cut
    assert wire.released


def test_silence_is_no_answer(wire: Wire) -> None:
    wire._sock.settimeout(0.01)
    assert line_on(wire).append(1, [b"one"], 1) is None
    assert wire.cut


def test_an_interrupt_cuts_the_line_so_that_its_answer_has_no_reader(wire: Wire) -> None:
    line = line_on(wire)

    class Interrupted:
        sendall = wire._sock.sendall

        def recv(self, size: int) -> bytes:
            raise KeyboardInterrupt

    line._socket = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        line.append(1, [b"one"], 1)
    assert wire.cut
    assert wire.released


def test_what_cannot_be_sent_costs_no_connection(wire: Wire) -> None:
    with pytest.raises(TypeError):
        line_on(wire).append(1, ["text"], 1)  # type: ignore[list-item]
    assert wire.cut
    assert wire.released


def test_a_server_that_does_not_read_is_no_answer(wire: Wire) -> None:
    wire._sock.settimeout(0.01)
    assert line_on(wire).append(1, [b"x" * (8 << 20)], 1) is None
    assert wire.cut


def test_a_large_event_goes_over_whole(wire: Wire) -> None:
    payload = b"x" * (4 << 20)
    got = bytearray()

    def serve() -> None:
        while not got.endswith(payload[-9:] + b"\r\n"):
            got.extend(wire.server.recv(1 << 16))
        wire.server.sendall(b"*4\r\n:0\r\n:1\r\n$0\r\n\r\n:0\r\n")

    thread = threading.Thread(target=serve)
    thread.start()
    assert line_on(wire).append(1, [payload], 1) == [0, 1, b"", 0]
    thread.join()
    assert bytes(payload) in got


def test_a_line_serves_one_turn_under_one_epoch(wire: Wire) -> None:
    line = line_on(wire)
    assert line.serves("R", 3)
    assert not line.serves("R", 4)
    assert not line.serves("Q", 3)


def test_without_a_connection_there_is_no_line() -> None:
    class Away:
        def get_connection(self) -> Any:
            raise ConnectionError("away")

    assert Line.open(Away(), "sha", "R", "W", 1) is None  # type: ignore[arg-type]
