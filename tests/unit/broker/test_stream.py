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


def told(tokens: int, dice: random.Random, epoch: int, first: int = 1) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """A log in which token n is n, its deltas cut at random, from event `first` on."""
    made, n = [], 0
    while n < tokens:
        if dice.random() < 0.1:
            epoch += 1
            made.append((epoch, events.start(attempt=1, worker="w", prompt_tokens=1, reused_tokens=0)))
        ids = list(range(n + 1, min(tokens, n + dice.randint(1, 4)) + 1))
        n += len(ids)
        made.append((epoch, events.delta(n=n, ids=ids, text="")))
    made.append((epoch, events.end(state="done", reason="stop", usage={}, n=n)))
    return [(f"{epoch}-{first + at}".encode(), {b"d": payload}) for at, (epoch, payload) in enumerate(made)]


@given(st.integers(0, 1 << 32))
def test_a_log_that_went_back_behind_its_reader_gives_every_token_once_or_says_that_it_is_lost(seed: int) -> None:
    """A broker killed while its disk stalled: the last events are gone and written again, cut in another way, under
    the same epoch (it was given out once more) or a later one."""
    dice = random.Random(seed)
    tokens = dice.randint(1, 30)
    old = told(tokens, dice, 1)
    read, kept = dice.randint(1, len(old) - 1), dice.randint(0, len(old) - 1)
    stream = Stream("r", HEAD, None)
    got = list(stream.from_log(old[:read]))
    kept = min(kept, read)
    epoch = int(old[kept - 1][0].split(b"-")[0]) if kept else 1
    n = max((event.data["n"] for event in got[:kept] if "n" in event.data), default=0)
    rest = told(tokens, dice, epoch + dice.randint(0, 1))
    new = old[:kept]
    for name, fields in rest:  # as told anew, from token n on
        event = Event.unpack(Cursor(1, 1), fields[b"d"])
        ids = [token for token in event.token_ids if token > n]
        if event.kind == "delta" and not ids:
            continue
        payload = events.delta(n=ids[-1], ids=ids, text="") if event.kind == "delta" else fields[b"d"]
        new.append((name.split(b"-")[0] + f"-{len(new) + 1}".encode(), {b"d": payload}))
    live = [name + b" " + fields[b"d"] for name, fields in new]
    head = Head("done", events.parse_cursor(new[-1][0].decode()), "boot")
    lost = ""
    try:
        for message in live[kept:]:
            if dice.random() < 0.5:
                got += [event for event in stream.from_channel([message]) if event is not None]
        if not stream.ended:
            page = [item for item in new if events.parse_cursor(item[0].decode()) > stream.last]
            got += stream.from_log(page)
            stream.check_alive(head)
    except StreamLost as error:
        lost = str(error)
    ids = [token for event in got for token in event.token_ids]
    if lost:
        assert "read it again from the start" in lost or "hole" in lost
    else:
        assert stream.ended
        assert len(ids) == tokens
    assert ids == list(range(1, len(ids) + 1)), "a token is missing or came twice"


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
