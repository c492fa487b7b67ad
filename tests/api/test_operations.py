"""What operators see: models, health, metrics that agree with the clients, logs without text, a clean stop."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from broker.gateway.metrics import exported_names
from tests.api.door import Door, Raw, body_of, gateway_process
from tests.pool import FAST, ROOT, Pool, wait_for

HELLO: Any = [{"role": "user", "content": "hello"}]
DESIGNED = (
    *("num_requests_running", "num_requests_waiting", "prompt_tokens_total", "generation_tokens_total"),
    *("request_success_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket"),
    *("e2e_request_latency_seconds_bucket", "request_queue_time_seconds_bucket", "kv_cache_usage_ratio"),
    *("saved_prefixes", "workers", "takeovers_total", "fenced_writes_total", "cancel_latency_seconds_sum"),
    *("stream_replays_total", "broker_flush_seconds_sum", "parked_requests", "prefix_reused_tokens_total"),
)


def test_models_are_those_that_workers_run(door: Door):
    client = door.openai()
    models = client.models.list().data
    assert [(model.id, model.object, model.owned_by) for model in models] == [("toy", "model", "prism")]
    one: Any = client.models.retrieve("toy")
    assert one.workers == len(door.pool.workers())
    assert client.models.retrieve(one.identity).id == "toy"
    assert abs(one.created - wait_for(lambda: door.pool.redis.time()[0], "time")) < 3600


def test_health_tells_apart_what_lives_what_is_ready_and_what_can_answer(door: Door):
    with door.http() as http:
        assert http.get("/livez").json() == {"status": "ok"}
        assert http.get("/readyz").json() == {"status": "ok"}
        assert http.get("/health").json()["status"] == "ok"
        assert re.fullmatch(r"\d+\.\d+\.\d+.*|unknown", http.get("/version").json()["version"])


def test_every_designed_metric_is_exported_under_its_name(door: Door):
    with door.http() as http:
        text = http.get("/metrics").text
    shown = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    for name in DESIGNED:
        assert f"prism_{name}" in exported_names(), name
        assert f"prism_{name}" in shown, name
    assert shown <= exported_names()


def test_counters_are_what_clients_saw_at_every_gateway(tmp_path_factory: pytest.TempPathFactory):
    """Chats, streams, background, cancels, failures and a killed worker; then the sums of both sides are compared."""
    with (
        Pool(tmp_path_factory.mktemp("m"), 2, model="toy?step_s=0.004", pool=FAST) as pool,
        Door(pool) as one,
        Door(pool) as two,
    ):
        usages: list[Any] = []
        for number in range(4):
            client = (one, two)[number % 2].openai()
            usages.append(client.chat.completions.create(model="toy", messages=HELLO, max_tokens=10 + number).usage)
        *_, last = one.openai().chat.completions.create(
            model="toy", messages=HELLO, max_tokens=7, stream=True, n=2, stream_options={"include_usage": True}
        )
        usages.append(last.usage)
        made = two.openai().responses.create(model="toy", input="hello", max_output_tokens=200, background=True)
        request = made.id.removeprefix("resp_")
        pool.follow(request, lambda story: len(story.ids) > 20)
        pool.kill(pool.worker_of(request))
        assert pool.follow(request).moves == ["worker_lost"]
        done: Any = two.openai().responses.retrieve(made.id)
        cancelled = one.openai().responses.create(model="toy", input="x", max_output_tokens=3000, background=True)
        story = pool.follow(cancelled.id.removeprefix("resp_"), lambda story: len(story.ids) > 5)
        one.openai().responses.cancel(cancelled.id)
        story = pool.follow(cancelled.id.removeprefix("resp_"))
        with one.http() as http:
            assert http.post("/v1/completions", json={"prompt": "x" * 5000}).status_code == 400
        generated = sum(usage.completion_tokens for usage in usages) + done.usage.output_tokens + len(story.ids)
        for door in (one, two):
            assert door.metric("prism_generation_tokens_total") == generated
            assert door.metric("prism_request_success_total", finished_reason="length") == 7
            assert door.metric("prism_requests_ended_total", state="done") == 7
            assert door.metric("prism_requests_ended_total", state="cancelled") == 1
            assert door.metric("prism_requests_ended_total", state="failed") == 1
            assert door.metric("prism_takeovers_total", why="worker_lost") == 1
            assert door.metric("prism_requests_submitted_total") == 9
            assert door.metric("prism_cancel_latency_seconds_count") == 1
            # A turn that has ended counts as running until its worker has settled it, a moment later.
            wait_for(lambda door=door: door.metric("prism_num_requests_running") == 0, "every turn to be settled")
            assert door.metric("prism_broker_flush_seconds_count") > 0
        assert one.metric("prism_time_to_first_token_seconds_count") == 4
        assert two.metric("prism_time_to_first_token_seconds_count") == 2
        assert one.metric("prism_inter_token_latency_seconds_count") == 9 + 11 + 2 * 6
        assert one.metric("prism_e2e_request_latency_seconds_count") == 4
        assert one.metric("prism_request_phase_seconds_count", phase="decode") == 4
        assert one.metric("prism_http_requests_total", route="/v1/completions", status="400") == 1
        pool.wait_ready()


def test_replays_are_counted_and_not_timed(door: Door):
    before = door.metric("prism_stream_replays_total"), door.metric("prism_e2e_request_latency_seconds_count")
    done = door.openai().responses.create(model="toy", input="hello", max_output_tokens=3)
    list(door.openai().responses.retrieve(done.id, stream=True))
    after = door.metric("prism_stream_replays_total"), door.metric("prism_e2e_request_latency_seconds_count")
    assert (after[0] - before[0], after[1] - before[1]) == (1, 1)


def test_the_pool_at_a_glance_names_no_request(door: Door):
    raw = Raw(door, "/v1/chat/completions", body_of(max_tokens=500, stream=True))
    request = raw.read_until('"content"').split("chatcmpl-", 1)[1][:26]
    with door.http() as http:
        pool = wait_for(lambda: (found := http.get("/pool").json())["running"] and found, "a running request")
    assert request not in json.dumps(pool)
    assert pool["streams"] >= 1
    assert sum(worker["running"] for worker in pool["workers"]) == pool["running"]
    assert {worker["state"] for worker in pool["workers"]} <= {"idle", "busy"}
    raw.vanish()


def test_trace_context_travels_with_the_request_and_is_no_part_of_it(door: Door):
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    client = door.openai()
    made = [
        client.chat.completions.create(
            model="toy",
            messages=HELLO,
            max_tokens=2,
            extra_headers={"traceparent": value, "Idempotency-Key": "traced"},
        )
        for value in (parent, parent.replace("b7", "c8"), "garbage", "")
    ]
    assert len({one.id for one in made}) == 1
    spec = door.pool.redis.hget(f"prism:r:{made[0].id.removeprefix('chatcmpl-')}", "spec")
    assert spec is not None
    assert parent.encode() in spec


def test_the_page_comes_whole_from_here_and_may_load_nothing_from_elsewhere(door: Door):
    with door.http() as http:
        page = http.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'self'" in page.headers["content-security-policy"]
        names = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert names
        for name in names:
            if not name.startswith("data:"):
                assert name.startswith("/static/")
                assert http.get(name).status_code == 200
        script = http.get("/static/app.js").text
        imports = re.findall(r'from "([^"]+)"', script)
        assert all(http.get(name).status_code == 200 for name in imports)
        for text in (page.text, script):
            assert "http://" not in text
            assert "https://" not in text
            assert "innerHTML" not in text
        ids = set(re.findall(r'id="([^"]+)"', page.text))
        assert set(re.findall(r'\$\("([^"]+)"\)', script)) <= ids


def test_logs_are_json_with_ids_and_times_and_not_a_word_of_text(toy_pool: Pool, tmp_path: Path):
    process, url = gateway_process(toy_pool, tmp_path / "log", PRISM_API_KEYS="key-of-ann")
    secret = "a-secret-word"
    headers = {"Authorization": "Bearer key-of-ann", "X-Request-Id": "req-1"}
    body = body_of(messages=[{"role": "user", "content": secret}], max_tokens=30, temperature=0)
    with httpx.Client(base_url=url, headers=headers, timeout=30) as http:
        answer = http.post("/v1/chat/completions", json=body).json()
        http.post("/v1/chat/completions", json={**body, "temperature": 99})
        http.post("/v1/chat/completions", content=secret, headers={"Content-Type": "application/json"})
        http.get(f"/v1/responses/{secret}")
        http.get(f"/{secret}?{secret}={secret}")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) in (0, -signal.SIGTERM)
    text = (tmp_path / "log").read_text()
    said = answer["choices"][0]["message"]["content"]
    assert secret not in text
    assert said not in text
    assert "key-of-ann" not in text
    lines = [json.loads(line) for line in text.splitlines()]
    requests = [line for line in lines if line["message"] == "request"]
    assert [line["status"] for line in requests] == [200, 400, 400, 404, 404]
    first = requests[0]
    assert first["request_id"] == "req-1"
    assert answer["id"].endswith(first["requests"][0])
    assert set(first["phases_ms"]) == {"queue", "prefix", "prefill", "decode", "sampling", "flush", "snapshot"}
    assert first["completion_tokens"] == 30
    assert first["worker"] in toy_pool.workers()


def test_an_unusable_broker_or_port_is_one_clear_line(toy_pool: Pool, tmp_path: Path, door: Door):
    code = (
        "import sys; from broker.gateway.config import GatewayConfig; from broker.gateway.server import run;"
        "from prism_core.errors import PrismError\n"
        "try: run(GatewayConfig(port=int(sys.argv[2])), sys.argv[1])\n"
        "except PrismError as error: print(type(error).__name__, error)"
    )
    for url, port, words in (
        (f"unix://{tmp_path}/nothing", 0, "BrokerUnavailable cannot reach the broker"),
        (toy_pool.broker.url, door.server.port, "InvalidRequest cannot listen on 127.0.0.1 port"),
    ):
        done = subprocess.run([sys.executable, "-c", code, url, str(port)], capture_output=True, text=True, cwd=ROOT)
        assert done.stdout.startswith(words)
        assert "Traceback" not in done.stderr


def test_two_gateways_serve_one_pool_and_resume_each_others_streams(toy_pool: Pool, door: Door, tmp_path: Path):
    process, url = gateway_process(toy_pool, tmp_path / "log")
    other = httpx.Client(base_url=url, timeout=60)
    texts: list[str] = []

    def read(name: str) -> None:
        with other.stream("GET", f"/v1/responses/{name}?stream=true") as response:
            data = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]
        texts.append("".join(item["delta"] for item in data if item["type"] == "response.output_text.delta"))

    stream = door.openai().responses.create(
        model="toy", input="hello", max_output_tokens=100, background=True, stream=True
    )
    text, thread = "", None
    for event in stream:
        if event.type == "response.created":
            thread = threading.Thread(target=read, args=(event.response.id,))
            thread.start()
        if event.type == "response.output_text.delta":
            text += event.delta
    assert thread is not None
    thread.join()
    assert texts == [text]
    process.send_signal(signal.SIGKILL)
    process.wait()
