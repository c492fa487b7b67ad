"""The command line as a person uses it: processes, the embedded broker, a real model, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pool import wait_for

ROOT = Path(__file__).parents[2]
PRISM = [sys.executable, "-m", "ops.cli"]


def prism(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PRISM, *arguments], capture_output=True, text=True, timeout=120, cwd=ROOT, env=os.environ | environment
    )


@pytest.fixture(scope="module")
def home() -> Iterator[str]:
    """A home of its own with the broker in it; models and compiled kernels are those of the machine."""
    real = Path(os.environ.get("PRISM_HOME") or "~/.cache/prism").expanduser()
    with tempfile.TemporaryDirectory(prefix="prism-cli-") as folder:
        for shared in ("models", "numba", "packed", "identity"):
            (real / shared).mkdir(parents=True, exist_ok=True)
            (Path(folder) / shared).symlink_to(real / shared)
        yield folder


@pytest.fixture(scope="module")
def pool(home: str, smollm2_path: Path) -> Iterator[dict[str, str]]:
    """One `prism worker` process with one worker on the embedded broker."""
    environment = {"PRISM_HOME": home}
    worker = subprocess.Popen(
        [*PRISM, "worker", "smollm2-135m"], stderr=subprocess.DEVNULL, cwd=ROOT, env=os.environ | environment
    )
    try:
        wait_for(lambda: json.loads(prism("workers", "--json", **environment).stdout or "[]"), "a worker", 240)
        yield environment
    finally:
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0


def test_submit_streams_the_answer_that_run_gives_without_a_pool(pool: dict[str, str]) -> None:
    question = "Name three fruits."
    pooled = prism("submit", question, "-n", "24", **pool)
    alone = prism("run", "smollm2-135m", question, "-n", "24", **pool)
    assert pooled.returncode == alone.returncode == 0
    assert pooled.stdout == alone.stdout
    assert len(pooled.stdout.split()) > 3


def test_a_detached_request_can_be_followed_later_and_from_any_event(pool: dict[str, str]) -> None:
    request = prism("submit", "Count to twenty.", "-n", "40", "--detach", **pool).stdout.strip()
    lines = [json.loads(line) for line in prism("tail", request, "--json", **pool).stdout.splitlines()]
    assert [line["event"] for line in lines][:1] == ["start"]
    assert lines[-1]["state"] == "done"
    middle = len(lines) // 2
    rest = prism("tail", request, "--from", lines[middle]["id"], "--json", **pool).stdout.splitlines()
    assert [json.loads(line) for line in rest] == lines[middle + 1 :]
    by_number = prism("tail", request, "--from", str(middle + 1), "--json", **pool).stdout.splitlines()
    assert by_number == rest


def test_a_second_turn_of_a_conversation_reuses_the_first(pool: dict[str, str]) -> None:
    def usage(question: str) -> dict[str, int]:
        said = prism("submit", question, "--conversation", "fruit", "-n", "12", "--wait", "--json", **pool)
        return dict(json.loads(said.stdout)["usage"])

    first = usage("Name a fruit.")
    assert usage("And another?")["reused_tokens"] >= first["prompt_tokens"]


def test_cancel_answers_for_every_state_of_a_request(pool: dict[str, str]) -> None:
    request = prism("submit", "Tell a very long story.", "-n", "3000", "--detach", **pool).stdout.strip()
    assert prism("cancel", request, **pool).returncode == 0
    followed = prism("tail", request, **pool)
    assert followed.returncode == 1
    assert f"request {request} cancelled" in followed.stderr
    assert "had already ended" in prism("cancel", request, **pool).stdout
    unknown = prism("cancel", "no-such-request", **pool)
    assert unknown.returncode == 1
    assert unknown.stderr.strip() == "prism: no request no-such-request"


def test_top_and_doctor_show_the_worker(pool: dict[str, str]) -> None:
    assert prism("submit", "Say hello.", "-n", "2", **pool).returncode == 0
    state = json.loads(prism("top", "--json", **pool).stdout)
    assert [worker["state"] for worker in state["workers"]] == ["idle"]
    assert state["counters"]["ended.done"] >= 1
    assert "smollm2-135m" in prism("top", "--once", **pool).stdout
    checks = {check["name"]: check for check in json.loads(prism("doctor", "--json", **pool).stdout)}
    assert checks["pool"]["state"] == checks["broker"]["state"] == "good"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["run", "/no/such.gguf", "hi"], 1, "neither a file nor a pulled name"),
        (["worker", "/"], 1, "is a directory"),
        (["worker", "{truncated}"], 1, "truncated.gguf"),
        (["run", "{truncated}", "hi"], 1, "truncated.gguf"),
        (["models", "inspect", "{text}"], 1, "text.gguf"),
        (["submit", ""], 1, "the prompt is empty"),
        (["run", "smollm2-135m", ""], 1, "the prompt is empty"),
        (["run", "smollm2-135m", "hello", "-c", "8"], 1, "context_tokens is 8"),
        (["submit", "hi", "-n", "-5"], 2, "-n"),
        (["submit", "hi", "--temperature", "-1"], 2, "--temperature"),
        (["submit", "hi", "--top-p", "0"], 1, "top_p"),
        (["submit", "hi", "--priority", "urgent"], 1, "priority must be one of"),
        (["submit", "hi", "--deadline", "-3"], 1, "deadline must be above 0"),
        (["submit", "hi", "--conversation", "a b"], 1, "conversation must be"),
        (["worker", "smollm2-135m", "-w", "0"], 2, "-w"),
        (["worker", "smollm2-135m", "--memory-budget", "9M"], 1, "bytes at a context of 4096 tokens (weights "),
        (["run", "smollm2-135m", "hi", "-c", "many"], 2, "is not a size"),
        (["submit", "hi", "--redis-url", "redis://127.0.0.1:1"], 75, "cannot reach the broker"),
        (["submit", "hi", "--redis-url", "carrier-pigeon://x"], 1, "carrier-pigeon"),
        (["tail", "no-such-request"], 1, "no request no-such-request"),
        (["sumbit", "hi"], 2, "Did you mean 'submit'"),
    ],
)
def test_a_mistake_is_one_clear_line_and_an_exit_code(
    home: str, tmp_path: Path, smollm2_path: Path, arguments: list[str], code: int, says: str
) -> None:
    truncated, text = tmp_path / "truncated.gguf", tmp_path / "text.gguf"
    truncated.write_bytes(smollm2_path.open("rb").read(200_000))
    text.write_text("this is not a model\n" * 100)
    done = prism(*(a.format(truncated=truncated, text=text) for a in arguments), PRISM_HOME=home)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    if code != 2:  # the command line's own mistakes come with a usage line
        assert len(done.stderr.strip().splitlines()) == 1
