"""Byte-level BPE against an independent, slow definition: own splitting with `regex`, own merging, rank by rank."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_core.tokenizer import Tokenizer
from prism_core.tokenizer.vocabulary import BYTE_TO_CHAR, CHAR_TO_BYTE
from tests.unit.tokenizer.vocabularies import bpe_metadata

L, M, N = r"\p{L}", r"\p{M}", r"\p{N}"
CASES = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
RULES = {
    "qwen2": [CASES + rf"|[^\r\n{L}{N}]?{L}+|{N}| ?[^\s{L}{N}]+[\r\n]*|" + TAIL],
    "qwen35": [CASES + rf"|[^\r\n{L}{N}]?[{L}{M}]+|{N}| ?[^\s{L}{M}{N}]+[\r\n]*|" + TAIL],
    "llama-bpe": [CASES + rf"|[^\r\n{L}{N}]?{L}+|{N}{{1,3}}| ?[^\s{L}{N}]+[\r\n]*|" + TAIL],
    "smollm": [r"\p{N}", GPT2],
    "gpt-2": [GPT2],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
}


def slow_pieces(text: str, pre: str) -> list[str]:
    pieces = [text]
    for rule in RULES[pre]:
        cut: list[str] = []
        for piece in pieces:
            place = 0
            for match in regex.finditer(rule, piece):
                cut += [piece[place : match.start()], match.group()]
                place = match.end()
            cut.append(piece[place:])
        pieces = [piece for piece in cut if piece]
    return pieces


def slow_ids(text: str, metadata: dict[str, object], pre: str) -> list[int]:
    tokens = list(metadata["tokenizer.ggml.tokens"])
    ranks = {
        tuple(line.split(" ")): rank for rank, line in reversed(list(enumerate(metadata["tokenizer.ggml.merges"])))
    }
    out: list[int] = []
    for piece in slow_pieces(text, pre):
        symbols = [BYTE_TO_CHAR[byte] for byte in piece.encode()]
        if pre == "llama-bpe" and "".join(symbols) in tokens:
            out.append(tokens.index("".join(symbols)))
            continue
        while pairs := [pair for pair in pairwise(symbols) if pair in ranks]:
            best = min(pairs, key=ranks.__getitem__)
            place = next(i for i in range(len(symbols) - 1) if (symbols[i], symbols[i + 1]) == best)
            symbols[place : place + 2] = ["".join(best)]
        out += [tokens.index(symbol) for symbol in symbols if symbol in tokens]
    return out


def random_metadata(rng: random.Random, pre: str, alphabet: str) -> dict[str, object]:
    """Random merges of what is there already, in any order of rank, over all bytes."""
    metadata = bpe_metadata(pre=pre, words=(), control=(), user_defined=())
    tokens = list(metadata["tokenizer.ggml.tokens"])
    pool = sorted({BYTE_TO_CHAR[byte] for char in alphabet for byte in char.encode()})
    merges: list[str] = []
    for _ in range(rng.choice([3, 30, 120])):
        left, right = rng.choice(pool), rng.choice(pool)
        if f"{left} {right}" not in merges and len(left + right) < 12:
            merges.append(f"{left} {right}")
            pool.append(left + right)
            if left + right not in tokens:
                tokens.append(left + right)
    rng.shuffle(merges)
    metadata["tokenizer.ggml.tokens"] = tokens
    metadata["tokenizer.ggml.merges"] = merges
    del metadata["tokenizer.ggml.token_type"]
    return metadata


@pytest.mark.parametrize("pre", sorted(RULES))
@pytest.mark.parametrize("seed", range(4))
def test_any_vocabulary_merges_as_the_slow_definition_does(pre, seed):
    rng = random.Random(seed)
    alphabet = "ab 1'sT\n\r\t.é日$-"
    metadata = random_metadata(rng, pre, alphabet)
    tokenizer = Tokenizer.from_metadata(metadata)
    for _ in range(60):
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(0, 30)))
        assert tokenizer.encode(text, add_bos=False) == slow_ids(text, metadata, pre), f"{seed=} {text!r}"


# Assigned characters of every kind; the two regular-expression engines may know different Unicode versions.
SAMPLES = "aZé日本ßǅʰ०١½Ⅷ²़́ः_-–“$€+^~|©😀👩‍👩‍👧\u00a0\u2028\u200b\ufeff\x00\x1f \t\r\n'sDlL0129"


@pytest.mark.parametrize("pre", sorted(RULES))
@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet=SAMPLES, max_size=30))
def test_pieces_are_those_of_the_written_expressions(pre, text):
    tokenizer = PLAIN[pre]
    ids = tokenizer.encode(text, add_bos=False)
    assert ids == slow_ids(text, WHOLE[pre], pre)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


# Pairs of any two bytes that matter merge, so that a piece which is cut elsewhere shows in the ids.
WHOLE = {
    pre: bpe_metadata(pre=pre, words=tuple(a + b for a in " a1.'\n" for b in " a1.\ns"), control=(), user_defined=())
    for pre in RULES
}
PLAIN = {pre: Tokenizer.from_metadata(metadata) for pre, metadata in WHOLE.items()}


@pytest.mark.parametrize("pre", sorted(RULES))
@pytest.mark.parametrize("window", [1, 2, 7])
def test_a_text_cut_into_windows_has_the_pieces_of_the_whole(pre, window, monkeypatch):
    monkeypatch.setattr("prism_core.tokenizer.bpe.WINDOW_CHARS", window)
    monkeypatch.setattr("prism_core.tokenizer.bpe.MAX_PIECE_BYTES", 200)
    rng = random.Random(window)
    for _ in range(40):
        parts = [
            "a",
            "1",
            " ",
            "  ",
            "\n",
            "\r\n",
            "'s",
            "'re",
            ".",
            "!!",
            "é",
            "日",
            "\t",
            "-\n",
            "$",
            "123",
            "\u0301",
        ]
        text = "".join(rng.choice(parts) for _ in range(60))
        assert PLAIN[pre].encode(text, add_bos=False) == slow_ids(text, WHOLE[pre], pre), repr(text)


@given(st.text())
def test_every_text_comes_back_byte_by_byte(text):
    tokenizer = PLAIN["qwen2"]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_combining_marks_stay_with_their_letters_only_in_qwen35():
    word = "a\u0301b"  # one piece for qwen35; for qwen2 the mark goes to the next word
    words = (word,)
    qwen2, qwen35 = (Tokenizer.from_metadata(bpe_metadata(pre=pre, words=words)) for pre in ("qwen2", "qwen35"))
    assert len(qwen35.encode(word)) == 1
    assert len(qwen2.encode(word)) > 1


def test_a_whole_piece_that_is_a_token_needs_no_merges_in_llama_bpe_only():
    metadata = bpe_metadata(words=("hello",))
    # without the last merge "hello" cannot be built
    metadata["tokenizer.ggml.merges"] = metadata["tokenizer.ggml.merges"][:-1]
    counts = {}
    for pre in ("llama-bpe", "llama3", "dbrx", "qwen2"):
        tokenizer = Tokenizer.from_metadata(metadata | {"tokenizer.ggml.pre": pre})
        counts[pre] = len(tokenizer.encode("hello"))
    assert counts == {"llama-bpe": 1, "llama3": 1, "dbrx": 2, "qwen2": 2}


def test_an_unknown_pre_tokenizer_gets_the_default_rules_and_is_reported():
    metadata = bpe_metadata(pre="brand-new")
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.describe()["pre_known"] is False
    assert tokenizer.encode("a$1234 hello") == slow_ids("a$1234 hello", metadata, "default")
    del metadata["tokenizer.ggml.pre"]
    assert Tokenizer.from_metadata(metadata).describe()["pre"] == "default"


def test_a_byte_without_a_token_is_dropped_and_parts_its_neighbours():
    metadata = bpe_metadata(words=("ab",))
    tokens = list(metadata["tokenizer.ggml.tokens"])
    tokens[tokens.index("x")] = "unreachable"
    tokenizer = Tokenizer.from_metadata(metadata | {"tokenizer.ggml.tokens": tokens})
    assert tokenizer.encode("axb") == [CHAR_TO_BYTE["a"], CHAR_TO_BYTE["b"]]
    assert tokenizer.encode("ab") == [tokens.index("ab")]
    assert tokenizer.encode("x") == []


def test_text_that_a_control_token_could_be_merged_from_stays_text():
    metadata = bpe_metadata(pre="llama-bpe", words=("stop",), control=("stop", "<|im_end|>"), user_defined=())
    tokens = list(metadata["tokenizer.ggml.tokens"])
    control = len(tokens) - 2
    # the vocabulary lists "stop" as control, and has the merges that lead to it
    del tokens[tokens.index("stop")]
    kinds = [1] * (len(tokens) - 2) + [3, 3]
    metadata |= {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.eos_token_id": control,
    }
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokens[control - 1] == "stop"
    ids = tokenizer.encode("stop")
    assert control - 1 not in ids
    assert tokenizer.decode(ids) == "stop"
    assert tokenizer.encode("stop", special="parse") == [control - 1]
