"""Chat and completions with OpenAI's own client, unmodified, against real workers."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from prism_core.runtime import Generation, Limits, Runtime
from tests.api.door import Door, body_of, frames
from tests.toy import ToyModel

HELLO: Any = [{"role": "user", "content": "hello"}]
TOOLS: Any = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'


def bare(tokens: int) -> str:
    """The greedy answer of a Runtime of this process."""
    model = ToyModel()
    ids: list[int] = []
    Runtime(model.decoder(), Limits(4096, 8, 64 << 20)).generate(
        model.chat.encode_turn(HELLO).token_ids, Generation(tokens), emit=ids.append
    )
    return model.tokenizer.decode(ids)


def test_a_greedy_answer_is_the_engines_own(door: Door):
    done = door.openai().chat.completions.create(model="toy", messages=HELLO, max_tokens=40, temperature=0)
    choice = done.choices[0]
    assert choice.message.content == bare(40)
    assert (choice.message.role, choice.finish_reason, choice.index) == ("assistant", "length", 0)
    assert done.usage is not None
    prompt = len(ToyModel().chat.encode_turn(HELLO).token_ids)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (prompt, 40)
    assert done.usage.total_tokens == prompt + 40
    assert done.id.startswith("chatcmpl-")
    assert (done.object, done.model) == ("chat.completion", "toy")


def test_a_stream_says_what_the_whole_answer_says(door: Door):
    client = door.openai()
    asked: Any = {"model": "toy", "messages": HELLO, "max_tokens": 30, "seed": 5, "temperature": 0.8}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert not chunks[-1].choices
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 30
    assert len({chunk.id for chunk in chunks}) == 1
    assert len({chunk.created for chunk in chunks}) == 1


def test_a_stream_names_its_events_and_ends_with_done(door: Door):
    with door.http() as http, http.stream("POST", "/v1/chat/completions", json=body_of(stream=True)) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-prism-worker"] in door.pool.workers()
        assert response.headers["x-prism-route"] == "new"
        got = list(frames(response))
    assert got[-1] == ("", "[DONE]")
    numbers = [int(name.split("-")[1]) for name, _ in got if name]
    assert numbers == sorted(set(numbers))
    assert numbers[0] == 1
    assert all("usage" not in data for _, data in got[:-1])


def test_several_choices_have_seeds_of_their_own_and_one_prompt(door: Door):
    client = door.openai()
    asked: Any = {"model": "toy", "messages": HELLO, "max_tokens": 15, "temperature": 1.5}
    done = client.chat.completions.create(**asked, n=3, seed=11)
    assert [choice.index for choice in done.choices] == [0, 1, 2]
    single = [client.chat.completions.create(**asked, seed=11 + index) for index in range(3)]
    assert [choice.message.content for choice in done.choices] == [one.choices[0].message.content for one in single]
    assert done.usage is not None
    assert single[0].usage is not None
    assert done.usage.completion_tokens == 45
    assert done.usage.prompt_tokens == single[0].usage.prompt_tokens
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, n=3, seed=11, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in done.choices]


def test_the_same_seed_gives_the_same_answer_and_none_another_each_time(door: Door):
    client = door.openai()
    asked: Any = {"model": "toy", "messages": HELLO, "max_tokens": 25}
    one, two = (client.chat.completions.create(**asked, seed=3).choices[0].message.content for _ in range(2))
    assert one == two
    assert client.chat.completions.create(**asked).choices[0].message.content != one


def test_a_stop_string_ends_the_answer_and_no_letter_of_it_leaves(door: Door):
    client = door.openai()
    text = bare(60)
    stop = text[20:25]
    before = text[: text.index(stop)]
    asked: Any = {"model": "toy", "messages": HELLO, "max_tokens": 60, "temperature": 0}
    done = client.chat.completions.create(**asked, stop=["never there", stop])
    assert (done.choices[0].message.content, done.choices[0].finish_reason) == (before, "stop")
    streamed = ""
    for chunk in client.chat.completions.create(**asked, stop=stop, stream=True):
        streamed += chunk.choices[0].delta.content or ""
        assert before.startswith(streamed)
    assert streamed == before


def test_logprobs_name_each_token_and_its_rivals(door: Door):
    client = door.openai()
    asked: Any = {"model": "toy", "messages": HELLO, "max_tokens": 12, "temperature": 0, "logprobs": True}
    done = client.chat.completions.create(**asked, top_logprobs=3)
    assert done.choices[0].logprobs is not None
    entries = done.choices[0].logprobs.content or []
    assert len(entries) == 12
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode(errors="replace") == bare(12)
    for entry in entries:
        assert entry.top_logprobs[0].logprob == max(top.logprob for top in entry.top_logprobs) == entry.logprob
        assert len(entry.top_logprobs) == 3
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(**asked, top_logprobs=3, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content or []
    assert [entry.logprob for entry in streamed] == [entry.logprob for entry in entries]
    assert client.chat.completions.create(**{**asked, "logprobs": False}).choices[0].logprobs is None


def test_without_a_limit_the_answer_may_fill_the_context(parrot: Door):
    said = "word " * 200
    messages: Any = [{"role": "user", "content": said.strip()}]
    done = parrot.openai().chat.completions.create(model="toy", messages=messages)
    assert (done.choices[0].message.content, done.choices[0].finish_reason) == (said.strip(), "stop")
    too_long: Any = [{"role": "user", "content": "x" * 4090}]
    filled = parrot.openai().chat.completions.create(model="toy", messages=[{"role": "user", "content": "y" * 3000}])
    assert filled.choices[0].finish_reason == "length"
    assert filled.usage is not None
    assert filled.usage.total_tokens == 4096
    with pytest.raises(openai.BadRequestError) as caught:
        parrot.openai().chat.completions.create(model="toy", messages=too_long)
    assert caught.value.code == "context_length_exceeded"


def test_a_prompt_that_is_too_long_is_a_status_and_not_a_broken_stream(door: Door):
    messages: Any = [{"role": "user", "content": "x" * 4200}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            door.openai().chat.completions.create(model="toy", messages=messages, max_tokens=5, stream=stream)
        assert (caught.value.code, caught.value.type) == ("context_length_exceeded", "invalid_request_error")


def test_tool_calls_are_parsed_whole_and_streamed(parrot: Door):
    client = parrot.openai()
    messages: Any = [{"role": "user", "content": f"I look.\n{CALL}\n{CALL}"}]
    done = client.chat.completions.create(model="toy", messages=messages, tools=TOOLS)
    message = done.choices[0].message
    assert done.choices[0].finish_reason == "tool_calls"
    assert message.content == "I look."
    calls: Any = message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("look", {"at": "sea"})
    ] * 2
    assert len({call.id for call in calls}) == 2
    streamed: dict[int, Any] = {}
    text = ""
    for chunk in client.chat.completions.create(model="toy", messages=messages, tools=TOOLS, stream=True):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        for call in delta.tool_calls or []:
            streamed[call.index] = call
    assert text == "I look."
    assert [call.function.arguments for call in streamed.values()] == [call.function.arguments for call in calls]
    assert chunk.choices[0].finish_reason == "tool_calls"


def test_tools_reach_the_template_only_when_they_may_be_called(parrot: Door):
    client = parrot.openai()
    messages: Any = [{"role": "user", "content": CALL}]
    without = client.chat.completions.create(model="toy", messages=messages)
    choice_none = client.chat.completions.create(model="toy", messages=messages, tools=TOOLS, tool_choice="none")
    given = client.chat.completions.create(model="toy", messages=messages, tools=TOOLS)
    for done in (without, choice_none):
        assert done.choices[0].message.content == CALL
        assert not done.choices[0].message.tool_calls
        assert done.choices[0].finish_reason == "stop"
    assert given.usage is not None
    assert without.usage is not None
    assert choice_none.usage is not None
    assert given.usage.prompt_tokens > without.usage.prompt_tokens == choice_none.usage.prompt_tokens
    assert given.choices[0].message.content is None


@pytest.mark.parametrize("opened_by_the_template", [False, True])
def test_reasoning_is_split_from_the_answer(parrot: Door, opened_by_the_template: bool):
    client = parrot.openai()
    said = "well now\n</think>\n\nYes." if opened_by_the_template else "<think>\nwell now\n</think>\n\nYes."
    extra = {"chat_template_kwargs": {"think": True}} if opened_by_the_template else {}
    asked: Any = {"model": "toy", "messages": [{"role": "user", "content": said}], "extra_body": extra}
    message: Any = client.chat.completions.create(**asked).choices[0].message
    assert (message.reasoning_content, message.content) == ("well now", "Yes.")
    reasoning = text = ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        delta: Any = chunk.choices[0].delta
        reasoning += getattr(delta, "reasoning_content", None) or ""
        text += delta.content or ""
    assert (reasoning, text) == ("well now", "Yes.")


def test_content_may_come_in_parts_and_roles_of_openais_are_known(parrot: Door):
    messages: Any = [
        {"role": "developer", "content": "be good"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    ]
    done = parrot.openai().chat.completions.create(model="toy", messages=messages)
    assert done.choices[0].message.content == "one\ntwo"


def test_a_conversation_goes_on_where_it_was_and_on_its_worker(door: Door):
    client = door.openai()
    headers = {"X-Prism-Conversation": "chat-1"}
    first = client.chat.completions.with_raw_response.create(
        model="toy", messages=HELLO, max_tokens=8, extra_headers=headers
    )
    more: Any = [{"role": "user", "content": "and now?"}]
    second = client.chat.completions.with_raw_response.create(
        model="toy", messages=more, max_tokens=8, extra_headers=headers
    )
    assert (first.headers["x-prism-route"], second.headers["x-prism-route"]) == ("new", "pin")
    assert first.headers["x-prism-worker"] == second.headers["x-prism-worker"]
    usage = second.parse().usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens
    assert usage.prompt_tokens_details.cached_tokens > 20
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="toy", messages=more, extra_headers={"X-Prism-Conversation": "no/slash"})
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="toy", messages=more, n=2, extra_headers=headers)


@pytest.mark.parametrize(
    "said",
    [f"<think>\nhm\n</think>\n\nI look.\n{CALL}", f"hm\n</think>\n\n{CALL}", "plain  text ", "<think>hm</think>Yes"],
)
def test_a_clients_whole_list_goes_on_from_what_was_committed(parrot: Door, said: str):
    """The client sends the answer back in OpenAI's form; the transcript has it as it was generated."""
    client = parrot.openai()
    name = f"whole-{abs(hash(said))}"
    opened = not said.startswith("<think>") and "</think>" in said
    asked: Any = {
        "model": "toy",
        "tools": TOOLS,
        "extra_headers": {"X-Prism-Conversation": name},
        "extra_body": {"chat_template_kwargs": {"think": opened}},
    }
    user: Any = {"role": "user", "content": said}
    first = client.chat.completions.create(messages=[user], **asked).choices[0].message
    answer = first.to_dict()
    messages: Any = [user, answer]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "a ship"} for call in first.tool_calls or []]
    client.chat.completions.create(messages=[*messages, {"role": "user", "content": "more"}], **asked)
    turns = parrot.call_async(lambda: parrot.gateway.pool.transcript("local", name))
    assert [turn.answer["content"] for turn in turns] == [said, "more"]
    assert [message["role"] for message in turns[1].messages][-1] == "user"
    assert all(message["role"] != "assistant" for message in turns[1].messages)
    edited: Any = [user, {"role": "assistant", "content": "something else"}, {"role": "user", "content": "new"}]
    client.chat.completions.create(messages=edited, **asked)
    turns = parrot.call_async(lambda: parrot.gateway.pool.transcript("local", name))
    assert [turn.answer["content"] for turn in turns] == ["new"]


