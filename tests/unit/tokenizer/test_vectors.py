"""The ids of the reference engine, exactly: every string, every column."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prism_core.tokenizer import Tokenizer
from tests.unit.tokenizer.vocabularies import metadata_of

DATA = Path(__file__).parents[2] / "data"
TINY = sorted(path.parent.name for path in DATA.glob("tiny-*/ref.json"))
WAYS = {
    "ids": {"special": "literal", "add_bos": False},
    "ids_special": {"special": "parse", "add_bos": False},
    "ids_add_special": {"special": "parse"},
}


def check(tokenizer: Tokenizer, name: str) -> None:
    cases = json.loads((DATA / "tokenizers" / f"{name}.json").read_text())["cases"]
    assert len(cases) == 96
    wrong = [
        (column, case["text"], tokenizer.encode(case["text"], **way), case[column])
        for case in cases
        for column, way in WAYS.items()
        if tokenizer.encode(case["text"], **way) != case[column]
    ]
    assert wrong == []
    for case in cases:
        # "▁" and the space are one and the same in a score-merged vocabulary
        spaced = case["text"].replace("▁", " ") if tokenizer.vocabulary.model == "llama" else case["text"]
        assert tokenizer.decode(case["ids"]) == spaced
        assert tokenizer.decode(case["ids_special"], show_control=True) == spaced


@pytest.mark.model
def test_smollm2_gives_the_reference_ids_for_every_string(smollm2_path):
    tokenizer = Tokenizer.from_metadata(metadata_of(smollm2_path))
    check(tokenizer, "smollm2")
    assert tokenizer.stop_tokens == (0, 2, 4)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.add_bos) == (1, 2, False)


@pytest.mark.model
@pytest.mark.full
def test_gemma3_gives_the_reference_ids_for_every_string(gemma3_path):
    tokenizer = Tokenizer.from_metadata(metadata_of(gemma3_path))
    check(tokenizer, "gemma3")
    assert tokenizer.stop_tokens == (1, 106, 212)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.add_bos) == (2, 1, True)


@pytest.mark.parametrize("name", TINY)
def test_the_prompts_of_a_tiny_file_give_the_reference_ids(name):
    prompts = json.loads((DATA / name / "ref.json").read_text())["prompts"]
    tokenizer = Tokenizer.from_metadata(metadata_of(DATA / name / f"{name}.gguf"))
    seen = 0
    for prompt in prompts.values():
        special = "parse" if prompt["parse_special"] else "literal"
        ids = tokenizer.encode(prompt["text"], special=special, add_bos=None if prompt["add_special"] else False)
        assert ids == prompt["ids"]
        assert tokenizer.decode(ids) == prompt["text"]
        seen += 1
    assert seen >= 2
