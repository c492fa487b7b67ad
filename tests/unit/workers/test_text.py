"""The text of a turn: whole characters, stop strings withheld, and the same characters after a replay."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.toy import ToyTokenizer
from workers.text import TurnText

tokenizer = ToyTokenizer()
sentences = st.text(alphabet="abé€ \n", max_size=30)


def given_out(ids: list[int], stops: list[str]) -> list[str]:
    text = TurnText(tokenizer.stream(), stops)
    parts = [text.push(token) for token in ids]
    return [*parts, text.finish()]


@given(sentence=sentences)
def test_no_delta_ever_holds_half_a_character(sentence):
    parts = given_out(tokenizer.encode(sentence), [])
    assert "".join(parts) == sentence
    assert "�" not in "".join(parts)


@given(
    sentence=sentences, stops=st.lists(st.text(alphabet="abé€ ", min_size=1, max_size=3), max_size=3), data=st.data()
)
def test_a_replay_goes_on_at_the_exact_character_where_the_log_stops(sentence, stops, data):
    ids = tokenizer.encode(sentence)
    parts = given_out(ids, stops)
    n = data.draw(st.integers(0, len(ids)))
    # The predecessor may have died before or after its tail was stored.
    ended = n == len(ids) and data.draw(st.booleans())
    logged = "".join(parts) if ended else "".join(parts[:n])
    text = TurnText(tokenizer.stream(), stops)
    text.replay(ids[:n], logged)
    later = "".join(text.push(token) for token in ids[n:]) + text.finish()
    assert logged + later == "".join(parts)
    assert text.text == "".join(parts)


def test_an_unfinished_character_comes_out_at_the_end_as_a_replacement():
    ids = tokenizer.encode("a€")[:-1]
    assert "".join(given_out(ids, [])) == "a�"
