"""Input within its bounds is encoded in one pass, input beyond them is refused with the limit and the value."""

from __future__ import annotations

import pytest

from prism_core.errors import InvalidRequest
from prism_core.tokenizer import MAX_INPUT_BYTES, Tokenizer
from tests.unit.tokenizer.vocabularies import bpe_metadata, spm_metadata

PRES = ("qwen2", "qwen35", "llama-bpe", "smollm", "gpt-2", "default")
BPE = {pre: Tokenizer.from_metadata(bpe_metadata(pre=pre)) for pre in PRES}
SPM = Tokenizer.from_metadata(spm_metadata({"▁": -1.0, "a": -2.0, "▁a": -3.0}))
PIECE = 64 * 1024


@pytest.mark.parametrize("tokenizer", [BPE["qwen2"], SPM], ids=["bpe", "spm"])
def test_a_text_over_a_mebibyte_is_refused_with_its_size(tokenizer):
    assert MAX_INPUT_BYTES == 1 << 20
    with pytest.raises(InvalidRequest, match=r"1048577 .*at most 1048576"):
        tokenizer.encode("a " * (1 << 19) + "a")
    # bytes count, not characters
    with pytest.raises(InvalidRequest, match=r"1048578 bytes; at most 1048576"):
        tokenizer.encode("é " * 349_526)
    assert tokenizer.encode("a " * (1 << 19))


@pytest.mark.parametrize("pre", PRES)
@pytest.mark.parametrize("unit", ["a", "é", " ", "\n", "!", "\t \n\r", "日", "'s"])
def test_a_piece_over_its_limit_is_refused_and_one_at_the_limit_is_not(pre, unit):
    count = PIECE // len(unit.encode())
    ids = BPE[pre].encode(unit * count)
    assert BPE[pre].decode(ids) == unit * count
    message = ""
    try:
        # some rules break some of these texts by themselves
        assert BPE[pre].decode(BPE[pre].encode(unit * (2 * count))) == unit * (2 * count)
    except InvalidRequest as error:
        message = str(error)
    assert not message or "at most 65536 bytes may stand without a break" in message
    if unit == "a":
        with pytest.raises(InvalidRequest, match=r"piece of 65537 bytes or more, starting 'aaaaaaaaaaaaaaaaaaaa'"):
            BPE[pre].encode("a" * (PIECE + 1))


@pytest.mark.parametrize("pre", PRES)
@pytest.mark.parametrize("unit", ["the answer ", "a1", "\n a", "'s ", "!a", "日本 ", "12 "])
def test_ordinary_text_of_64_kibibytes_comes_back(pre, unit):
    text = unit * (MAX_INPUT_BYTES // len(unit.encode()) // 16)
    assert BPE[pre].decode(BPE[pre].encode(text)) == text


def test_whitespace_of_any_length_does_not_send_the_expressions_astray():
    # each of these makes a careless expression try again from every place
    for pre in PRES:
        for text in (" " * PIECE + "x", "\r\n" * 1000 + " " * 60_000 + "!", "\t" * 65_000 + "\n", "''" * 30_000):
            assert BPE[pre].decode(BPE[pre].encode(text)) == text


@pytest.mark.parametrize("tokenizer", [BPE["qwen2"], SPM], ids=["bpe", "spm"])
def test_half_a_surrogate_pair_is_refused_with_its_place(tokenizer):
    with pytest.raises(InvalidRequest, match=r"half a surrogate pair at character 2"):
        tokenizer.encode("ab\ud83d")


@pytest.mark.parametrize("text", [None, b"bytes", 3, ["a"]])
def test_text_that_is_no_string_is_refused(text):
    with pytest.raises(InvalidRequest, match="text must be a string, not"):
        BPE["qwen2"].encode(text)


def test_an_unknown_way_to_treat_special_tokens_is_refused():
    with pytest.raises(InvalidRequest, match=r"special must be 'literal' or 'parse', not 'yes'"):
        BPE["qwen2"].encode("a", special="yes")


def test_nothing_becomes_no_ids_and_no_ids_nothing():
    for tokenizer in (*BPE.values(), SPM):
        assert tokenizer.encode("", add_bos=False) == []
        assert tokenizer.decode([]) == ""
        assert tokenizer.stream().finish() == ""