def test_completions_answer_each_prompt_in_order(door: Door):
    client = door.openai()
    done = client.completions.create(model="toy", prompt=["abc", "xyz"], n=2, max_tokens=6, temperature=0, logprobs=2)
    texts = [choice.text for choice in done.choices]
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    one = client.completions.create(model="toy", prompt=list(b"abc"), max_tokens=6, temperature=0)
    assert one.choices[0].text == texts[0]
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (6, 24)
    logprobs: Any = done.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 6
    assert len(logprobs.top_logprobs[0]) == 2
    streamed = ["", "", "", ""]
    for chunk in client.completions.create(
        model="toy", prompt=["abc", "xyz"], n=2, max_tokens=6, temperature=0, stream=True
    ):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts
    default = client.completions.create(model="toy", prompt="abc")
    assert default.usage is not None
    assert default.usage.completion_tokens == 16


@pytest.mark.parametrize("extra", [{"echo": True}, {"suffix": "end"}, {"best_of": 2}, {"logit_bias": {"1": 5}}])
def test_completions_refuse_what_they_cannot_do(door: Door, extra: dict[str, Any]):
    with pytest.raises(openai.BadRequestError) as caught:
        door.openai().completions.create(model="toy", prompt="abc", **extra)
    assert caught.value.code == "unsupported_parameter"
    assert caught.value.param == next(iter(extra))


def test_no_name_of_a_model_means_whatever_the_pool_runs(door: Door):
    with door.http() as http:
        body = body_of()
        del body["model"]
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.json()["model"] == "toy"
