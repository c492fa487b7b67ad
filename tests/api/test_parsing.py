"""What the gateway makes of texts and bodies, without a pool: properties over all ways to cut, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.gateway.access import RateLimit
from broker.gateway.answer import AnswerParser, Piece, _joined
from broker.gateway.asked import created_at
from broker.gateway.body import Body
from broker.gateway.chat import read_chat
from broker.gateway.completions import read_completion
from broker.gateway.config import GatewayConfig
from broker.gateway.errors import ApiError
from broker.gateway.response_input import messages_of
from broker.keys import new_ulid
from prism_core.errors import InvalidRequest

CONFIG = GatewayConfig()
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'
PARTS = ("<think>", "</think>", "<tool_call>", "</tool_call>", CALL, " ", "\n", "a", "<", "thinking ", "é", '{"name"')


def parsed(text: str, cuts: list[int] | None = None, **options: bool) -> list[Piece]:
    parser = AnswerParser(**options)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts or [])})
    pieces: list[Piece] = []
    for begin, end in pairwise(places):
        pieces += parser.push(text[begin:end])
    return _joined([*pieces, *parser.finish()])


def shown(pieces: list[Piece]) -> list[tuple[str, str]]:
    return [(piece.kind, piece.call.name if piece.call else piece.text) for piece in pieces]


@given(
    st.lists(st.sampled_from(PARTS), max_size=12),
    st.lists(st.integers(0, 400), max_size=30),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_the_parts_of_an_answer_do_not_depend_on_how_it_was_cut(parts, cuts, thinking, thoughts, tools):
    text = "".join(parts)
    options = {"thinking": thinking, "thoughts": thoughts, "tools": tools}
    assert parsed(text, cuts, **options) == parsed(text, **options)
    assert parsed(text, list(range(len(text))), **options) == parsed(text, **options)


@given(st.lists(st.sampled_from(PARTS), max_size=12), st.booleans())
def test_no_letter_of_an_answer_is_lost_but_tags_and_white_space(parts, tools):
    text = "".join(parts)

    def letters(value: str) -> str:
        for tag in ("<think>", "</think>", "<tool_call>", "</tool_call>"):
            value = value.replace(tag, "")
        return "".join(value.split())

    out = "".join(
        piece.text if piece.call is None else json.dumps({"name": piece.call.name, "arguments": {"at": "sea"}})
        for piece in parsed(text, tools=tools)
    )
    assert letters(out) == letters(text)


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("<think>\nwell\n</think>\n\nyes", {}, [("reasoning", "well"), ("content", "yes")]),
        ("well</think>yes", {"thinking": True}, [("reasoning", "well"), ("content", "yes")]),
        ("<think>cut sho", {}, [("reasoning", "cut sho")]),
        ("  plain ", {}, [("content", "  plain ")]),
        ("a <think>b</think>", {}, [("content", "a <think>b</think>")]),
        (f"Let me see.\n{CALL}", {"tools": True}, [("content", "Let me see."), ("call", "look")]),
        (f"{CALL}\n{CALL}\n", {"tools": True}, [("call", "look"), ("call", "look")]),
        (f"<think>t</think>\n{CALL}", {"tools": True}, [("reasoning", "t"), ("call", "look")]),
        (CALL, {}, [("content", CALL)]),
        ("<tool_call>no json</tool_call>x", {"tools": True}, [("content", "<tool_call>no json</tool_call>x")]),
        ('<tool_call>{"name": "look", "argu', {"tools": True}, [("content", '<tool_call>{"name": "look", "argu')]),
        ('<tool_call>{"name": "look"}', {"tools": True}, [("call", "look")]),
        ('<tool_call>{"name": "x", "arguments": NaN}</tool_call>', {"tools": True}, None),
    ],
)
def test_answers_are_taken_apart_as_their_tags_say(text, options, expected):
    assert shown(parsed(text, **options)) == (expected or [("content", text)])


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ([], None, "invalid_value"),
        ({}, "messages", "missing_required_parameter"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "hello"}, "messages", "invalid_value"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "invalid_value"),
        ({"temprature": 1}, "temprature", "unknown_parameter"),
        ({"temperature": 2.1}, "temperature", "invalid_value"),
        ({"temperature": True}, "temperature", "invalid_value"),
        ({"top_p": "1"}, "top_p", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid_value"),
        ({"n": 17}, "n", "invalid_value"),
        ({"seed": "x"}, "seed", "invalid_value"),
        ({"stop": [""]}, "stop", "invalid_value"),
        ({"stop": ["x"] * 17}, "stop", "invalid_value"),
        ({"stop": 5}, "stop", "invalid_value"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "unsupported_parameter"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", "invalid_value"),
        ({"stream_options": {"usage": True}}, "stream_options.usage", "unknown_parameter"),
        ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
    ],
)
def test_a_bad_body_is_refused_with_the_name_of_the_field(body: Any, param: str | None, code: str):
    whole = body
    if isinstance(body, dict) and body and "messages" not in body:
        whole = {"messages": [{"role": "user", "content": "x"}], **body}
    with pytest.raises(ApiError) as caught:
        read_chat(whole, CONFIG)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)
    assert "\n" not in caught.value.message


def test_a_typo_is_answered_with_the_name_that_was_meant():
    with pytest.raises(ApiError, match=r"Unknown parameter: 'max_token'\. Did you mean 'max_tokens'\?"):
        read_chat({"messages": [{"role": "user", "content": "x"}], "max_token": 5}, CONFIG)


def test_what_has_no_effect_is_accepted_and_null_counts_as_absent():
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "parallel_tool_calls": False,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "temperature": None,
        "n": None,
        "stop": None,
    }
    asked = read_chat(body, CONFIG)
    assert (asked.specs[0].temperature, asked.specs[0].top_p, asked.specs[0].max_tokens) == (1.0, 1.0, None)
    assert len(asked.specs) == 1


def test_seeds_count_up_over_the_choices_and_negative_ones_are_seeds_too():
    asked = read_chat({"messages": [{"role": "user", "content": "x"}], "n": 3, "seed": -1}, CONFIG)
    assert [spec.seed for spec in asked.specs] == [(1 << 64) - 1, 0, 1]


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("a", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2)],
)
def test_a_prompt_is_text_or_ids_or_several_of_them(prompt, count):
    assert len(read_completion({"prompt": prompt, "n": 2}, CONFIG).specs) == 2 * count


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], [1.5], [["a"]], [-1], {"a": 1}, [True], None])
def test_anything_else_is_no_prompt(prompt):
    with pytest.raises(ApiError) as caught:
        read_completion({"prompt": prompt}, CONFIG)
    assert caught.value.status == 400


def test_limits_of_messages_and_choices_are_the_configured_ones():
    small = GatewayConfig(max_messages=2, max_message_bytes=4, max_choices=3)
    user = {"role": "user", "content": "x"}
    for body in ({"messages": [user] * 3}, {"messages": [{"role": "user", "content": "€€"}]}):
        with pytest.raises(ApiError, match=r"limit is|at most 2"):
            read_chat(body, small)
    with pytest.raises(ApiError, match="the limit is 3"):
        read_completion({"prompt": ["a", "b"], "n": 2}, small)


def test_input_items_become_the_messages_that_a_template_knows():
    items = [
        {"role": "user", "content": "look"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "hear", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "a ship"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A ship."}], "id": "m"},
    ]
    messages = messages_of(items, CONFIG)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert [call["function"]["name"] for call in messages[1]["tool_calls"]] == ["look", "hear"]
    assert messages[1]["reasoning_content"] == "hm"
    assert messages[2] == {"role": "tool", "tool_call_id": "c1", "content": "a ship"}
    assert set(messages[3]) == {"role", "content"}


@pytest.mark.parametrize(
    "changes",
    [
        {"host": "0.0.0.0"},
        {"host": "192.168.1.5"},
        {"host": "gateway.example"},
        {"host": ""},
        {"port": 70_000},
        {"port": True},
        {"api_keys": ("a b",)},
        {"max_body_bytes": 0},
        {"keep_alive_s": 0},
        {"requests_per_minute": -1},
        {"burst": 0},
    ],
)
def test_a_gateway_that_could_not_work_or_would_be_open_to_all_is_not_configured(changes):
    with pytest.raises(InvalidRequest, match="gateway config: "):
        GatewayConfig(**changes)


def test_keys_come_from_the_environment_and_never_show():
    config = GatewayConfig.from_environment({"PRISM_API_KEYS": " one, two ,"}, host="0.0.0.0")
    assert config.api_keys == ("one", "two")
    assert "one" not in repr(config)
    assert GatewayConfig(host="::1").api_keys == ()


def test_a_bucket_lets_the_burst_through_and_then_the_rate():
    now = [0.0]
    limit = RateLimit(60, 3, clock=lambda: now[0])
    for _ in range(3):
        limit.take("a")
    with pytest.raises(ApiError) as caught:
        limit.take("a")
    assert caught.value.headers["Retry-After"] == "1"
    limit.take("b")
    now[0] = 1.0
    limit.take("a")
    with pytest.raises(ApiError):
        limit.take("a")
    now[0] = 100.0
    limit.take("a", 10)  # more than the bucket holds: let in when it is full, and paid back
    now[0] = 106.0
    with pytest.raises(ApiError) as caught:
        limit.take("a")
    assert caught.value.headers["Retry-After"] == "2"


def test_a_null_or_a_whole_float_is_read_as_it_is_meant():
    body = Body({"n": 2.0, "top_k": None})
    assert body.integer("n", 1, 5) == 2
    assert body.integer("top_k", 0, 5) is None
    body.finish()


def test_a_requests_time_is_in_its_id():
    import time

    assert abs(created_at(new_ulid()) - time.time()) < 5


def test_the_gateway_starts_without_numba_rq_or_any_kernel():
    code = "import sys, broker.gateway.server; print(sorted({'numba', 'rq', 'prism_core.kernels'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
