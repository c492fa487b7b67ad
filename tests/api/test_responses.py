"""`/v1/responses` with OpenAI's own client: in the background, streamed, resumed, cancelled, continued."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.api.door import Door, Raw, frames
from tests.pool import wait_for

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'
TOOLS: Any = [{"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}]


def finished(client: openai.OpenAI, name: str) -> Any:
    def ended() -> Any:
        found = client.responses.retrieve(name)
        return found if found.status not in ("queued", "in_progress") else None

    return wait_for(ended, f"{name} to end")


def test_a_response_is_answered_whole(door: Door):
    done = door.openai().responses.create(
        model="toy", input="hello", max_output_tokens=20, temperature=0, instructions="be good", metadata={"a": "b"}
    )
    assert (done.status, done.incomplete_details.reason if done.incomplete_details else None) == (
        "incomplete",
        "max_output_tokens",
    )
    assert done.usage is not None
    assert done.usage.output_tokens == 20
    assert done.usage.total_tokens == done.usage.input_tokens + 20
    assert len(done.output_text.encode()) <= 20
    assert (done.instructions, done.metadata, done.model) == ("be good", {"a": "b"}, "toy")
    again = door.openai().responses.retrieve(done.id)
    assert again.to_dict() == done.to_dict()
    items = door.openai().responses.input_items.list(done.id).data
    assert [item.role for item in items] == ["system", "user"]  # type: ignore[union-attr]


def test_openais_stream_helper_understands_every_event(parrot: Door):
    with parrot.openai().responses.stream(
        model="toy", input=f"<think>\nhm\n</think>\nI look.\n{CALL}", tools=TOOLS
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text == "I look."
    call: Any = final.output[2]
    assert (call.name, json.loads(call.arguments)) == ("look", {"at": "sea"})
    assert final.status == "completed"
    reasoning: Any = final.output[0]
    assert reasoning.content[0].text == "hm"
    kinds = [event.type for event in events]
    for kind in (
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
        *("response.reasoning_text.delta", "response.reasoning_text.done", "response.output_text.delta"),
        *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
        *("response.function_call_arguments.delta", "response.function_call_arguments.done", "response.completed"),
    ):
        assert kind in kinds


def test_a_background_response_is_there_at_once_and_done_later(door: Door):
    client = door.openai()
    made = client.responses.create(model="toy", input="hello", max_output_tokens=50, background=True)
    assert made.status in ("queued", "in_progress")
    assert made.background is True
    done = finished(client, made.id)
    assert done.status == "incomplete"
    assert done.created_at == made.created_at
    assert done.usage.output_tokens == 50


def test_a_background_stream_can_be_left_and_read_again_from_any_event(door: Door):
    client = door.openai()
    stream = client.responses.create(model="toy", input="hello", max_output_tokens=60, background=True, stream=True)
    seen: list[Any] = []
    for event in stream:
        seen.append(event)
        if len(seen) == 12:
            break
    stream.close()
    name = seen[0].response.id
    rest = list(client.responses.retrieve(name, stream=True, starting_after=seen[-1].sequence_number))
    whole = list(client.responses.retrieve(name, stream=True))
    assert [event.to_dict() for event in [*seen, *rest]] == [event.to_dict() for event in whole]
    assert [event.sequence_number for event in whole] == list(range(len(whole)))
    assert [event.type for event in whole[:3]] == ["response.created", "response.queued", "response.in_progress"]
    text = "".join(event.delta for event in whole if event.type == "response.output_text.delta")
    assert text == client.responses.retrieve(name).output_text == whole[-1].response.output_text  # type: ignore[union-attr]
    for after in range(0, len(whole) - 1, 7):
        part = client.responses.retrieve(name, stream=True, starting_after=after)
        assert [event.sequence_number for event in part] == list(range(after + 1, len(whole)))


def test_a_takeover_in_mid_stream_is_not_seen(door: Door):
    client = door.openai()
    asked: Any = {"model": "toy", "input": "killed", "max_output_tokens": 120, "temperature": 0}
    expected = client.responses.create(**asked).output_text
    text, name = "", ""
    numbers = []
    killed = False
    for event in client.responses.create(**asked, background=True, stream=True):
        numbers.append(event.sequence_number)
        if event.type == "response.created":
            name = event.response.id
        if event.type == "response.output_text.delta":
            text += event.delta
            if not killed:
                killed = True
                door.pool.kill(door.pool.worker_of(name.removeprefix("resp_")))
    assert text == expected
    assert numbers == list(range(len(numbers)))
    assert door.pool.follow(name.removeprefix("resp_")).moves == ["worker_lost"]
    door.pool.wait_ready()


def test_cancel_ends_a_running_and_a_waiting_response_and_is_idempotent(door: Door):
    client = door.openai()
    running = client.responses.create(model="toy", input="hello", max_output_tokens=3000, background=True)
    wait_for(lambda: client.responses.retrieve(running.id).status == "in_progress", "a worker")
    for _ in range(2):
        assert client.responses.cancel(running.id).status == "cancelled"
    busy = [
        client.responses.create(model="toy", input=f"busy {number}", max_output_tokens=3000, background=True)
        for number in range(3)
    ]
    waiting = busy[-1]
    assert client.responses.retrieve(waiting.id).status == "queued"
    cancelled = client.responses.cancel(waiting.id)
    assert (cancelled.status, cancelled.output) == ("cancelled", [])
    for other in busy[:2]:
        assert client.responses.cancel(other.id).status == "cancelled"
    done = client.responses.create(model="toy", input="hello", max_output_tokens=3)
    assert client.responses.cancel(done.id).status == "incomplete"
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_01AAAAAAAAAAAAAAAAAAAAAAAA")


def test_a_stream_of_a_cancelled_response_ends_as_failed(door: Door):
    client = door.openai()
    last: Any = None
    for event in client.responses.create(
        model="toy", input="hello", max_output_tokens=3000, background=True, stream=True
    ):
        if event.sequence_number == 20:
            name = door.pool.redis and last
            assert name
            client.responses.cancel(name)
        if event.type == "response.created":
            last = event.response.id
    assert event.type == "response.failed"
    assert event.response.status == "cancelled"


@pytest.mark.parametrize("value", ["abc", "-1", "1.5", "", "99999", "1e3", "9" * 30, "٣"])
def test_a_bad_cursor_is_an_error_and_never_the_beginning(door: Door, value: str):
    client = door.openai()
    done = client.responses.create(model="toy", input="hello", max_output_tokens=4)
    with door.http() as http:
        answer = http.get(f"/v1/responses/{done.id}", params={"stream": "true", "starting_after": value})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_cursor"


@pytest.mark.parametrize("value", ["abc", "1", "-", "1-", "0-5", "1-999", "7-2", "1-2-3", "1_2", "01-2"])
def test_a_bad_last_event_id_is_an_error_and_never_the_beginning(door: Door, value: str):
    done = door.openai().responses.create(model="toy", input="hello", max_output_tokens=4)
    with door.http() as http:
        answer = http.get(f"/v1/responses/{done.id}?stream=true", headers={"Last-Event-ID": value})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_cursor"


def test_a_last_event_id_goes_on_after_that_event(door: Door):
    done = door.openai().responses.create(model="toy", input="hello", max_output_tokens=20)
    with door.http() as http:
        with http.stream("GET", f"/v1/responses/{done.id}?stream=true") as response:
            whole = list(frames(response))
        for at, (name, _) in enumerate(whole):
            if not name or at % 5:
                continue
            headers = {"Last-Event-ID": name}
            with http.stream("GET", f"/v1/responses/{done.id}?stream=true", headers=headers) as response:
                rest = list(frames(response))
            assert rest == whole[at + 1 :]


def test_starting_after_without_a_stream_and_other_flags_are_refused(door: Door):
    done = door.openai().responses.create(model="toy", input="hello", max_output_tokens=4)
    with door.http() as http:
        assert http.get(f"/v1/responses/{done.id}?starting_after=2").status_code == 400
        assert http.get(f"/v1/responses/{done.id}?stream=maybe").status_code == 400


def test_a_stream_whose_log_has_expired_is_an_error_and_the_result_is_still_there(door: Door):
    client = door.openai()
    done = client.responses.create(model="toy", input="hello", max_output_tokens=8)
    door.pool.redis.delete(f"prism:r:{done.id.removeprefix('resp_')}:log")
    for extra in ({}, {"starting_after": 3}):
        with pytest.raises(openai.NotFoundError) as caught:
            list(client.responses.retrieve(done.id, stream=True, **extra))  # type: ignore[call-overload]
        assert caught.value.code == "stream_lost"
    assert client.responses.retrieve(done.id).output_text == done.output_text


def test_a_response_goes_on_from_an_earlier_one(parrot: Door):
    client = parrot.openai()
    first = client.responses.create(model="toy", input="one", instructions="first rules")
    second = client.responses.create(
        model="toy", input=[{"role": "user", "content": "two"}], previous_response_id=first.id, instructions="second"
    )
    assert (first.output_text, second.output_text) == ("one", "two")
    assert second.previous_response_id == first.id
    items: Any = client.responses.input_items.list(second.id).data
    texts = [item.content[0].text for item in items]
    assert texts == ["second", "one", "one", "two"]
    branch = client.responses.create(model="toy", input="three", previous_response_id=first.id)
    assert [item.content[0].text for item in client.responses.input_items.list(branch.id).data] == [  # type: ignore[union-attr]
        "one",
        "one",
        "three",
    ]


def test_what_cannot_be_gone_on_from_is_refused(door: Door):
    client = door.openai()
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="toy", input="x", previous_response_id="resp_unknown")
    running = client.responses.create(model="toy", input="hello", max_output_tokens=3000, background=True)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="toy", input="x", previous_response_id=running.id)
    client.responses.cancel(running.id)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="toy", input="x", previous_response_id=running.id, conversation="c")
    chat = client.chat.completions.create(model="toy", messages=[{"role": "user", "content": "x"}], max_tokens=2)
    for name in (chat.id, chat.id.removeprefix("chatcmpl-")):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(name)


def test_a_conversation_remembers_and_instructions_hold_for_one_response(parrot: Door):
    client = parrot.openai()
    asked: Any = {"model": "toy", "conversation": "talk"}
    client.responses.create(**asked, input="one")
    second = client.responses.create(**asked, input="two", instructions="rules")
    third = client.responses.create(**asked, input="three")
    assert second.conversation is not None
    assert second.conversation.id == "talk"
    assert (second.output_text, third.output_text) == ("two", "three")
    usage = [client.responses.retrieve(one.id).usage for one in (second, third)]
    assert usage[0] is not None
    assert usage[1] is not None
    assert usage[1].input_tokens > usage[0].input_tokens
    header = client.responses.create(model="toy", input="four", extra_headers={"X-Prism-Conversation": "talk"})
    assert header.usage is not None
    assert header.usage.input_tokens > usage[1].input_tokens


def test_a_request_that_cannot_run_is_a_status_or_a_failed_background_response(door: Door):
    client = door.openai()
    long = "x" * 5000
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model="toy", input=long, stream=stream)
    made = client.responses.create(model="toy", input=long, background=True)
    done = finished(client, made.id)
    assert (done.status, done.error.code) == ("failed", "invalid_prompt")
    assert "context_tokens" in done.error.message


def test_a_background_response_whose_reader_vanishes_at_once_is_done_all_the_same(door: Door):
    body = {"model": "toy", "input": "hello", "max_output_tokens": 30, "background": True, "stream": True}
    raw = Raw(door, "/v1/responses", body)
    name = json.loads(raw.read_until("response.created").split("data: ", 1)[1].split("\n")[0])["response"]["id"]
    raw.vanish()
    assert finished(door.openai(), name).status == "incomplete"


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"inputs": "x"}, "inputs"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": []}, "input"),
        ({"metadata": {"a": 5}}, "metadata"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"conversation": "a b"}, "conversation"),
    ],
)
def test_what_this_pool_has_not_is_refused_by_name(door: Door, extra: dict[str, Any], param: str):
    with door.http() as http:
        answer = http.post("/v1/responses", json={"model": "toy", "input": "x", **extra})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
