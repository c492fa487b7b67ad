"""Score merges against an independent, slow definition: look at every pair, merge the best, start again."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_core.tokenizer import Tokenizer
from tests.unit.tokenizer.vocabularies import spm_metadata


def slow_ids(text: str, metadata: dict[str, object], prefix: bool) -> list[int]:
    """Straight from the written rule, quadratic, sharing no code with the encoder."""
    tokens = list(metadata["tokenizer.ggml.tokens"])
    types = list(metadata["tokenizer.ggml.token_type"])
    scores = list(metadata["tokenizer.ggml.scores"])
    usable = {token: index for index, token in enumerate(tokens) if types[index] in (1, 4, 5)}
    symbols = list((" " + text if prefix and text else text).replace(" ", "▁"))
    while True:
        best = None
        for place in range(len(symbols) - 1):
            index = usable.get(symbols[place] + symbols[place + 1])
            if index is not None and (best is None or scores[index] > scores[best[1]]):
                best = (place, index)
        if best is None:
            break
        place = best[0]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    out: list[int] = []
    for symbol in symbols:
        if symbol in usable:
            out.append(usable[symbol])
        else:
            out += [tokens.index(f"<0x{byte:02X}>") for byte in symbol.encode()]
    return out


def random_pieces(rng: random.Random, alphabet: str, count: int, levels: int) -> dict[str, float]:
    """Pieces of 1 to 6 characters with few distinct scores, so that ties are common and order matters."""
    pieces = {char: -float(rng.randrange(levels)) for char in alphabet if rng.random() < 0.8}
    for _ in range(count):
        piece = "".join(rng.choice(alphabet) for _ in range(rng.randint(2, 6)))
        pieces[piece] = -float(rng.randrange(levels))
    return pieces


@pytest.mark.parametrize("seed", range(12))
def test_any_vocabulary_merges_as_the_slow_definition_does(seed):
    rng = random.Random(seed)
    alphabet = rng.choice(["ab▁", "abc▁é", "▁x日"])
    metadata = spm_metadata(
        random_pieces(rng, alphabet, rng.choice([5, 40, 200]), rng.choice([1, 4, 1000])),
        add_space_prefix=seed % 2 == 0,
    )
    tokenizer = Tokenizer.from_metadata(metadata)
    for _ in range(60):
        text = "".join(rng.choice(alphabet.replace("▁", " ") + "?") for _ in range(rng.randint(0, 40)))
        assert tokenizer.encode(text, add_bos=False) == slow_ids(text, metadata, seed % 2 == 0), f"{seed=} {text!r}"


ONE = spm_metadata(
    {"▁": -1.0, "a": -2.0, "b": -3.0, "ab": -4.0, "▁a": -4.0, "ba": -4.0, "abab": -2.5, "▁ab": -9.0, "aa": -4.0},
    add_space_prefix=False,
)
TOKENIZER = Tokenizer.from_metadata(ONE)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab é", max_size=24))
def test_texts_of_one_vocabulary_merge_as_the_slow_definition_does(text):
    assert TOKENIZER.encode(text, add_bos=False) == slow_ids(text, ONE, False)


def test_equal_scores_merge_from_the_left():
    tokenizer = Tokenizer.from_metadata(spm_metadata({"a": 0.0, "aa": -1.0}, add_space_prefix=False))
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("aaa", add_bos=False)] == [b"aa", b"a"]


def test_the_highest_score_wins_over_the_leftmost_place():
    pieces = {"a": 0.0, "b": 0.0, "c": 0.0, "ab": -2.0, "bc": -1.0}
    tokenizer = Tokenizer.from_metadata(spm_metadata(pieces, add_space_prefix=False))
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("abc", add_bos=False)] == [b"a", b"bc"]


def test_a_merge_of_symbols_that_are_no_tokens_themselves_still_happens():
    tokenizer = Tokenizer.from_metadata(spm_metadata({"日本": -1.0}, add_space_prefix=False))
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("日本", add_bos=False)] == ["日本".encode()]


def test_the_space_before_the_first_word_comes_and_goes():
    tokenizer = Tokenizer.from_metadata(spm_metadata({"▁": -1.0, "▁a": -2.0, "a": -3.0}))
    ids = tokenizer.encode("a", add_bos=False)
    assert [tokenizer.token_bytes(i) for i in ids] == [b" a"]
    assert tokenizer.decode(ids) == "a"
    stream = tokenizer.stream()
    assert [stream.push(i) for i in [*ids, *ids]] == ["a", " a"]
    # after a special token a word starts anew; an empty text stays empty
    assert tokenizer.encode("a</s>a", special="parse", add_bos=False) == [*ids, tokenizer.eos, *ids]
    assert tokenizer.encode("", add_bos=False) == []
    assert tokenizer.encode("") == [tokenizer.bos]


def test_a_byte_without_its_token_becomes_the_unknown_token():
    metadata = spm_metadata({"a": -1.0}, add_space_prefix=False)
    kinds = metadata["tokenizer.ggml.token_type"].copy()
    tokens = list(metadata["tokenizer.ggml.tokens"])
    at = tokens.index("<0xC3>")
    tokens[at], kinds[at] = "zzz", 1
    tokenizer = Tokenizer.from_metadata(
        metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    )
    unknown = 0
    assert tokenizer.encode("é", add_bos=False) == [unknown, tokens.index("<0xA9>")]


def test_the_spelling_of_a_byte_token_or_a_control_token_stays_text():
    pieces = dict.fromkeys(("<0", "<0x", "<0x4", "<0x41", "</", "</s"), -1.0)
    tokenizer = Tokenizer.from_metadata(spm_metadata(pieces, add_space_prefix=False))
    for text in ("<0x41>", "</s>", "<s>", "<unk>"):
        ids = tokenizer.encode(text, add_bos=False)
        assert tokenizer.decode(ids) == text
        assert len(ids) > 1
    assert tokenizer.encode("</s>", special="parse", add_bos=False) == [2]


def test_a_mebibyte_without_a_break_takes_one_pass():
    # one part of 2^20 characters: an algorithm that looks at all of it for each merge would need hours
    tokenizer = Tokenizer.from_metadata(
        spm_metadata({"a": -1.0, "aa": -2.0, "aaaa": -3.0, "b": -1.0, "ab": -4.0}, add_space_prefix=False)
    )
    assert len(tokenizer.encode("a" * (1 << 20), add_bos=False)) == 1 << 18
    assert tokenizer.decode(tokenizer.encode("ab" * (1 << 19), add_bos=False)) == "ab" * (1 << 19)
