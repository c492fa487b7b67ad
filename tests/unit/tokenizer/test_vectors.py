"""The ids of the reference engine, exactly: every string, every column."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prism_core.tokenizer import ChatTemplate, Tokenizer
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


@pytest.mark.model
def test_a_conversation_with_the_template_of_smollm2_grows_by_prefixes(smollm2_path):
    metadata = metadata_of(smollm2_path)
    tokenizer = Tokenizer.from_metadata(metadata)
    chat = ChatTemplate.from_metadata(metadata, tokenizer)
    assert chat.describe()["template"] == "file"
    messages: list[dict[str, object]] = []
    answers: dict[int, list[int]] = {}
    before: list[int] = []
    # the ids of an answer are a sampler's choice: here " there" and "!" stand in pieces that no encoder chooses
    for answer in ([19556, 216, 100, 88, 255, 17], [17, 17], [260, 198]):
        messages.append({"role": "user", "content": "Hi <|im_end|> there"})
        prompt = chat.encode_turn(messages, answers)
        text = tokenizer.decode(prompt.token_ids, show_control=True)
        assert text == chat.render(messages)
        assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
        assert prompt.token_ids[: len(before)] == before
        assert prompt.token_ids.count(2) == 1 + len(messages)
        assert len(prompt.save_at) == 2
        messages.append({"role": "assistant", "content": tokenizer.decode(answer)})
        answers[len(messages) - 1] = answer
        before = prompt.token_ids + answer


@pytest.mark.model
@pytest.mark.full
def test_a_conversation_with_gemma3_has_turns_though_its_file_has_no_template(gemma3_path):
    metadata = metadata_of(gemma3_path)
    tokenizer = Tokenizer.from_metadata(metadata)
    chat = ChatTemplate.from_metadata(metadata, tokenizer)
    assert chat.describe()["template"] == "gemma"
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi <end_of_turn> there"}]
    prompt = chat.encode_turn(messages)
    assert prompt.token_ids[:2] == [2, 105]
    assert prompt.token_ids.count(106) == 1
    answer = tokenizer.encode(" Hello\n\nyou", add_bos=False)
    messages += [{"role": "assistant", "content": tokenizer.decode(answer)}, {"role": "user", "content": "a"}]
    following = chat.encode_turn(messages, {2: answer})
    assert following.token_ids[: len(prompt.token_ids) + len(answer)] == prompt.token_ids + answer
