"""Batches over several gateway processes: taken up after a stop or a kill, and shared out fairly."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.gateways import GatewayProcess, over
from tests.pool import FAST, Pool, wait_for

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("g"), 2, model="toy?step_s=0.003", pool=FAST) as pool:
        yield pool


@pytest.fixture
def root(tmp_path: Path, pool: Pool) -> Path:
    """A folder of its own: the pool forgets the one before."""
    pool.redis.delete("prism:files")
    return tmp_path / "files"


def made(client: openai.OpenAI, count: int, max_tokens: int = 20) -> Any:
    lines = [
        {
            "custom_id": f"c{number}",
            "method": "POST",
            "url": CHAT,
            "body": {
                "model": "toy",
                "messages": [{"role": "user", "content": f"question {number}"}],
                "max_tokens": max_tokens,
                "seed": number,
            },
        }
        for number in range(count)
    ]
    text = "\n".join(map(json.dumps, lines)).encode()
    source = client.files.create(file=("in.jsonl", text), purpose="batch")
    return client.batches.create(input_file_id=source.id, endpoint=CHAT, completion_window="24h")


def rows(client: openai.OpenAI, file: str) -> list[dict[str, Any]]:
    return [json.loads(row) for row in client.files.content(file).text.splitlines()]


@pytest.mark.parametrize("how", [pytest.param(signal.SIGTERM, marks=pytest.mark.full), signal.SIGKILL])
def test_another_gateway_takes_up_what_one_leaves(pool: Pool, root: Path, how: signal.Signals) -> None:
    count = 60
    submitted = int(pool.redis.hget("prism:stats", "submitted") or 0)
    with GatewayProcess(pool, root) as first, GatewayProcess(pool, root, batch_runners=0) as watching:
        client = watching.openai()
        batch = made(client, count)
        wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 3, "some lines", 60)
        assert first.process is not None
        first.process.send_signal(how)
        first.process.wait(30)
        partial = client.files.content(batch.partial_output_file_id).text.splitlines()
        assert 3 <= len(partial) < count
        with GatewayProcess(pool, root):
            done = over(lambda: client.batches.retrieve(batch.id))
        assert (done.status, done.request_counts.completed) == ("completed", count)
        output = rows(client, done.output_file_id)
    assert Counter(row["custom_id"] for row in output) == Counter(f"c{number}" for number in range(count))
    assert [json.dumps(row, separators=(",", ":"), ensure_ascii=False) for row in output[: len(partial)]] == partial
    assert int(pool.redis.hget("prism:stats", "submitted") or 0) - submitted == count


def test_a_batch_whose_gateway_died_is_not_stuck_in_progress_nor_in_cancelling(pool: Pool, root: Path) -> None:
    with GatewayProcess(pool, root, batch_runners=0) as watching:
        client = watching.openai()
        with GatewayProcess(pool, root) as first:
            batch = made(client, 64, 60)
            wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 5, "some lines", 60)
            first.kill()
        assert client.batches.retrieve(batch.id).status == "in_progress"
        assert client.batches.cancel(batch.id).status == "cancelling"
        with GatewayProcess(pool, root):
            done = over(lambda: client.batches.retrieve(batch.id))
        assert done.status == "cancelled"
        found = rows(client, done.output_file_id)
        assert len(found) >= 5
        found += rows(client, done.error_file_id)
    assert Counter(row["custom_id"] for row in found) == Counter(f"c{number}" for number in range(64))
    wait_for(lambda: pool.redis.zcard("prism:live") == 0, "the pool to be empty")


def test_a_frozen_gateway_that_wakes_up_writes_nothing_twice(pool: Pool, root: Path) -> None:
    count = 60
    with GatewayProcess(pool, root) as frozen, GatewayProcess(pool, root) as other:
        client = other.openai()
        batch = made(client, count)
        wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 3, "some lines", 60)
        assert frozen.process is not None
        os.kill(frozen.process.pid, signal.SIGSTOP)
        try:
            wait_for(lambda: pool.redis.hget(f"prism:b:{batch.id[6:]}", "until"), "the lease")
            pool.redis.hset(f"prism:b:{batch.id[6:]}", "until", 1)
        finally:
            os.kill(frozen.process.pid, signal.SIGCONT)
        done = over(lambda: client.batches.retrieve(batch.id))
        found = Counter(row["custom_id"] for row in rows(client, done.output_file_id))
    assert found == Counter(f"c{number}" for number in range(count))


def test_owners_take_turns_when_a_gateway_is_full(pool: Pool, root: Path) -> None:
    with GatewayProcess(pool, root, batch_runners=3, api_keys=["carol", "dave"]) as gateway:
        carol, dave = gateway.openai("carol"), gateway.openai("dave")
        many = [made(carol, 100, 50).id for _ in range(4)]
        one = made(dave, 2).id
        assert over(lambda: dave.batches.retrieve(one)).status == "completed"
        waiting = [name for name in many if carol.batches.retrieve(name).status == "validating"]
        assert len(waiting) == 2
        for name in many:
            carol.batches.cancel(name)
        for name in many:
            assert over(lambda name=name: carol.batches.retrieve(name)).status == "cancelled"


def test_interactive_turns_go_before_batch_lines_and_the_lines_lose_nothing(pool: Pool, root: Path) -> None:
    with GatewayProcess(pool, root) as gateway:
        client = gateway.openai()
        batch = made(client, 20, 150)
        wait_for(lambda: pool.redis.zcard("prism:live:batch") >= 4, "lines in the pool")
        for number in range(6):
            request = pool.submit(prompt=f"quick {number}", max_tokens=4)
            story = pool.follow(request)
            assert story.state == "done"
        done = over(lambda: client.batches.retrieve(batch.id))
        assert done.request_counts.completed == 20
        for row in rows(client, done.output_file_id):
            assert row["response"]["body"]["usage"]["completion_tokens"] == 150
    assert int(pool.redis.hget("prism:stats", "moved.preempted") or 0) >= 1
