"""Every example runs as it stands, against a pool of two workers, and prints what it promises."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pool import Pool
from tests.unit.deploy.commands import ROOT, environment, gateway

EXAMPLES = ROOT / "ops" / "examples"


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with tempfile.TemporaryDirectory(prefix="pe") as folder, Pool(Path(folder), 2, model="toy?step_s=0.002") as made:
        yield made


@pytest.fixture(scope="module")
def door(pool: Pool) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pg") as home, gateway(pool.broker.url, PRISM_HOME=home) as url:
        yield url


def run(name: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(**more), cwd="/")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_stream_prints_an_answer_as_it_comes(pool: Pool) -> None:
    done = run("stream.py", "Why?", PRISM_REDIS_URL=pool.broker.url)
    assert len(done.stdout) > 20
    assert "done (length): 64 tokens" in done.stderr


def test_background_comes_back_for_its_answer_and_repeats_nothing(pool: Pool) -> None:
    for _ in range(2):  # the second run meets the request of the first
        said = run("background.py", PRISM_REDIS_URL=pool.broker.url).stdout
        request, again, end, whole = said.splitlines()
        assert re.fullmatch(r"again from \d+-10", again)
        assert (end, whole) == ("end done", "whole 120 tokens")
    assert pool.record(request.split()[1])["attempt"] == b"1"


def test_conversation_reuses_its_beginning_and_takes_an_edit(pool: Pool) -> None:
    said = run("conversation.py", PRISM_REDIS_URL=pool.broker.url).stdout.splitlines()
    first, second = (tuple(map(int, re.findall(r"\d+", line))) for line in said[:2])
    assert first[1] == 0
    assert second[1] >= first[0]
    assert said[2:] == ["2 turns", "edited: done", "2 turns, the last of them: Now name a tree."]


def test_cancel_stops_a_running_request(pool: Pool) -> None:
    said = run("cancel.py", PRISM_REDIS_URL=pool.broker.url).stdout.splitlines()
    assert said == ["cancel: cancelling", "cancelled - seen enough", "again: ended"]


def test_async_client_answers_many_at_once(pool: Pool) -> None:
    said = run("async_client.py", PRISM_REDIS_URL=pool.broker.url).stdout.splitlines()
    assert [line.split(" -> ")[0] for line in said] == [
        "Name a colour.",
        "Name an animal.",
        "Name a city.",
        "Name a river.",
    ]


def test_openai_chat_streams_through_the_gateway(door: str) -> None:
    said = run("openai_chat.py", OPENAI_BASE_URL=f"{door}/v1", OPENAI_API_KEY="any").stdout
    assert said.endswith("32 tokens\n")


def test_openai_batch_answers_every_line(door: str) -> None:
    said = run("openai_batch.py", OPENAI_BASE_URL=f"{door}/v1", OPENAI_API_KEY="any").stdout.splitlines()
    assert said[0] == "completed"
    assert {line.split(" -> ")[0] for line in said[1:]} == {f"number-{n}" for n in range(8)}


def test_every_example_has_a_test() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert any(name.startswith(f"test_{path.stem}_") for name in globals()), path.name
