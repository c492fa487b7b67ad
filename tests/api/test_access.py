"""Keys, owners, limits, and every error as OpenAI's client knows it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from broker import keys
from tests.api.door import Door, Raw, body_of
from tests.pool import FAST, Pool, wait_for

KEYS = ("key-of-ann", "key-of-bob")
HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def guarded(toy_pool: Pool) -> Iterator[Door]:
    """A gateway that asks for a key."""
    with Door(toy_pool, api_keys=KEYS, max_body_bytes=20_000, max_message_bytes=5_000) as door:
        yield door


def test_without_a_key_or_with_a_wrong_one_nothing_is_answered(guarded: Door):
    with pytest.raises(openai.AuthenticationError) as caught:
        guarded.openai("key-of-eve").models.list()
    assert caught.value.code == "invalid_api_key"
    with guarded.http() as http:
        for path in ("/v1/models", "/v1/responses/resp_x", "/pool", "/nowhere"):
            answer = http.get(path)
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["type"] == "authentication_error"
        for header in ("key-of-ann", "Basic key-of-ann", "Bearer", "Bearer key-of-ann key-of-bob"):
            assert http.get("/v1/models", headers={"Authorization": header}).status_code == 401, header
        for path in ("/livez", "/readyz", "/health", "/version", "/", "/static/app.js", "/metrics"):
            assert http.get(path).status_code == 200, path
    assert [model.id for model in guarded.openai(KEYS[0]).models.list()] == ["toy"]


def test_one_keys_responses_are_another_keys_not_found(guarded: Door):
    ann, bob = (guarded.openai(key) for key in KEYS)
    made = ann.responses.create(model="toy", input="hello", max_output_tokens=2000, background=True)
    for act in (
        lambda: bob.responses.retrieve(made.id),
        lambda: list(bob.responses.retrieve(made.id, stream=True)),
        lambda: bob.responses.cancel(made.id),
        lambda: bob.responses.input_items.list(made.id),
        lambda: bob.responses.create(model="toy", input="x", previous_response_id=made.id),
    ):
        with pytest.raises(openai.NotFoundError):
            act()
    assert ann.responses.retrieve(made.id).status in ("queued", "in_progress")
    assert ann.responses.cancel(made.id).status == "cancelled"


def test_two_keys_conversations_and_idempotency_keys_of_one_name_never_meet(guarded: Door):
    headers = {"X-Prism-Conversation": "shared-name", "Idempotency-Key": "shared-key"}
    done = []
    for key in KEYS:
        done.append(
            guarded.openai(key).chat.completions.with_raw_response.create(
                model="toy", messages=HELLO, max_tokens=5, extra_headers=headers
            )
        )
    assert all("idempotency-replayed" not in answer.headers for answer in done)
    assert all(answer.headers["x-prism-route"] == "new" for answer in done)
    assert len({answer.parse().id for answer in done}) == 2
    assert len({usage.prompt_tokens for answer in done if (usage := answer.parse().usage)}) == 1


def test_the_key_itself_is_stored_nowhere_in_the_broker(guarded: Door):
    guarded.openai(KEYS[0]).chat.completions.create(model="toy", messages=HELLO, max_tokens=2)
    owner = keys.owner_of(KEYS[0])
    seen = False
    for name in guarded.pool.redis.scan_iter(count=1000):
        kind = guarded.pool.redis.type(name)
        values = {b"hash": guarded.pool.redis.hgetall, b"string": guarded.pool.redis.get}.get(kind)
        text = name + repr(values(name)).encode() if values else name
        assert KEYS[0].encode() not in text
        seen = seen or owner.encode() in text
    assert seen


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"{", {}, 400, "invalid_json"),
        (b"", {}, 400, "invalid_json"),
        (b"\xff\xfe", {}, 400, "invalid_json"),
        (b'{"messages": NaN}', {}, 400, "invalid_json"),
        (b"[" * 100_00, {}, 400, "invalid_json"),
        (b"1" * 10_000, {}, 400, "invalid_json"),
        (b"[]", {}, 400, "invalid_value"),
        (b"null", {}, 400, "invalid_value"),
        (b'"x"', {}, 400, "invalid_value"),
        (b"{}", {"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
        (b"{}", {"Content-Type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type"),
        (b"x" * 20_001, {}, 413, "request_too_large"),
    ],
)
def test_a_body_that_is_none_is_one_clear_error(guarded: Door, body: bytes, headers: Any, status: int, code: str):
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        with guarded.http(KEYS[0]) as http:
            answer = http.post(path, content=body, headers={"Content-Type": "application/json", **headers})
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error["code"] == code
        assert set(error) == {"message", "type", "param", "code"}


def test_a_body_in_chunks_is_cut_at_the_limit_too(guarded: Door):
    def parts() -> Iterator[bytes]:
        for _ in range(30):
            yield b"x" * 1000

    with guarded.http(KEYS[0]) as http:
        answer = http.post("/v1/chat/completions", content=parts(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413


def test_a_body_that_never_ends_is_given_up(toy_pool: Pool):
    with Door(toy_pool, read_timeout_s=0.3) as door, socket.create_connection(("127.0.0.1", door.server.port)) as raw:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        raw.sendall((head + "Content-Length: 50\r\n\r\n{").encode())
        raw.settimeout(10)
        assert b" 408 " in raw.recv(4096)


def test_a_connection_that_asks_nothing_is_closed(toy_pool: Pool):
    with Door(toy_pool, read_timeout_s=0.2) as door, socket.create_connection(("127.0.0.1", door.server.port)):
        wait_for(lambda: door.server.connections == 1, "the connection")
        wait_for(lambda: door.server.connections == 0, "the connection to be gone")


def test_addresses_and_methods_that_are_not_there_have_openais_errors_too(guarded: Door):
    with guarded.http(KEYS[0]) as http:
        for method, path, status in (
            ("GET", "/v1/nothing", 404),
            ("GET", "/v1/chat/completions", 405),
            ("DELETE", "/v1/models", 405),
            ("GET", "/static/../server.py", 404),
            ("GET", "/static/server.py", 404),
        ):
            answer = http.request(method, path)
            assert answer.status_code == status, path
            assert answer.json()["error"]["type"] == "invalid_request_error"


def test_an_unknown_model_is_not_found(guarded: Door):
    client = guarded.openai(KEYS[0])
    for model in ("gpt-6", "x+y", "toy "):
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model=model, messages=HELLO)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-6")
    assert client.models.retrieve("toy").id == "toy"


def test_errors_of_values_are_openais_bad_request(guarded: Door):
    with pytest.raises(openai.BadRequestError) as caught:
        guarded.openai(KEYS[0]).chat.completions.create(model="toy", messages=HELLO, temperature=5)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as caught:
        guarded.openai(KEYS[0]).chat.completions.create(model="toy", messages=HELLO, extra_body={"tempo": 5})
    assert (caught.value.param, caught.value.code) == ("tempo", "unknown_parameter")
    with pytest.raises(openai.BadRequestError, match="the limit is 5000"):
        guarded.openai(KEYS[0]).chat.completions.create(model="toy", messages=[{"role": "user", "content": "x" * 6000}])


def test_every_answer_bears_a_request_id_and_a_given_one_is_kept(guarded: Door):
    client = guarded.openai(KEYS[0])
    done = client.chat.completions.create(model="toy", messages=HELLO, max_tokens=2)
    assert done._request_id is not None
    assert done._request_id.startswith("req_")
    given = client.chat.completions.create(
        model="toy", messages=HELLO, max_tokens=2, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert given._request_id == "mine-1"
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="none", messages=HELLO)
    assert caught.value.request_id is not None
    with guarded.http() as http:
        assert http.get("/v1/models", headers={"X-Request-Id": "bad id"}).headers["x-request-id"].startswith("req_")


def test_a_key_that_asks_too_often_is_told_when_to_come_back(toy_pool: Pool):
    with Door(toy_pool, api_keys=KEYS, requests_per_minute=6, burst=2) as door:
        client = door.openai(KEYS[0])
        made = [
            client.responses.create(model="toy", input="hello", max_output_tokens=2, background=True) for _ in range(2)
        ]
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model="toy", messages=HELLO)
        assert 8 <= int(caught.value.response.headers["retry-after"]) <= 10
        assert caught.value.code == "rate_limit_exceeded"
        client.models.list()
        client.responses.cancel(made[0].id)
        door.openai(KEYS[1]).chat.completions.create(model="toy", messages=HELLO, max_tokens=2)


def test_a_full_queue_is_told_with_a_time_to_try_again(tmp_path_factory: pytest.TempPathFactory):
    with (
        Pool(
            tmp_path_factory.mktemp("q"), 1, model="toy?step_s=0.01", pool={**FAST, "max_open": 2, "max_open_batch": 1}
        ) as pool,
        Door(pool, disconnect_grace_s=0.1) as door,
    ):
        client = door.openai()
        made = [
            client.responses.create(model="toy", input="hello", max_output_tokens=3000, background=True)
            for _ in range(2)
        ]
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model="toy", messages=HELLO)
        assert (caught.value.code, caught.value.response.headers["retry-after"]) == ("queue_full", "1")
        client.responses.cancel(made[0].id)
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(model="toy", messages=HELLO, n=3, max_tokens=2000)
        client.responses.cancel(made[1].id)
        wait_for(lambda: not pool.redis.zcard("prism:live"), "what was left of the refused request to be cancelled")


def test_a_broker_that_is_away_is_a_503_and_the_gateway_outlives_it(tmp_path_factory: pytest.TempPathFactory):
    with Pool(tmp_path_factory.mktemp("b"), 1, model="toy?step_s=0.004", pool=FAST) as pool, Door(pool) as door:
        client = door.openai()
        client.chat.completions.create(model="toy", messages=HELLO, max_tokens=2)
        pool.broker.kill()
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model="toy", messages=HELLO, max_tokens=2)
        assert (caught.value.status_code, caught.value.code) == (503, "broker_unavailable")
        assert str(pool.broker.socket) not in caught.value.message
        with door.http() as http:
            assert http.get("/livez").status_code == 200
            assert http.get("/readyz").status_code == 503
            assert http.get("/health").status_code == 503
        assert door.metric("prism_broker_up") == 0
        pool.broker.start()
        wait_for(lambda: door.metric("prism_broker_up") == 1, "the broker")
        done = client.with_options(max_retries=5).chat.completions.create(model="toy", messages=HELLO, max_tokens=2)
        assert done.choices[0].finish_reason == "length"


def test_a_name_that_points_here_from_elsewhere_is_not_answered_without_keys(door: Door, guarded: Door):
    with door.http() as http:
        for host in ("evil.example", "evil.example:80", "", "127.0.0.1.evil.example"):
            answer = http.get("/v1/models", headers={"Host": host})
            assert answer.status_code == 403, host
            assert http.get("/", headers={"Host": host}).status_code == 403
        for host in ("localhost", "localhost:1", "127.0.0.1:99", "[::1]:5"):
            assert http.get("/v1/models", headers={"Host": host}).status_code == 200, host
    with guarded.http(KEYS[0]) as http:
        assert http.get("/v1/models", headers={"Host": "gateway.example"}).status_code == 200


def test_nothing_that_is_no_http_stops_the_gateway(door: Door):
    for data in (b"\x00" * 100, b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nHost: " + b"x" * 70_000):
        with socket.create_connection(("127.0.0.1", door.server.port)) as raw:
            raw.sendall(data)
            raw.settimeout(10)
            raw.recv(4096)
    Raw(door, "/v1/chat/completions", body_of(max_tokens=2)).read_until("HTTP/1.1 200 ")
