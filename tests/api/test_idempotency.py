"""A request sent again under its key: one generation, the same answer, also to a reader who has a part of it."""

from __future__ import annotations

import threading
from typing import Any

import openai
import pytest

from tests.api.door import Door, Raw, body_of, frames
from tests.pool import FAST, Pool, wait_for


def post(door: Door, key: str, body: dict[str, Any], path: str = "/v1/chat/completions", **headers: str) -> Any:
    with door.http() as http:
        return http.post(path, json=body, headers={"Idempotency-Key": key, **headers})


def submitted(door: Door) -> int:
    return int(door.pool.redis.hget("prism:stats", "submitted") or 0)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_the_same_key_and_body_are_one_generation(door: Door, path: str):
    bodies = {
        "/v1/chat/completions": body_of(seed=None),
        "/v1/completions": {"model": "toy", "prompt": "x"},
        "/v1/responses": {"model": "toy", "input": "x", "max_output_tokens": 9},
    }
    body = bodies[path]
    before = submitted(door)
    answers = [post(door, f"same {path}", body, path) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert [answer.headers.get("idempotency-replayed") for answer in answers] == [None, "true", "true"]
    assert answers[0].json() == answers[1].json() == answers[2].json()
    assert submitted(door) == before + 1


def test_another_body_under_a_used_key_is_a_conflict_that_is_not_tried_again(door: Door):
    first = body_of()
    assert post(door, "other body", first).status_code == 200
    for change in ({"max_tokens": 11}, {"user": "somebody else"}, {"stream": True}, {"temperature": 0.1}):
        answer = post(door, "other body", {**first, **change})
        assert answer.status_code == 409
        assert answer.headers["x-should-retry"] == "false"
    with pytest.raises(openai.ConflictError):
        door.openai(max_retries=2).chat.completions.create(
            model="toy",
            messages=[{"role": "user", "content": "other"}],
            extra_headers={"Idempotency-Key": "other body"},
        )
    reordered = dict(reversed(list(first.items())))
    assert post(door, "other body", reordered).status_code == 200


def test_many_at_once_with_one_key_are_one_generation(door: Door):
    before = submitted(door)
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(post(door, "race", body_of(seed=None)))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({answer.json()["choices"][0]["message"]["content"] for answer in answers}) == 1
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert submitted(door) == before + 1


def test_several_choices_are_repeated_together(door: Door):
    body = body_of(n=3, seed=None)
    one, two = post(door, "three", body), post(door, "three", body)
    assert one.json() == two.json()
    assert two.headers["idempotency-replayed"] == "true"


def test_a_stream_cut_in_the_middle_goes_on_after_the_last_event_id(door: Door):
    body = body_of(max_tokens=60, stream=True, seed=None)
    whole_text, first_part, last_id = "", "", ""
    with door.http() as http:
        headers = {"Idempotency-Key": "cut"}
        with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            for name, data in frames(response):
                first_part += data["choices"][0]["delta"].get("content") or ""
                last_id = name or last_id
                if len(first_part) > 10 and name:
                    break
        with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            assert response.headers["idempotency-replayed"] == "true"
            for _, data in frames(response):
                if data != "[DONE]":
                    whole_text += data["choices"][0]["delta"].get("content") or ""
        rest = ""
        headers["Last-Event-ID"] = last_id
        with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            for _, data in frames(response):
                if data != "[DONE]":
                    rest += data["choices"][0]["delta"].get("content") or ""
    assert first_part + rest == whole_text
    assert rest


@pytest.mark.parametrize("value", ["x", "1", "9-9", "1-900", "1-3-5", "00-1"])
def test_a_malformed_or_foreign_last_event_id_is_an_error_and_never_the_beginning(door: Door, value: str):
    body = body_of(stream=True)
    assert post(door, f"cursor {value}", body).status_code == 200
    answer = post(door, f"cursor {value}", body, **{"Last-Event-ID": value})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_cursor"


def test_a_last_event_id_without_a_key_starts_nothing(door: Door):
    before = submitted(door)
    with door.http() as http:
        answer = http.post("/v1/chat/completions", json=body_of(stream=True), headers={"Last-Event-ID": "1-1"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_cursor")
    assert submitted(door) == before


def test_a_last_event_id_under_a_key_that_nobody_used_is_an_error_and_generates_nothing(door: Door):
    answer = post(door, "never used", body_of(stream=True, max_tokens=3000), **{"Last-Event-ID": "1-1"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_cursor")
    wait_for(lambda: door.pool.redis.zcard("prism:live") == 0, "the request to be cancelled")


def test_a_failed_request_fails_again_the_same_way(door: Door):
    body = body_of(messages=[{"role": "user", "content": "x" * 5000}])
    for stream in (False, True):
        answers = [post(door, f"fails {stream}", {**body, "stream": stream}) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [400, 400]
        assert answers[0].json() == answers[1].json()


@pytest.mark.parametrize("key", ["", "x" * 201])
def test_a_key_that_is_none_is_refused(door: Door, key: str):
    assert post(door, key, body_of()).status_code == 400


def test_a_retry_after_the_log_has_expired_gets_the_answer_from_the_record(door: Door):
    body = body_of(max_tokens=20)
    first = post(door, "expired", body).json()
    request = first["id"].removeprefix("chatcmpl-")
    door.pool.redis.delete(f"prism:r:{request}:log")
    again = post(door, "expired", body)
    assert again.headers["idempotency-replayed"] == "true"
    assert again.json()["choices"] == first["choices"]
    assert again.json()["usage"] == first["usage"]


def test_a_client_that_comes_back_in_its_grace_keeps_its_request(door: Door):
    body = body_of(max_tokens=250, stream=True)
    headers = {"Idempotency-Key": "comes back"}
    first = Raw(door, "/v1/chat/completions", body, headers)
    request = first.read_until('"content"').split("chatcmpl-", 1)[1][:26]
    second = Raw(door, "/v1/chat/completions", body, headers)
    second.read_until('"content"')
    first.vanish()
    wait_for(
        lambda: door.gateway.departures.pending == 0 and door.gateway.metrics.open_streams == 1, "the grace to end"
    )
    second.read_until("[DONE]")
    assert door.pool.follow(request).state == "done"
    third = Raw(door, "/v1/chat/completions", {**body, "seed": 2}, {"Idempotency-Key": "goes for good"})
    request = third.read_until('"content"').split("chatcmpl-", 1)[1][:26]
    third.vanish()
    assert door.pool.follow(request).state == "cancelled"


def test_a_request_of_several_choices_that_found_half_a_place_is_completed_by_its_retry(
    tmp_path_factory: pytest.TempPathFactory,
):
    limits = {**FAST, "max_open": 2, "max_open_batch": 1}
    with (
        Pool(tmp_path_factory.mktemp("h"), 1, model="toy?step_s=0.004", pool=limits) as pool,
        Door(pool, disconnect_grace_s=2.0) as door,
    ):
        blocker = door.openai().responses.create(model="toy", input="x", max_output_tokens=3000, background=True)
        body = body_of(n=2, max_tokens=30)
        assert post(door, "half", body).status_code == 429
        door.openai().responses.cancel(blocker.id)
        again = post(door, "half", body)
        assert again.status_code == 200
        assert [choice["finish_reason"] for choice in again.json()["choices"]] == ["length"] * 2
        wait_for(lambda: door.gateway.departures.pending == 0, "the grace of the refused call to end")
        assert pool.redis.hget("prism:stats", "ended.cancelled") == b"1"
