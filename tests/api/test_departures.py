"""Clients that go away, stop reading, or read slowly: what becomes of their requests and of the gateway."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.door import Door, Raw, body_of
from tests.pool import FAST, Pool, wait_for

LONG = 3000


def idle(door: Door) -> bool:
    return door.gateway.metrics.open_streams == 0 and door.gateway.departures.pending == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_chat_whose_client_is_gone_is_cancelled_after_the_grace(door: Door, stream: bool):
    live = set(door.pool.redis.zrange("prism:live", 0, -1))
    raw = Raw(door, "/v1/chat/completions", body_of(max_tokens=LONG, stream=stream))
    requests = wait_for(lambda: set(door.pool.redis.zrange("prism:live", 0, -1)) - live, "the request")
    request = requests.pop().decode()
    door.pool.follow(request, lambda story: len(story.ids) > 3)
    raw.vanish()
    began = time.monotonic()
    story = door.pool.follow(request)
    assert story.state == "cancelled"
    assert story.end is not None
    assert story.end["reason"] == "the client went away"
    assert story.seen_at - began >= door.config.disconnect_grace_s * 0.9
    wait_for(lambda: idle(door), "the gateway to be idle")


def test_every_choice_of_a_chat_is_cancelled_with_it(door: Door):
    raw = Raw(door, "/v1/chat/completions", body_of(max_tokens=LONG, stream=True, n=3))
    raw.read_until('"content"')
    assert door.pool.redis.zcard("prism:live") >= 3
    raw.vanish()
    wait_for(lambda: door.pool.redis.zcard("prism:live") == 0, "all choices to end")


def test_a_client_that_leaves_before_the_first_token_leaves_nothing_behind(door: Door):
    blockers = [Raw(door, "/v1/chat/completions", body_of(max_tokens=LONG, stream=True, seed=n)) for n in range(2)]
    for blocker in blockers:
        blocker.read_until('"content"')
    waiting = [Raw(door, "/v1/chat/completions", body_of(max_tokens=5, stream=True, seed=n)) for n in range(5)]
    wait_for(lambda: door.pool.redis.zcard("prism:live") == 7, "the requests")
    for raw in [*waiting, *blockers]:
        raw.vanish()
    wait_for(lambda: door.pool.redis.zcard("prism:live") == 0, "all of them to end")
    wait_for(lambda: idle(door) and door.server.connections == 0, "the gateway to be idle")


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Door]:
    """A gateway that soon loses patience with a client that does not read, and workers that fill its buffers fast."""
    with (
        Pool(tmp_path, 2, model="toy", pool=FAST) as pool,
        Door(pool, send_timeout_s=0.4, disconnect_grace_s=0.1, keep_alive_s=0.1) as door,
    ):
        yield door


def test_a_client_that_never_reads_is_cut_off_and_its_request_cancelled(hasty: Door):
    # Much text for each token: alternatives fill the socket's buffers soon.
    body = body_of(max_tokens=LONG, stream=True, logprobs=True, top_logprobs=20, n=8)
    raw = Raw(hasty, "/v1/chat/completions", body, buffer_bytes=4096)
    wait_for(lambda: hasty.server.connections == 1, "the connection")
    wait_for(lambda: hasty.server.connections == 0, "the connection to be cut", 60)
    wait_for(lambda: hasty.pool.redis.zcard("prism:live") == 0, "its request to end")
    wait_for(lambda: idle(hasty), "the gateway to be idle")
    raw.vanish()


def test_a_slow_reader_misses_nothing_and_holds_up_nobody(door: Door):
    body = body_of(max_tokens=150, stream=True, temperature=0)
    slow = Raw(door, "/v1/chat/completions", body)
    slow.read_until('"content"')
    fast = Raw(door, "/v1/chat/completions", body)
    fast.read_until("[DONE]")
    request = slow.text.split("chatcmpl-", 1)[1][:26]
    door.pool.follow(request)
    slow.read_until("[DONE]")

    def said(raw: Raw) -> str:
        lines = [line[6:] for line in raw.text.splitlines() if line.startswith("data: {")]
        return "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines)

    assert said(slow) == said(fast)


def test_silence_is_filled_with_comments_that_openais_client_can_stand(toy_pool: Pool):
    with Door(toy_pool, keep_alive_s=0.05) as door:
        blockers: list[Any] = [
            door.openai().responses.create(model="toy", input=f"b{n}", max_output_tokens=LONG, background=True)
            for n in range(2)
        ]
        raw = Raw(
            door,
            "/v1/responses",
            {"model": "toy", "input": "x", "max_output_tokens": 3, "background": True, "stream": True},
        )
        raw.read_until(": keep-alive\n")
        stream = door.openai().responses.create(
            model="toy", input="y", max_output_tokens=3, background=True, stream=True
        )
        kinds = []
        for event in stream:
            kinds.append(event.type)
            if event.type == "response.queued":
                for _ in range(2):
                    raw.text = ""
                    raw.read_until(": keep-alive\n")
                for blocker in blockers:
                    door.openai().responses.cancel(blocker.id)
        assert kinds[-1] == "response.incomplete"
        raw.vanish()


def test_a_gateway_that_is_stopped_lets_its_requests_go_on(toy_pool: Pool):
    with Door(toy_pool, shutdown_grace_s=0.2, disconnect_grace_s=0.1) as door:
        raw = Raw(door, "/v1/chat/completions", body_of(max_tokens=600, stream=True))
        request = raw.read_until('"content"').split("chatcmpl-", 1)[1][:26]
    assert toy_pool.follow(request).state == "done"


def test_a_gateway_that_is_stopped_does_not_wait_for_graces(toy_pool: Pool):
    with Door(toy_pool, disconnect_grace_s=600.0) as door:
        raw = Raw(door, "/v1/chat/completions", body_of(max_tokens=LONG, stream=True))
        request = raw.read_until('"content"').split("chatcmpl-", 1)[1][:26]
        raw.vanish()
        wait_for(lambda: door.gateway.departures.pending == 1, "the grace to begin")
    assert toy_pool.follow(request).state == "cancelled"
