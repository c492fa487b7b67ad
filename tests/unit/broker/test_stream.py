"""The reader's rules alone: any mix of log pages and live messages gives each event once, in order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker import events
from broker.errors import InvalidCursor, NotFound, StreamLost
from broker.events import Cursor, Event
from broker.stream import Head, Stream

HEAD = Head("running", Cursor(0, 0), "boot")


def entries(count: int, dice: random.Random) -> list[tuple[bytes, dict[bytes, bytes]]]:
    epoch, made = 1, []
    for ev in range(1, count + 1):
        epoch += dice.random() < 0.1
        payload = (
            events.delta(n=ev, ids=[ev], text="")
            if ev < count
            else events.end(state="done", reason="stop", usage={}, n=ev - 1)
        )
        made.append((f"{epoch}-{ev}".encode(), {b"d": payload}))
    return made


@given(st.integers(0, 1 << 32))
def test_any_interleaving_of_log_and_channel_gives_each_event_once_in_order(seed: int) -> None:
    dice = random.Random(seed)
    log = entries(dice.randint(1, 40), dice)
    live = [name + b" " + fields[b"d"] for name, fields in log]
    stream = Stream("r", HEAD, None)
    got: list[Event] = []
    while not stream.ended:
        if dice.random() < 0.3:
            begin = dice.randint(0, len(log))
            got += stream.from_log(log[begin : begin + 5] if begin <= stream.last.ev else log[stream.last.ev :][:3])
        else:
            batch = [dice.choice(live) for _ in range(dice.randint(0, 6))]
            found = list(stream.from_channel(batch))
            if None in found:
                assert found.index(None) == len(found) - 1
            got += [event for event in found if event is not None]
    assert [event.sequence for event in got] == list(range(1, len(log) + 1))
    assert [event.id.encode() for event in got] == [name for name, _ in log]


def test_a_hole_in_the_log_itself_is_a_lost_stream() -> None:
    log = entries(5, random.Random(1))
    stream = Stream("r", HEAD, None)
    with pytest.raises(StreamLost, match="hole"):
        list(stream.from_log([log[0], log[2]]))


def test_a_number_as_cursor_skips_what_lies_before_it() -> None:
    log = entries(5, random.Random(1))
    stream = Stream("r", Head("running", Cursor(1, 5), "boot"), 3)
    assert [event.sequence for event in stream.from_log(log)] == [4, 5]


@pytest.mark.parametrize("after", [6, -1, True, "1-6", "5-0", "x"])
def test_a_cursor_beyond_the_stream_is_refused(after: str | int) -> None:
    with pytest.raises(InvalidCursor):
        Stream("r", Head("running", Cursor(2, 5), "boot"), after)


def test_an_ended_stream_read_from_its_end_has_ended() -> None:
    ended = Head("done", Cursor(2, 5), "boot")
    assert Stream("r", ended, "2-5").ended
    assert Stream("r", ended, 5).ended
    assert not Stream("r", ended, 4).ended
    assert not Stream("r", Head("running", Cursor(2, 5), "boot"), 5).ended


def test_heads_are_read_for_their_owner_only() -> None:
    values = [b"alice", b"queued", b"0", b"0"]
    assert Head.read("r", "alice", values, b"b").state == "queued"
    assert Head.read("r", "", values, b"b").boot == "b"
    with pytest.raises(NotFound):
        Head.read("r", "bob", values, b"b")
    with pytest.raises(NotFound):
        Head.read("r", "bob", [None] * 4, b"b")
