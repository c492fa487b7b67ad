"""Messages as clients send them: brought into one form, or refused with the place and the reason."""

from __future__ import annotations

import pytest

from prism_core.errors import InvalidRequest
from prism_core.tokenizer.messages import MAX_MESSAGES, normalise

USER = {"role": "user", "content": "hi"}


def test_text_parts_are_joined_by_line_breaks():
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]
    assert normalise([{"role": "user", "content": parts}]) == [{"role": "user", "content": "one\ntwo"}]
    assert normalise([{"role": "user", "content": []}]) == [{"role": "user", "content": ""}]


def test_fields_that_are_none_are_left_out_and_others_pass():
    message = {"role": "user", "content": "hi", "name": None, "refusal": None, "mood": {"good": [1]}}
    assert normalise([message]) == [{"role": "user", "content": "hi", "mood": {"good": [1]}}]


def test_tool_calls_get_their_arguments_as_an_object():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    (out,) = normalise([message])
    assert out["content"] == ""
    assert out["tool_calls"] == [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    # the caller's own objects are as they were
    assert call["function"]["arguments"] == '{"a": 1}'
    assert message["content"] is None


@pytest.mark.parametrize("arguments", ["not json", "[1]", "3", "", '{"a":' * 100_000])
def test_arguments_that_are_no_object_pass_as_text(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    (out,) = normalise([{"role": "assistant", "tool_calls": [call]}])
    assert out["tool_calls"][0]["function"]["arguments"] == arguments


def test_an_empty_list_of_tool_calls_is_none():
    assert normalise([{"role": "assistant", "content": "a", "tool_calls": []}]) == [
        {"role": "assistant", "content": "a"}
    ]


REFUSED = {
    "no list": ("hello", r"messages must be a list, not str"),
    "an object": ({"role": "user"}, r"messages must be a list, not dict"),
    "nothing": (None, r"messages must be a list, not NoneType"),
    "an empty list": ([], r"messages is empty"),
    "too many": ([USER] * (MAX_MESSAGES + 1), r"messages has 16385 entries; at most 16384"),
    "text for a message": ([USER, "hi"], r"messages\[1\] must be an object with role and content, not str"),
    "no role": ([{"content": "hi"}], r"messages\[0\]\.role is None; it must be one of system, developer, user"),
    "an unknown role": ([{"role": "wizard", "content": "hi"}], r"messages\[0\]\.role is 'wizard'"),
    "a role that is no text": ([{"role": ["user"], "content": "hi"}], r"messages\[0\]\.role is \['user'\]"),
    "a role with a token in it": ([{"role": "user<|im_end|>", "content": "hi"}], r"messages\[0\]\.role is"),
    "no content": ([{"role": "user"}], r"messages\[0\] has no content"),
    "content None": ([{"role": "user", "content": None}], r"messages\[0\] has no content"),
    "a number": ([{"role": "user", "content": 3}], r"messages\[0\]\.content must be a string or a list of text parts"),
    "an image": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        r"messages\[0\]\.content\[0\]\.type is 'image_url'; this model takes text only",
    ),
    "a part that is text": ([{"role": "user", "content": ["hi"]}], r"content\[0\] must be an object with type and"),
    "a part without text": ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text must be a string"),
    "a field name that is no text": ([{"role": "user", "content": "a", 3: 4}], r"field name that is no string: 3"),
    "calls by a user": (
        [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}],
        r"messages\[0\]\.tool_calls belongs to assistant messages, not to 'user'",
    ),
    "calls that are no list": ([{"role": "assistant", "tool_calls": {}}], r"tool_calls must be a list, not dict"),
    "a call without a name": ([{"role": "assistant", "tool_calls": [{"function": {}}]}], r"with function\.name"),
    "a call that is text": ([{"role": "assistant", "tool_calls": ["f"]}], r"tool_calls\[0\] must be an object"),
    "arguments as a list": (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}],
        r"tool_calls\[0\]\.function\.arguments must be an object or its JSON, not list",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_messages_are_refused_for(name):
    messages, sentence = REFUSED[name]
    with pytest.raises(InvalidRequest, match=sentence):
        normalise(messages)
