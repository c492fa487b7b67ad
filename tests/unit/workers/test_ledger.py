"""The ledger: nothing is lost, doubled or moved when tokens become events, and an event never changes."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from broker import events
from workers.ledger import MAX_EVENTS_PER_APPEND, MAX_TOKENS_PER_DELTA, Ledger

MARK = object()
START = events.start(attempt=1, worker="w", prompt_tokens=1, reused_tokens=0)

texts = st.text(alphabet="aé€\0", max_size=2)
tokens = st.tuples(st.integers(0, 99), texts, st.none() | st.fixed_dictionaries({"lp": st.integers(-9, 0)}))
tails = st.tuples(st.none(), texts, st.none())
items = st.lists(tokens | tokens | tails | st.just(START) | st.just(MARK), max_size=40)


def read(ledger: Ledger, first: int) -> list[events.Event]:
    """The events from `first` on, as a log would give them back."""
    found: list[events.Event] = []
    while first + len(found) <= ledger.ev:
        part = ledger.since(first + len(found))
        assert part is not None
        found += [events.Event.unpack(events.BEGIN, payload) for payload in part[0]]
    return found


@given(items=items)
def test_events_say_what_was_emitted_in_its_order_and_say_it_again(items: list[Any]) -> None:
    ledger = Ledger(3, 7)
    waiting = deque(items)
    while waiting:
        before, first = list(waiting), ledger.ev + 1
        taken = ledger.enter(waiting)
        assert list(waiting) == before[taken:]
        said: list[Any] = []
        for event in read(ledger, first):
            given_out = event.data.get("lp", [None] * len(event.token_ids))
            said += zip(event.token_ids, given_out, strict=True) if event.kind == "delta" else [START]
            assert event.kind == "start" or event.data["n"] <= ledger.n
        meant = [item if item is START else (item[0], item[2]) for item in before[:taken] if item[0] is not None]
        assert said == meant
        assert "".join(event.text for event in read(ledger, first)) == "".join(
            item[1] for item in before[:taken] if item is not START
        )
        if waiting:
            assert waiting.popleft() is MARK
    whole = read(ledger, 4)
    assert ledger.n == 7 + sum(len(event.token_ids) for event in whole)
    assert ledger.ev == 3 + len(whole)
    assert ledger.since(3) is None
    assert {part[1] for ev in range(4, ledger.ev + 1) if (part := ledger.since(ev))} <= {ledger.n}


def test_a_long_wait_of_the_broker_is_told_in_events_and_appends_of_bounded_size() -> None:
    ledger = Ledger(0, 0)
    waiting: deque[Any] = deque((token, "x", None) for token in range(3 * MAX_TOKENS_PER_DELTA + 1))
    assert ledger.enter(waiting) == 3 * MAX_TOKENS_PER_DELTA + 1
    assert [len(event.token_ids) for event in read(ledger, 1)] == [MAX_TOKENS_PER_DELTA] * 3 + [1]
    waiting.extend([START] * (2 * MAX_EVENTS_PER_APPEND))
    assert ledger.enter(waiting) == MAX_EVENTS_PER_APPEND
    assert len(waiting) == MAX_EVENTS_PER_APPEND
    part = ledger.since(1)
    assert part is not None
    assert len(part[0]) == MAX_EVENTS_PER_APPEND
