"""Prompts of conversations: two ways to speak, edits, and committed ids that are never tokenised again."""

from __future__ import annotations

from typing import Any

import pytest

from broker.spec import RequestSpec
from broker.transcript import TurnRecord
from prism_core.errors import InvalidRequest
from tests.toy import ToyModel
from workers.prompt import TurnPrompt, build, chain

model = ToyModel()
SYSTEM = {"role": "system", "content": "be brief"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def commit(prompt: TurnPrompt, turns: list[TurnRecord], text: str, ids: list[int]) -> list[TurnRecord]:
    parent = turns[prompt.base - 1].digest if prompt.base else ""
    done = prompt.commit(request="R", model="m", answer_ids=ids, text=text, parent=parent)
    return [*turns[: done.base], done.record]


def two_turns() -> list[TurnRecord]:
    """[system, one] -> ONE, [two] -> TWO, with answer ids that no tokenizer would make of the texts."""
    turns: list[TurnRecord] = []
    first = build(RequestSpec(messages=[SYSTEM, user("one")]), model, turns)
    turns = commit(first, turns, "ONE", [1, 2, 3])
    second = build(RequestSpec(messages=[user("two")]), model, turns)
    return commit(second, turns, "TWO", [4, 5, 6])


def contains(whole: list[int], part: list[int]) -> bool:
    return any(whole[at : at + len(part)] == part for at in range(len(whole)))


def test_new_messages_and_the_whole_list_give_the_same_prompt():
    turns = two_turns()
    short = build(RequestSpec(messages=[user("three")]), model, turns)
    whole_list = [SYSTEM, user("one"), assistant("ONE"), user("two"), assistant("TWO"), user("three")]
    whole = build(RequestSpec(messages=whole_list), model, turns)
    assert short == whole
    assert short.base == 2
    assert short.messages == [user("three")]


def test_committed_answers_keep_their_generated_ids():
    prompt = build(RequestSpec(messages=[user("three")]), model, two_turns())
    assert contains(prompt.token_ids, [1, 2, 3])
    assert contains(prompt.token_ids, [4, 5, 6])


def test_fields_that_are_absent_and_fields_that_are_none_are_the_same_message():
    turns = two_turns()
    echoed = {"role": "assistant", "content": "ONE", "refusal": None, "tool_calls": None}
    prompt = build(RequestSpec(messages=[SYSTEM, user("one"), echoed, user("2")]), model, turns)
    assert prompt.base == 1
    assert contains(prompt.token_ids, [1, 2, 3])


def test_an_edited_message_replaces_the_transcript_from_there_and_keeps_what_is_before():
    turns = two_turns()
    edited = [SYSTEM, user("one"), assistant("ONE"), user("two, but other")]
    prompt = build(RequestSpec(messages=edited), model, turns)
    assert (prompt.base, prompt.messages) == (1, [user("two, but other")])
    assert contains(prompt.token_ids, [1, 2, 3])
    assert not contains(prompt.token_ids, [4, 5, 6])
    unedited = build(RequestSpec(messages=[user("x")]), model, turns[:1]).token_ids
    shared = len(model.chat.encode_turn(edited[:-1], {2: [1, 2, 3]}, add_generation_prompt=False).token_ids)
    assert prompt.token_ids[:shared] == unedited[:shared]
    assert len(commit(prompt, turns, "new", [9])) == 2


def test_an_edited_answer_is_encoded_as_the_client_wrote_it():
    prompt = build(RequestSpec(messages=[SYSTEM, user("one"), assistant("ONE!"), user("two")]), model, two_turns())
    assert prompt.base == 0
    assert not contains(prompt.token_ids, [1, 2, 3])
    assert contains(prompt.token_ids, list(b"ONE!"))


def test_asking_for_the_last_answer_again_replaces_it():
    prompt = build(RequestSpec(messages=[SYSTEM, user("one"), assistant("ONE"), user("two")]), model, two_turns())
    assert (prompt.base, prompt.messages) == (1, [user("two")])


def test_a_first_message_without_a_system_prompt_is_edited_by_saying_replace():
    turns = commit(build(RequestSpec(messages=[user("a")]), model), [], "A", [1])
    appended = build(RequestSpec(messages=[user("b")]), model, turns)
    replaced = build(RequestSpec(messages=[user("b")], history="replace"), model, turns)
    assert (appended.base, replaced.base) == (1, 0)
    assert replaced.token_ids == build(RequestSpec(messages=[user("b")]), model).token_ids


def test_saved_positions_lie_inside_the_prompt_in_order():
    prompt = build(RequestSpec(messages=[SYSTEM, user("one")]), model)
    assert list(prompt.save_at) == sorted(set(prompt.save_at))
    assert all(0 < at < len(prompt.token_ids) for at in prompt.save_at)


def test_plain_text_goes_on_after_the_ids_of_the_turns_before():
    turns = commit(build(RequestSpec(prompt="ab"), model), [], "cd", [99, 100])
    prompt = build(RequestSpec(prompt="ef"), model, turns)
    assert prompt.token_ids == [*b"ab", 99, 100, *b"ef"]
    assert (prompt.base, prompt.prompt_ids) == (1, list(b"ef"))


def test_token_ids_may_be_the_new_ones_or_the_whole_list():
    turns = commit(build(RequestSpec(token_ids=[1, 2]), model), [], "x", [3])
    new = build(RequestSpec(token_ids=[7, 8]), model, turns)
    whole = build(RequestSpec(token_ids=[1, 2, 3, 7, 8]), model, turns)
    assert new == whole
    assert new.token_ids == [1, 2, 3, 7, 8]


def test_messages_and_plain_text_do_not_mix_in_one_conversation():
    plain = commit(build(RequestSpec(prompt="a"), model), [], "b", [1])
    with pytest.raises(InvalidRequest, match="plain text"):
        build(RequestSpec(messages=[user("x")]), model, plain)
    with pytest.raises(InvalidRequest, match="messages"):
        build(RequestSpec(prompt="x"), model, two_turns())


def test_the_digest_of_a_turn_is_that_of_the_whole_list_before_it():
    first, second = two_turns()
    assert first.digest == chain("", [SYSTEM, user("one"), assistant("ONE")])
    assert second.digest == chain(first.digest, [user("two"), assistant("TWO")])
