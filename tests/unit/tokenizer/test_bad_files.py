"""Vocabularies that a file must not carry: each is refused with a sentence that names the key and the value."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_core.errors import InvalidRequest, ModelError
from prism_core.tokenizer import ChatTemplate, Tokenizer
from prism_core.tokenizer.vocabulary import MAX_TOKEN_BYTES
from tests.unit.tokenizer.vocabularies import bpe_metadata, spm_metadata

BPE = bpe_metadata()
SPM = spm_metadata({"a": -1.0, "▁a": -2.0})
COUNT = len(BPE["tokenizer.ggml.tokens"])


def changed(metadata: dict[str, object], **changes: object) -> dict[str, object]:
    out = metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in out.items() if value is not None}


def with_token(metadata: dict[str, object], index: int, text: object) -> dict[str, object]:
    tokens = list(metadata["tokenizer.ggml.tokens"])
    tokens[index] = text
    return changed(metadata, tokens=tokens)


SPM_COUNT = len(SPM["tokenizer.ggml.tokens"])
NAN = np.full(SPM_COUNT, -1.0, dtype=np.float32)
NAN[7] = np.nan

LONG = [f"{index:05}" + "x" * 1_000 for index in range(20)]

REFUSED = {
    "special tokens too long in all": (
        bpe_metadata(control=tuple(LONG)),
        "squared lengths .* add up to 20200734; at most 16777216",
    ),
    "no tokenizer": ({}, "tokenizer.ggml.model is missing"),
    "another model": (changed(BPE, model="bert"), "'bert'; supported are 'gpt2'"),
    "model of a wrong type": (changed(BPE, model=3), "tokenizer.ggml.model must be a string, not int"),
    "pre of a wrong type": (changed(BPE, pre=3), "tokenizer.ggml.pre must be a string"),
    "no tokens": (changed(BPE, tokens=None), "tokenizer.ggml.tokens is missing"),
    "tokens of a wrong type": (changed(BPE, tokens=np.zeros(3)), "tokenizer.ggml.tokens must be an array of strings"),
    "an empty vocabulary": (changed(BPE, tokens=()), "has 0 entries"),
    "too many tokens": (changed(BPE, tokens=("a",) * (1_048_577)), "has 1048577 entries"),
    "a token that is a number": (with_token(BPE, 5, 7), r"tokens\[5\] must be a string, not int"),
    "a token too long": (with_token(BPE, 5, "é" * 513), r"tokens\[5\] is 1026 bytes long; at most 1024"),
    "half a surrogate pair": (with_token(BPE, 5, "\ud800"), r"tokens\[5\] is not valid Unicode"),
    "duplicate tokens": (with_token(BPE, 5, BPE["tokenizer.ggml.tokens"][9]), "is both token 5 and token 9"),
    "too few types": (changed(BPE, token_type=np.ones(COUNT - 1, np.int32)), f"has {COUNT - 1} entries for {COUNT}"),
    "too many types": (changed(BPE, token_type=np.ones(COUNT + 1, np.int32)), f"has {COUNT + 1} entries for {COUNT}"),
    "narrow types": (
        changed(BPE, token_type=np.ones(COUNT, np.int8)),
        "token_type must be an array of i32, not of int8",
    ),
    "types as floats": (changed(BPE, token_type=[1.0] * COUNT), "token_type must be an array of i32"),
    "types as text": (changed(BPE, token_type="x" * COUNT), "token_type must be an array of i32, not str"),
    "types beyond 32 bits": (changed(BPE, token_type=[1 << 40] * COUNT), "token_type must be an array of i32"),
    "an unknown type": (changed(BPE, token_type=[7] * COUNT), r"token_type\[0\] is 7; token types are 1 to 6"),
    "a negative type": (changed(BPE, token_type=[-1] * COUNT), r"token_type\[0\] is -1"),
    "no scores": (changed(SPM, scores=None), "scores is missing"),
    "too few scores": (changed(SPM, scores=np.zeros(SPM_COUNT - 1, np.float32)), "scores has"),
    "wide scores": (changed(SPM, scores=np.zeros(SPM_COUNT)), "scores must be an array of f32, not of float64"),
    "half-precision scores": (changed(SPM, scores=np.zeros(SPM_COUNT, np.float16)), "scores must be an array of f32"),
    "scores as integers": (changed(SPM, scores=[0] * SPM_COUNT), "scores must be an array of f32"),
    "scores as a table": (changed(SPM, scores=np.zeros((SPM_COUNT, 1), np.float32)), "scores must be an array of f32"),
    "a score that is no number": (changed(SPM, scores=NAN), r"scores\[7\] is nan"),
    "bos beyond the vocabulary": (changed(BPE, bos_token_id=COUNT), f"bos_token_id is {COUNT}, but the vocabulary has"),
    "eos far beyond": (changed(BPE, eos_token_id=(1 << 32) - 1), "eos_token_id is 4294967295"),
    "a negative pad": (changed(BPE, padding_token_id=-1), "padding_token_id is -1"),
    "an id that is a truth value": (changed(BPE, eos_token_id=True), "eos_token_id must be an integer, not bool"),
    "an id that is a float": (changed(BPE, eot_token_id=3.0), "eot_token_id must be an integer, not float"),
    "a flag that is a number": (changed(BPE, add_bos_token=1), "add_bos_token must be a boolean, not int"),
    "a flag that is text": (changed(SPM, add_space_prefix="yes"), "add_space_prefix must be a boolean"),
    "bos wanted and not there": (changed(BPE, add_bos_token=True), "there is no tokenizer.ggml.bos_token_id"),
    "no merges": (changed(BPE, merges=None), "tokenizer.ggml.merges is missing"),
    "merges of a wrong type": (changed(BPE, merges=np.zeros(3)), "merges must be an array of strings"),
    "a merge that is a number": (changed(BPE, merges=["a b", 3]), r"merges\[1\] must be a string"),
    "a merge without a space": (changed(BPE, merges=["he"]), r"merges\[0\] is 'he'; two tokens with one space"),
    "a merge with two spaces": (changed(BPE, merges=["h e l"]), r"merges\[0\] is 'h e l'; two tokens"),
    "a merge of a megabyte": (changed(BPE, merges=["h" * 1_000_000]), r"merges\[0\] is 'hhhh"),
    "a merge with an empty side": (changed(BPE, merges=[" he"]), r"merges\[0\] is ' he'; two tokens"),
    "a merge of an unknown token": (changed(BPE, merges=["h zz"]), r"merges\[0\] is 'h zz', but 'zz' is no token"),
    "a merge into an unknown token": (changed(BPE, merges=["z z"]), r"merges\[0\] is 'z z', but 'zz' is no token"),
    "a byte token of another name": (with_token(SPM, 3, "<0xZZ>"), r"tokens\[3\] is '<0xZZ>'; a byte token is named"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_vocabulary_is_refused_for(name):
    metadata, sentence = REFUSED[name]
    with pytest.raises(ModelError, match=sentence) as caught:
        Tokenizer.from_metadata(metadata)
    assert len(str(caught.value)) < 250


def test_what_is_merely_odd_is_accepted():
    # texts of the longest length, empty texts (more than one), types that are undefined or unused, repeated merges
    tokens = [*BPE["tokenizer.ggml.tokens"], "x" * MAX_TOKEN_BYTES, "", "", "spare"]
    kinds = [*BPE["tokenizer.ggml.token_type"].tolist(), 1, 0, 1, 5]
    merges = [*BPE["tokenizer.ggml.merges"], BPE["tokenizer.ggml.merges"][0]]
    tokenizer = Tokenizer.from_metadata(changed(BPE, tokens=tokens, token_type=kinds, merges=merges))
    assert tokenizer.vocab_size == COUNT + 4
    assert tokenizer.decode([COUNT, COUNT + 1, COUNT + 2, COUNT + 3]) == "x" * MAX_TOKEN_BYTES + "spare"
    assert tokenizer.encode("hello") == Tokenizer.from_metadata(BPE).encode("hello")


@pytest.mark.parametrize("merges", [["a b", "b c", "b c"], ["a b", "b c", "a b", "b c"], ["a b", "b c"]])
def test_a_merge_that_is_listed_twice_has_the_rank_of_its_first_mention(merges):
    tokens = [*BPE["tokenizer.ggml.tokens"], "ab", "bc"]
    kinds = [*BPE["tokenizer.ggml.token_type"].tolist(), 1, 1]
    tokenizer = Tokenizer.from_metadata(changed(BPE, tokens=tokens, token_type=kinds, merges=merges))
    assert [tokens[index] for index in tokenizer.encode("abc")] == ["ab", "c"]


def test_an_embedding_with_more_rows_than_tokens_decodes_them_to_nothing():
    tokenizer = Tokenizer.from_metadata(BPE)
    assert tokenizer.token_bytes(COUNT) == b""
    assert tokenizer.decode([COUNT + 100, 0, COUNT]) == tokenizer.decode([0])
    with pytest.raises(InvalidRequest, match="token id -1 is negative"):
        tokenizer.decode([-1])


def test_a_chat_template_over_its_limit_is_refused():
    tokenizer = Tokenizer.from_metadata(BPE)
    with pytest.raises(ModelError, match=r"chat_template has 262145 bytes; at most 262144"):
        ChatTemplate.from_metadata({"tokenizer.chat_template": "x" * 262_145}, tokenizer)
    with pytest.raises(ModelError, match=r"tokenizer.chat_template must be a string, not int"):
        ChatTemplate.from_metadata({"tokenizer.chat_template": 3}, tokenizer)
    assert ChatTemplate.from_metadata({"tokenizer.chat_template": "x" * 262_144}, tokenizer).origin == "file"


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.text(max_size=3), st.integers(-9, 9), st.floats(), st.none()), max_size=6),
    st.sampled_from([np.int8, np.int32, np.float32, np.float64, np.bool_]).map(lambda kind: np.ones(COUNT, kind)),
)


@settings(max_examples=400, deadline=None)
@given(base=st.sampled_from([BPE, SPM]), data=st.data())
def test_any_value_under_any_key_gives_a_tokenizer_or_our_error(base, data):
    metadata = dict(base)
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from([*sorted(base), "tokenizer.ggml.bos_token_id", "tokenizer.ggml.add_bos_token"]))
        metadata[key] = data.draw(VALUES)
    try:
        tokenizer = Tokenizer.from_metadata(metadata)
    except ModelError:
        return
    tokenizer.decode(tokenizer.encode("hello <|im_end|> a", special="parse"))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_change_to_a_token_or_a_merge_gives_a_tokenizer_or_our_error(data):
    metadata = dict(data.draw(st.sampled_from([BPE, SPM])))
    tokens = list(metadata["tokenizer.ggml.tokens"])
    kinds = list(metadata["tokenizer.ggml.token_type"])
    for _ in range(data.draw(st.integers(1, 4))):
        index = data.draw(st.integers(0, len(tokens) - 1))
        tokens[index] = data.draw(st.text(max_size=4))
        kinds[index] = data.draw(st.integers(0, 7))
    metadata["tokenizer.ggml.tokens"] = tokens
    metadata["tokenizer.ggml.token_type"] = [int(kind) for kind in kinds]
    if data.draw(st.booleans()) and "tokenizer.ggml.merges" in metadata:
        merges = list(metadata["tokenizer.ggml.merges"])
        merges[data.draw(st.integers(0, len(merges) - 1))] = data.draw(st.text(alphabet="he l\n", max_size=6))
        metadata["tokenizer.ggml.merges"] = merges
    try:
        tokenizer = Tokenizer.from_metadata(metadata)
    except ModelError:
        return
    text = data.draw(st.text(max_size=20))
    for special in ("literal", "parse"):
        tokenizer.decode(tokenizer.encode(text, special=special))
