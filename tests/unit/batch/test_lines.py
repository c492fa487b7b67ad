"""One line of a batch file: what is taken, and what is said of the rest."""

from __future__ import annotations

from typing import Any

import pytest

from broker.batch.errors import BadLine
from broker.batch.lines import MAX_LINE_BYTES, opening, read_line
from broker.gateway.config import GatewayConfig
from tests.unit.batch.samples import CHAT, TEXT, chat, line, pack, text

CONFIG = GatewayConfig()


def test_a_chat_line_becomes_the_request_of_the_chat_endpoint() -> None:
    found = read_line(pack(chat("one", "hi", "be brief", temperature=0, model="m")), CONFIG)
    assert (found.custom_id, found.url, found.asked.model) == ("one", CHAT, "m")
    spec = found.asked.specs[0]
    assert spec.messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert (spec.max_tokens, spec.temperature, spec.seed) == (4, 0, 1)


def test_a_completion_line_may_have_several_prompts_and_answers() -> None:
    found = read_line(pack(text("one", ["a", "b"], n=2)), CONFIG)
    assert [spec.prompt for spec in found.asked.specs] == ["a", "a", "b", "b"]


def test_another_model_may_take_the_place_of_every_lines() -> None:
    assert read_line(pack(chat(model="theirs")), CONFIG, model="ours").asked.model == "ours"


def test_keys_beside_the_four_are_passed_over() -> None:
    assert read_line(pack(chat() | {"note": "mine"}), CONFIG).custom_id == "a"


def body(**changes: Any) -> dict[str, Any]:
    return line("a", CHAT, {"messages": [{"role": "user", "content": "x"}], **changes})


BAD: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"{'a': 1}", "no valid JSON: .* at character 2"),
    "a trailing comma": (b'{"custom_id": "a",}', "no valid JSON"),
    "two values": (b"{} {}", "no valid JSON"),
    "NaN": (b'{"custom_id": NaN}', "NaN is no JSON"),
    "an array": (b"[]", "must be a JSON object"),
    "no UTF-8": (b'{"custom_id": "\xff"}', "no UTF-8 text: byte 16"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "no UTF-8"),
    "deep nesting": (b'{"custom_id":' * 100_000, "nested too deeply|no valid JSON"),
    "no custom_id": (pack({"method": "POST"}), "custom_id is required"),
    "an empty custom_id": (pack(chat("")), "custom_id must be a string of 1 to 512"),
    "a long custom_id": (pack(chat("x" * 513)), "custom_id must be a string of 1 to 512"),
    "a number as custom_id": (pack(chat() | {"custom_id": 7}), "custom_id must be a string"),
    "half a surrogate pair": (b'{"custom_id": "\\ud800"}', "custom_id is no valid Unicode"),
    "half a pair as model": (
        b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "model": "\\ud800"}}',
        "model is no valid Unicode",
    ),
    "half a pair in a stop": (
        b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "stop": "\\ud800"}}',
        ".",
    ),
    "half a pair as a name": (
        b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "\\ud800": 1}}',
        "Unknown parameter",
    ),
    "half a pair for the template": (
        pack(
            chat() | {"body": {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": "\ud800"}}}
        ),
        ".",
    ),
    "a number of 5,000 digits": (b'{"custom_id": ' + b"1" * 5000 + b"}", "no valid JSON"),
    "no method": (pack({"custom_id": "a", "url": CHAT, "body": {}}), 'method must be "POST", got nothing'),
    "another method": (pack(chat() | {"method": "GET"}), 'method must be "POST", got "GET"'),
    "another url": (pack(chat() | {"url": "/v1/embeddings"}), 'url must be .*, got "/v1/embeddings"'),
    "a whole address": (pack(chat() | {"url": "http://here/v1/chat/completions"}), "url must be"),
    "a list as url": (pack(chat() | {"url": [CHAT]}), "url must be"),
    "no body": (pack({"custom_id": "a", "method": "POST", "url": CHAT}), "body must be a JSON object"),
    "a body that is text": (pack(chat() | {"body": "{}"}), "body must be a JSON object"),
    "no messages": (pack(line("a", CHAT, {})), "messages is required"),
    "a role that is none": (pack(body(messages=[{"role": "robot", "content": "x"}])), "role"),
    "an unknown parameter": (pack(body(temprature=1)), "Did you mean 'temperature'"),
    "a parameter out of range": (pack(body(temperature=9)), "temperature must be a number from 0 to 2, got 9"),
    "a stream": (pack(body(stream=True)), "stream must be false in a batch"),
    "a format": (pack(body(response_format={"type": "json_object"})), "response_format"),
    "an empty prompt": (pack(text("a", "")), "prompt"),
    "too many answers": (pack(body(n=17)), "n must be an integer from 1 to 16"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_refused_with_one_line_that_says_why(name: str) -> None:
    data, message = BAD[name]
    with pytest.raises(BadLine, match=message) as caught:
        read_line(data, CONFIG)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    str(caught.value.at(1)).encode()
    assert caught.value.code


def test_a_problem_names_the_field_inside_the_body() -> None:
    with pytest.raises(BadLine) as caught:
        read_line(pack(body(top_p=2)), CONFIG)
    assert caught.value.param == "body.top_p"


def test_a_line_for_another_endpoint_than_the_batchs_is_refused() -> None:
    with pytest.raises(BadLine, match=f"url is {TEXT}, but the batch's endpoint is {CHAT}"):
        read_line(pack(text()), CONFIG, endpoint=CHAT)


def test_equal_beginnings_have_equal_openings_and_no_more_than_asked_is_kept() -> None:
    shared = "s" * 1000
    one = read_line(pack(chat("a", "x" * 100, shared)), CONFIG)
    other = read_line(pack(chat("b", "y" * 100, shared)), CONFIG)
    assert opening(one, 1000) == opening(other, 1000)
    assert opening(one, 2000) != opening(other, 2000)
    for most in (1, 256, 999, 16384):
        assert len(opening(one, most)) <= most
    tokens = read_line(pack(text("a", [7, 8, 9])), CONFIG)
    assert opening(tokens, 100) == "7 8 9"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert opening(read_line(pack(body(tools=tools)), CONFIG), 30) != opening(read_line(pack(body()), CONFIG), 30)


def test_the_longest_line_is_shorter_than_what_memory_bears() -> None:
    assert MAX_LINE_BYTES <= 4 << 20
