"""Special tokens: found where the reference engine finds them, and control tokens in trusted text only."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism_core.errors import InvalidRequest
from prism_core.tokenizer import Tokenizer
from prism_core.tokenizer.special import SpecialTokens
from tests.unit.tokenizer.vocabularies import bpe_metadata, spm_metadata


def slow_find(text: str, ids: dict[str, int]) -> list[tuple[int, int, int]]:
    """Longest spelling first over all of the text that is still free, equal lengths by id, each from the left."""
    free = [(0, len(text))]
    found: list[tuple[int, int, int]] = []
    for spelling in sorted(ids, key=lambda each: (-len(each), ids[each])):
        for begin, end in list(free):
            place = begin
            while (at := text.find(spelling, place, end)) >= 0:
                found.append((at, at + len(spelling), ids[spelling]))
                free.append((place, at))
                place = at + len(spelling)
            free.remove((begin, end))
            free.append((place, end))
    return sorted(found)


@pytest.mark.parametrize("seed", range(30))
def test_overlapping_spellings_are_chosen_as_the_slow_definition_does(seed):
    rng = random.Random(seed)
    alphabet = rng.choice(["ab", "<>|a", "\n\t ", "aé日<"])
    spellings = {"".join(rng.choice(alphabet) for _ in range(rng.randint(1, 5))) for _ in range(rng.randint(1, 9))}
    ids = {spelling: index for index, spelling in enumerate(sorted(spellings))}
    special = SpecialTokens(ids)
    for _ in range(80):
        text = "".join(rng.choice(alphabet + "x") for _ in range(rng.randint(0, 24)))
        assert list(special.find(text)) == slow_find(text, ids), f"{seed=} {ids} {text!r}"


LINES = SpecialTokens({"\n" * count: count for count in range(1, 32)} | {"  " + " " * count: 100 for count in range(9)})


@given(st.text(alphabet="\n a", max_size=80))
def test_runs_of_breaks_and_spaces_are_cut_as_the_slow_definition_does(text):
    assert list(LINES.find(text)) == slow_find(text, LINES._ids)


def test_a_long_run_of_overlapping_spellings_takes_one_pass():
    count = 1 << 18
    assert [end - start for start, end, _ in LINES.find("\n" * count)] == [31] * (count // 31) + [count % 31]


def test_special_tokens_with_every_first_character_are_found_too():
    ids = {chr(0x4E00 + index) + "x": index for index in range(5000)} | {"\n": 5001, "]": 5002, "^-": 5003, "\\": 5004}
    special = SpecialTokens(ids)
    text = "a\u4e05x b\u4e06 ]^\\^-\n\u5000x" * 50
    assert list(special.find(text)) == slow_find(text, ids)


def test_no_special_tokens_find_nothing():
    assert list(SpecialTokens({}).find("any text")) == []
    assert list(SpecialTokens({"": 5}).find("any text")) == []


BPE = Tokenizer.from_metadata(bpe_metadata())
SPM = Tokenizer.from_metadata(spm_metadata({"▁": -1.0}, user_defined=("<think>", "\n\n"), add_space_prefix=False))


@pytest.mark.parametrize("tokenizer", [BPE, SPM], ids=["bpe", "spm"])
def test_user_text_containing_the_spelling_of_a_control_token_stays_text(tokenizer):
    vocabulary = tokenizer.vocabulary
    control = vocabulary.ids_of_type(2, 3)
    assert control
    for index in control:
        spelling = vocabulary.texts[index]
        for text in (spelling, f"a{spelling}", f" {spelling}\n{spelling}", spelling[0] + spelling):
            ids = tokenizer.encode(text, add_bos=False)
            assert not set(ids) & set(control)
            assert tokenizer.decode(ids) == text
            assert index in tokenizer.encode(text, special="parse", add_bos=False)


@pytest.mark.parametrize("tokenizer", [BPE, SPM], ids=["bpe", "spm"])
def test_user_defined_tokens_are_found_in_any_text(tokenizer):
    think = tokenizer.vocabulary.ids["<think>"]
    for special in ("literal", "parse"):
        assert tokenizer.encode("a<think>b", special=special, add_bos=False)[1:-1] == [think]
    assert tokenizer.decode([think]) == "<think>"


def test_tokens_that_end_an_answer_are_control_tokens_whatever_the_file_says():
    # a base vocabulary with "</s>" as an ordinary token, and fill-in-the-middle tokens as user-defined ones
    metadata = bpe_metadata(user_defined=("</s>", "<|fim_prefix|>", "<|fim_pad|>", "<think>"))
    tokenizer = Tokenizer.from_metadata(metadata)
    ids = tokenizer.vocabulary.ids
    for spelling in ("</s>", "<|fim_prefix|>", "<|fim_pad|>"):
        assert len(tokenizer.encode(spelling)) > 1
        assert tokenizer.encode(spelling, special="parse") == [ids[spelling]]
        assert tokenizer.decode([ids[spelling]]) == ""
    stops = {ids[text] for text in ("<|endoftext|>", "<|im_end|>", "</s>", "<|fim_pad|>")}
    assert set(tokenizer.stop_tokens) == stops


def test_stop_tokens_are_the_ids_of_the_file_and_the_known_texts():
    control = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<custom>", "<x>", "<y>")
    metadata = bpe_metadata(control=control)
    first = list(metadata["tokenizer.ggml.tokens"]).index("<|eot_id|>")
    metadata |= {f"tokenizer.ggml.{name}_token_id": first + i for i, name in [(3, "eos"), (4, "eot"), (5, "eom")]}
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.stop_tokens == tuple(first + i for i in range(6))
    del metadata["tokenizer.ggml.eos_token_id"]
    assert Tokenizer.from_metadata(metadata).eos is None


@pytest.mark.parametrize(
    ("pre", "says", "adds"),
    [("qwen2", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False), ("qwen2", True, True)],
)
def test_the_bos_token_is_added_as_the_file_says(pre, says, adds):
    metadata = bpe_metadata(pre=pre, bos_token_id=0)
    if says is not None:
        metadata["tokenizer.ggml.add_bos_token"] = says
    tokenizer = Tokenizer.from_metadata(metadata)
    plain = tokenizer.encode("hello", add_bos=False)
    assert tokenizer.encode("hello") == ([0] if adds else []) + plain
    assert tokenizer.encode("hello", add_bos=True) == [0, *plain]


def test_asking_for_a_bos_token_that_the_model_has_not_is_refused():
    with pytest.raises(InvalidRequest, match="no BOS token"):
        BPE.encode("a", add_bos=True)
    # a pre-tokenizer that adds one by default does without
    assert Tokenizer.from_metadata(bpe_metadata(pre="llama-bpe")).add_bos is False
