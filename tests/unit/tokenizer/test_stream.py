"""Incremental text: whole characters only, and the same text as decoding everything at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prism_core.tokenizer import Tokenizer
from tests.unit.tokenizer.vocabularies import bpe_metadata, spm_metadata

BPE = Tokenizer.from_metadata(bpe_metadata(words=("é", "€", "日本", "hello", " hello")))
SPM = Tokenizer.from_metadata(spm_metadata({"▁": -1.0, "a": -2.0, "▁a": -3.0, "é": -4.0}))
TOKENIZERS = {"bpe": BPE, "spm": SPM}

kinds = st.sampled_from(sorted(TOKENIZERS))


@given(kind=kinds, data=st.data())
def test_the_stream_of_any_ids_joins_to_the_decoded_whole(kind, data):
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    stream = tokenizer.stream()
    parts = [stream.push(index) for index in ids]
    assert "".join(parts) + stream.finish() == tokenizer.decode(ids)
    # every prefix has given out all its whole characters: at most three bytes wait
    for count in range(len(ids)):
        given_out = "".join(parts[:count]).encode()
        assert tokenizer.decode(ids[:count]).encode().startswith(given_out.removesuffix("�".encode()))


@given(kind=kinds, data=st.data())
def test_what_earlier_streams_have_seen_changes_no_piece(kind, data):
    tokenizer = TOKENIZERS[kind]
    used = data.draw(st.lists(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=12), min_size=1, max_size=4))
    pieces = []
    for forget in (True, False):
        tokenizer._whole.clear()
        for ids in used:
            if forget:
                tokenizer._whole.clear()
            stream = tokenizer.stream()
            pieces.append([*map(stream.push, ids), stream.finish()])
    assert pieces[: len(used)] == pieces[len(used) :]


@given(kind=kinds, text=st.text(max_size=60))
def test_text_comes_back_whole_and_no_piece_holds_half_a_character(kind, text):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text, add_bos=False)
    stream = tokenizer.stream()
    parts = [stream.push(index) for index in ids]
    wanted = text.replace("▁", " ") if kind == "spm" else text
    assert "".join(parts) == wanted
    assert stream.finish() == ""


def test_a_multi_byte_character_split_across_tokens_does_not_stream_as_replacement_characters():
    stream = BPE.stream()
    ids = BPE.encode("😀")
    assert len(ids) == 4
    assert [stream.push(index) for index in ids] == ["", "", "", "😀"]
    assert stream.finish() == ""


def test_a_broken_character_becomes_one_replacement_as_soon_as_that_is_certain():
    smile = BPE.encode("😀")
    stream = BPE.stream()
    assert [stream.push(index) for index in [*smile[:3], *BPE.encode("a")]] == ["", "", "", "�a"]
    assert stream.finish() == ""
    stream = BPE.stream()
    assert [stream.push(index) for index in smile[:2]] == ["", ""]
    assert stream.finish() == "�"
    assert stream.finish() == ""


def test_control_tokens_add_nothing_to_a_stream():
    stream = BPE.stream()
    ids = BPE.encode("a<|im_end|>é", special="parse")
    assert "".join(map(stream.push, ids)) == "aé"
    # and do not part the bytes of a character
    euro = BPE.encode("😀")
    stream = BPE.stream()
    assert "".join(map(stream.push, [*euro[:2], BPE.eos, *euro[2:]])) == "😀"
    assert BPE.decode([*euro[:2], BPE.eos, *euro[2:]]) == "😀"
