"""Stop strings: whatever way the text is cut, nothing of a stop string leaks and nothing else is lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.stops import StopMatcher

ALPHABET = "ab\n"
texts = st.text(alphabet=ALPHABET, max_size=40)
stops = st.lists(st.text(alphabet=ALPHABET, min_size=1, max_size=5), max_size=4)


def expected(text: str, stop_strings: list[str]) -> tuple[str, str | None]:
    """By definition: the first end at which some stop string completes, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stop_strings if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(text=texts, stop_strings=stops, cuts=st.lists(st.integers(0, 40), max_size=12))
def test_the_released_text_ends_where_the_first_stop_string_begins_however_it_is_cut(text, stop_strings, cuts):
    matcher = StopMatcher(stop_strings)
    bounds = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    released = ""
    for begin, end in itertools.pairwise(bounds):
        released += matcher.push(text[begin:end])
        whole, _ = expected(text, stop_strings)
        assert whole.startswith(released), "a character of a stop string leaked"
    released += matcher.finish()
    assert (released, matcher.matched) == expected(text, stop_strings)


@given(text=texts, stop_strings=stops)
def test_what_is_held_back_is_always_the_beginning_of_a_stop_string(text, stop_strings):
    matcher = StopMatcher(stop_strings)
    released = "".join(matcher.push(character) for character in text)
    if matcher.matched is None:
        held = text[len(released) :]
        assert not held or any(stop.startswith(held) for stop in stop_strings)


@pytest.mark.parametrize("pieces", [["xabay"], ["xa", "bay"], ["x", "a", "b", "a", "y"]])
def test_the_stop_string_that_completes_first_wins_over_one_that_began_before_it(pieces: list[str]):
    matcher = StopMatcher(["aba", "b"])
    assert "".join(map(matcher.push, pieces)) == "xa"
    assert matcher.matched == "b"


def test_nothing_comes_after_a_match():
    matcher = StopMatcher(["END"])
    assert matcher.push("one END two") == "one "
    assert matcher.push("three") == ""
    assert matcher.finish() == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])
