"""`/v1/batches` through OpenAI's unmodified client: create, follow, cancel, and what may be wrong."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from broker.batch import service as service_module
from broker.batch.shelf import Shelf
from tests.api.door import Door
from tests.pool import Pool, wait_for

CHAT = "/v1/chat/completions"
FINAL = ("completed", "failed", "cancelled", "expired")
KEYS = ("carol-key", "dave-key")


def line(custom_id: str, text: str = "hello", **body: Any) -> str:
    body = {"model": "toy", "messages": [{"role": "user", "content": text}], "max_tokens": 6, "seed": 1, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body})


def made(client: openai.OpenAI, lines: list[str], **options: Any) -> Any:
    source = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    given: dict[str, Any] = {"endpoint": CHAT, "completion_window": "24h", **options}
    return client.batches.create(input_file_id=source.id, **given)


def over(client: openai.OpenAI, name: str) -> Any:
    def look() -> Any:
        batch = client.batches.retrieve(name)
        return batch if batch.status in FINAL else None

    return wait_for(look, f"the end of {name}", 60)


def rows(client: openai.OpenAI, file: str | None) -> list[dict[str, Any]]:
    return [json.loads(row) for row in client.files.content(file).text.splitlines()] if file else []


def test_a_batch_gives_the_answers_that_single_requests_give(door: Door) -> None:
    client = door.openai()
    batch = made(client, [line(f"c{number}", f"question {number}") for number in range(12)], metadata={"for": "test"})
    assert (batch.object, batch.status, batch.endpoint, batch.completion_window) == (
        *("batch", "validating", CHAT),
        "24h",
    )
    assert batch.metadata == {"for": "test"}
    assert batch.output_file_id is None
    done = over(client, batch.id)
    assert done.status == "completed"
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (12, 12, 0)
    assert done.error_file_id is None
    assert done.usage.output_tokens == 72
    assert done.model == "toy"
    assert done.in_progress_at <= done.finalizing_at <= done.completed_at
    output = {row["custom_id"]: row for row in rows(client, done.output_file_id)}
    assert set(output) == {f"c{number}" for number in range(12)}
    for number in (0, 7):
        single = client.chat.completions.create(
            model="toy", messages=[{"role": "user", "content": f"question {number}"}], max_tokens=6, seed=1
        )
        answer = output[f"c{number}"]["response"]
        assert answer["status_code"] == 200
        assert answer["body"]["choices"][0]["message"]["content"] == single.choices[0].message.content
    described = client.files.retrieve(done.output_file_id)
    assert (described.purpose, described.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert batch.id in [one.id for one in client.batches.list(limit=3)]


def test_log_probabilities_and_several_answers_come_through(door: Door) -> None:
    client = door.openai()
    done = over(client, made(client, [line("a", n=2, logprobs=True, top_logprobs=2)]).id)
    (row,) = rows(client, done.output_file_id)
    choices = row["response"]["body"]["choices"]
    assert len(choices) == 2
    for choice in choices:
        entries = choice["logprobs"]["content"]
        assert len(entries) == 6
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


def test_completions_have_an_endpoint_of_their_own(door: Door) -> None:
    client = door.openai()
    body = {"model": "toy", "prompt": "once", "max_tokens": 5}
    text = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body})
    done = over(client, made(client, [text], endpoint="/v1/completions").id)
    assert rows(client, done.output_file_id)[0]["response"]["body"]["object"] == "text_completion"


def test_a_file_with_bad_lines_fails_whole_and_names_them(door: Door) -> None:
    client = door.openai()
    lines = [line("a"), "{", line("a"), line("b", temperature=7), line("c", model="gpt-4o")]
    done = over(client, made(client, lines).id)
    assert done.status == "failed"
    assert done.failed_at
    found = [(error.line, error.code) for error in done.errors.data]
    assert found == [(2, "invalid_json"), (3, "duplicate_custom_id"), (4, "invalid_value")]
    assert done.output_file_id is None
    assert done.error_file_id is None


def test_a_model_that_the_pool_never_ran_fails_the_batch_with_its_line(door: Door) -> None:
    client = door.openai()
    done = over(client, made(client, [line("a"), line("b", model="gpt-4o")]).id)
    (error,) = done.errors.data
    assert (done.status, error.line, error.code) == ("failed", 2, "model_not_found")


def test_lines_that_the_pool_refuses_are_in_the_error_file(door: Door) -> None:
    client = door.openai()
    done = over(client, made(client, [line("a"), line("long", "x" * 20_000), line("b")]).id)
    assert done.status == "completed"
    assert (done.request_counts.completed, done.request_counts.failed) == (2, 1)
    (error,) = rows(client, done.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"]) == ("long", 400)
    assert error["response"]["body"]["error"]["code"] == "context_length_exceeded"


def test_a_cancelled_batch_keeps_what_it_has(door: Door) -> None:
    client = door.openai()
    batch = made(client, [line(f"c{number}", max_tokens=100) for number in range(60)])
    partial = batch.partial_output_file_id

    def two_lines() -> bool:
        try:
            return len(rows(client, partial)) >= 2
        except openai.NotFoundError:
            return False

    wait_for(two_lines, "two answers to be readable while it runs")
    cancelling = client.batches.cancel(batch.id)
    assert cancelling.status == "cancelling"
    assert cancelling.cancelling_at
    done = over(client, batch.id)
    assert done.status == "cancelled"
    assert done.cancelled_at
    assert client.batches.cancel(batch.id).status == "cancelled"
    output, errors = rows(client, done.output_file_id), rows(client, done.error_file_id)
    assert len(output) >= 2
    assert Counter(row["custom_id"] for row in [*output, *errors]) == Counter(f"c{number}" for number in range(60))
    assert {row["error"]["code"] for row in errors} == {"batch_cancelled"}
    assert done.request_counts.completed == len(output)
    assert done.request_counts.failed == len(errors)


def test_a_batch_that_is_over_cannot_be_cancelled(door: Door) -> None:
    client = door.openai()
    done = over(client, made(client, [line("a")]).id)
    with pytest.raises(openai.ConflictError, match="completed"):
        client.batches.cancel(done.id)


def test_a_batch_whose_time_is_over_expires_with_what_it_has(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    client = door.openai()
    make = service_module.Job

    def hasty(*args: Any, **options: Any) -> Any:
        return make(*args, **{**options, "expires_at": options["expires_at"] - 24 * 3600 + 1.0})

    monkeypatch.setattr(service_module, "Job", hasty)
    done = over(client, made(client, [line(f"c{number}", max_tokens=400) for number in range(40)]).id)
    assert done.status == "expired"
    assert done.expired_at
    output, errors = rows(client, done.output_file_id), rows(client, done.error_file_id)
    assert Counter(row["custom_id"] for row in [*output, *errors]) == Counter(f"c{number}" for number in range(40))
    assert {row["error"]["code"] for row in errors} == {"batch_expired"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint must be"),
        ({"completion_window": "1d"}, "completion_window must be"),
        ({"completion_window": "0h"}, "completion_window must be"),
        ({"completion_window": "169h"}, "completion_window must be"),
        ({"metadata": {"a": 1}}, "metadata must hold strings"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata has 17 entries"),
        ({"metadata": {"a": "x" * 513}}, "512 characters"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "from 3600"),
        ({"colour": "red"}, "Unknown parameter: 'colour'"),
        ({"input_file_id": None}, "input_file_id is required"),
    ],
)
def test_what_is_wrong_with_a_batch_is_told_before_it_is_made(door: Door, change: dict[str, Any], text: str) -> None:
    client = door.openai()
    before = [batch.id for batch in client.batches.list()]
    source = client.files.create(file=("in.jsonl", line("a").encode()), purpose="batch")
    body = {"input_file_id": source.id, "endpoint": CHAT, "completion_window": "24h", **change}
    with door.http() as http:
        answer = http.post("/v1/batches", json=body)
    assert answer.status_code == 400
    assert text in answer.json()["error"]["message"]
    assert [batch.id for batch in client.batches.list()] == before
    client.files.delete(source.id)


def test_files_that_are_absent_or_are_outputs_are_no_input(door: Door) -> None:
    client = door.openai()
    with pytest.raises(openai.NotFoundError, match="No such File"):
        client.batches.create(input_file_id="file-x", endpoint=CHAT, completion_window="24h")
    done = over(client, made(client, [line("a")]).id)
    with pytest.raises(openai.BadRequestError, match="purpose 'batch_output'"):
        client.batches.create(input_file_id=done.output_file_id, endpoint=CHAT, completion_window="24h")
    for name in ("batch_x", "..", "batch_" + "0" * 26):
        with door.http() as http:
            assert http.get(f"/v1/batches/{name}").status_code == 404
            assert http.post(f"/v1/batches/{name}/cancel").status_code == 404


def test_an_input_in_use_is_kept(door: Door) -> None:
    client = door.openai()
    batch = made(client, [line(f"c{number}", max_tokens=200) for number in range(20)])
    with pytest.raises(openai.ConflictError, match="cancel that first"):
        client.files.delete(batch.input_file_id)
    client.batches.cancel(batch.id)
    over(client, batch.id)
    assert client.files.delete(batch.input_file_id).deleted


def test_a_repeated_create_with_the_same_key_is_one_batch(door: Door) -> None:
    client = door.openai()
    source = client.files.create(file=("in.jsonl", line("a").encode()), purpose="batch")
    given: dict[str, Any] = {"input_file_id": source.id, "endpoint": CHAT, "completion_window": "24h"}
    headers = {"Idempotency-Key": "once"}
    first = client.batches.create(**given, extra_headers=headers)
    again = client.batches.with_raw_response.create(**given, extra_headers=headers)
    assert again.parse().id == first.id
    assert again.headers["idempotency-replayed"] == "true"
    with pytest.raises(openai.ConflictError):
        client.batches.create(**{**given, "metadata": {"a": "b"}}, extra_headers=headers)
    over(client, first.id)


@pytest.fixture(scope="module")
def keyed(toy_pool: Pool) -> Iterator[Door]:
    with Door(toy_pool, api_keys=KEYS) as door:
        yield door


def test_owners_see_only_their_own_batches(keyed: Door) -> None:
    carol, dave = (keyed.openai(key) for key in KEYS)
    begun = made(carol, [line("a")])
    batch = over(carol, begun.id)
    assert [one.id for one in dave.batches.list()] == []
    for call in (dave.batches.retrieve, dave.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call(batch.id)
    assert begun.partial_output_file_id == batch.output_file_id
    with pytest.raises(openai.NotFoundError):
        dave.files.content(batch.output_file_id)
    request = rows(carol, batch.output_file_id)[0]["response"]["request_id"]
    with keyed.http(KEYS[1]) as http:
        assert http.get(f"/v1/responses/resp_{request}").status_code == 404


def test_lists_come_in_pages_newest_first(keyed: Door) -> None:
    client = keyed.openai(KEYS[1])
    names = [made(client, [line("a")]).id for _ in range(3)]
    assert [batch.id for batch in client.batches.list(limit=2)] == names[::-1]
    assert [batch.id for batch in client.batches.list(limit=1, after=names[2]).data] == [names[1]]
    with pytest.raises(openai.BadRequestError, match="limit"):
        client.batches.list(limit=101)
    for name in names:
        over(client, name)


def test_when_all_is_over_nothing_is_active_and_no_part_is_left(door: Door) -> None:
    over(door.openai(), made(door.openai(), [line("a")]).id)
    shelf = Shelf.of(door.config, door.pool.broker.url)
    wait_for(lambda: shelf.active() == [], "the end of every batch")
    assert not list(shelf.root.glob("files/*/*.part"))
