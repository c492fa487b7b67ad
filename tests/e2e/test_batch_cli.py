"""`prism batch` as a person uses it: files that are wrong, runs that stop, and what is told on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from broker.batch.totals import Progress, Totals
from ops.cli.app import run as run_cli
from ops.cli.batch import human_time, told
from tests.pool import FAST, ROOT, Pool, wait_for

CHAT = "/v1/chat/completions"


class Said(NamedTuple):
    code: int
    out: str
    err: str


Prism = Callable[..., Said]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("c"), 2, model="toy?step_s=0.002", pool=FAST) as pool:
        yield pool


@pytest.fixture
def prism(pool: Pool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Prism:
    """The command line, in this process and in a folder of its own."""
    monkeypatch.setenv("PRISM_REDIS_URL", pool.broker.url)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["prism", *arguments])
        code = run_cli()
        return Said(code, *capsys.readouterr())

    return call


def line(custom_id: str, text: str = "hello", **body: Any) -> str:
    body = {"model": "toy", "messages": [{"role": "user", "content": text}], "max_tokens": 4, "seed": 1, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body})


def put(name: str, *lines: str) -> None:
    Path(name).write_text("".join(row + "\n" for row in lines))


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(row) for row in Path(name).read_text().splitlines()]


def names() -> list[str]:
    return sorted(path.name for path in Path().iterdir())


def test_a_batch_is_run_sorted_and_summed_up(prism: Prism) -> None:
    put("in.jsonl", *(line(f"c{number}", f"question {number}", max_tokens=3 + number % 5) for number in range(30)))
    said = prism("batch", "run", "in.jsonl", "-o", "out.jsonl", "--sort", "--json")
    assert said.code == 0
    summary = json.loads(said.out)
    assert (summary["state"], summary["total"], summary["done"], summary["failed"]) == ("completed", 30, 30, 0)
    assert summary["errors"] is None
    assert summary["usage"]["output_tokens"] == sum(3 + number % 5 for number in range(30))
    assert [row["custom_id"] for row in rows("out.jsonl")] == [f"c{number}" for number in range(30)]
    assert names() == ["in.jsonl", "out.jsonl", "out.jsonl.batch"]
    shown = json.loads(prism("batch", "status", summary["batch"], "--json").out)
    assert (shown["state"], shown["done"], shown["total"], shown["runner"]) == ("completed", "30", "30", "")
    assert summary["batch"] in prism("batch", "status").out
    again = prism("batch", "run", "in.jsonl", "-o", "out.jsonl", "--resume", "--json")
    assert (again.code, json.loads(again.out)) == (0, summary)


def test_without_json_nothing_is_written_to_standard_output(prism: Prism) -> None:
    put("in.jsonl", line("a"))
    said = prism("batch", "run", "in.jsonl", "-o", "out.jsonl")
    assert (said.code, said.out) == (0, "")
    assert "1 lines in out.jsonl" in said.err


def test_each_bad_line_is_told_with_its_number_and_nothing_is_run(prism: Prism, pool: Pool) -> None:
    before = pool.redis.hget("prism:stats", "submitted")
    put("in.jsonl", line("a"), "{broken", line("a"), line("b", top_p=3), line("c"))
    said = prism("batch", "run", "in.jsonl", "-o", "out.jsonl")
    assert said.code == 1
    assert "in.jsonl: line 2: is no valid JSON" in said.err
    assert "in.jsonl: line 3: custom_id 'a' was used before, in line 1" in said.err
    assert "in.jsonl: line 4: top_p must be a number from 0 to 1, got 3" in said.err
    assert "3 problem(s); nothing of it was run" in said.err
    assert names() == ["in.jsonl"]
    assert pool.redis.hget("prism:stats", "submitted") == before


def test_an_unknown_model_is_told_and_another_may_take_its_place(prism: Prism) -> None:
    put("in.jsonl", line("a", model="gpt-4o"))
    said = prism("batch", "run", "in.jsonl", "-o", "out.jsonl")
    assert said.code == 1
    assert "line 1: the pool has never run model 'gpt-4o'; it has toy" in said.err
    assert names() == ["in.jsonl"]
    assert prism("batch", "run", "in.jsonl", "-o", "out.jsonl", "--model", "toy").code == 0
    assert rows("out.jsonl")[0]["response"]["body"]["model"] == "toy"


def test_nobodys_file_is_overwritten(prism: Prism) -> None:
    put("in.jsonl", line("a"))
    put("out.jsonl", "precious")
    said = prism("batch", "run", "in.jsonl", "-o", "out.jsonl", "--resume")
    assert (said.code, "out.jsonl is there already, and not from a batch" in said.err) == (1, True)
    assert Path("out.jsonl").read_text() == "precious\n"
    Path("out.jsonl").rename("out.errors.jsonl")
    assert "out.errors.jsonl is there already" in prism("batch", "run", "in.jsonl", "-o", "out.jsonl").err
    Path("out.errors.jsonl").unlink()
    assert "must be different files" in prism("batch", "run", "in.jsonl", "-o", "./in.jsonl").err
    assert "there is no file absent" in prism("batch", "run", "absent", "-o", "out.jsonl").err
    assert "there is no folder absent" in prism("batch", "run", "in.jsonl", "-o", "absent/out.jsonl").err
    assert prism("batch", "run", "in.jsonl", "-o", "out.jsonl").code == 0
    again = prism("batch", "run", "in.jsonl", "-o", "out.jsonl")
    assert (again.code, "add --resume" in again.err) == (1, True)
    put("in.jsonl", line("b"))
    changed = prism("batch", "run", "in.jsonl", "-o", "out.jsonl", "--resume")
    assert (changed.code, "has changed since" in changed.err) == (1, True)


def test_failed_lines_are_in_their_own_file_and_run_again_alone(prism: Prism, pool: Pool) -> None:
    put("in.jsonl", line("a"), line("long", "x" * 20_000), line("b"))
    said = prism("batch", "run", "in.jsonl", "-o", "out.jsonl")
    assert said.code == 1
    assert "1 of 3 lines failed; see out.errors.jsonl" in said.err
    assert "--retry-errors" in said.err
    assert {row["custom_id"] for row in rows("out.jsonl")} == {"a", "b"}
    assert [row["custom_id"] for row in rows("out.errors.jsonl")] == ["long"]
    before = int(pool.redis.hget("prism:stats", "submitted") or 0)
    again = prism("batch", "run", "in.jsonl", "-o", "out.jsonl", "--retry-errors")
    assert again.code == 1
    assert int(pool.redis.hget("prism:stats", "submitted") or 0) == before + 1
    assert rows("out.errors.jsonl")[0]["id"].endswith("-2-2")
    assert {row["custom_id"] for row in rows("out.jsonl")} == {"a", "b"}


def started(pool: Pool, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PRISM_REDIS_URL": pool.broker.url}
    command = [sys.executable, "-m", "ops.cli", "batch", "run", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def recorded() -> int:
    part = Path("out.jsonl.part")
    return part.read_bytes().count(b"\n") if part.exists() else 0


def test_a_run_that_is_interrupted_says_how_to_go_on_and_repeats_nothing(prism: Prism, pool: Pool) -> None:
    before = int(pool.redis.hget("prism:stats", "submitted") or 0)
    put("in.jsonl", *(line(f"c{number}", f"question {number}", max_tokens=60) for number in range(40)))
    process = started(pool, "in.jsonl", "-o", "out.jsonl")
    wait_for(lambda: recorded() >= 5, "five lines")
    second = prism("batch", "run", "in.jsonl", "-o", "out.jsonl", "--resume")
    assert (second.code, "is being written by another process" in second.err) == (1, True)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "go on with: prism batch run in.jsonl -o out.jsonl --resume" in err
    (found,) = [one for one in json.loads(prism("batch", "status", "--json").out) if one["state"] == "stopped"]
    assert found["total"] == "40"
    said = prism("batch", "run", "in.jsonl", "-o", "out.jsonl")
    assert (said.code, "add --resume" in said.err) == (1, True)
    assert prism("batch", "run", "in.jsonl", "-o", "out.jsonl", "--resume", "--sort").code == 0
    assert [row["custom_id"] for row in rows("out.jsonl")] == [f"c{number}" for number in range(40)]
    assert int(pool.redis.hget("prism:stats", "submitted") or 0) - before == 40


def test_a_batch_is_cancelled_from_elsewhere_and_its_rest_can_be_run_after_all(prism: Prism, pool: Pool) -> None:
    put("in.jsonl", *(line(f"c{number}", f"question {number}", max_tokens=100) for number in range(40)))
    process = started(pool, "in.jsonl", "-o", "out.jsonl", "--json")
    wait_for(lambda: recorded() >= 3, "three lines")
    (found,) = [one for one in json.loads(prism("batch", "status", "--json").out) if one["state"] == "running"]
    assert "is being cancelled by its runner" in prism("batch", "cancel", found["batch"]).out
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    summary = json.loads(out)
    assert summary["state"] == "cancelled"
    assert summary["done"] + summary["failed"] == 40
    assert summary["done"] >= 3
    assert "run them again: prism batch run in.jsonl -o out.jsonl --retry-errors" in err
    assert {row["error"]["code"] for row in rows("out.errors.jsonl")} == {"batch_cancelled"}
    assert "is over already: cancelled" in prism("batch", "cancel", found["batch"]).out
    assert prism("batch", "run", "in.jsonl", "-o", "out.jsonl", "--retry-errors").code == 0
    assert len(rows("out.jsonl")) == 40
    assert not Path("out.errors.jsonl").exists()


def test_what_does_not_exist_is_one_line_and_a_code(prism: Prism, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("status", "cancel"):
        said = prism("batch", command, "01ABSENT")
        assert (said.code, said.err.strip()) == (1, "prism: no batch 01ABSENT")
    put("in.jsonl", line("a"))
    said = prism("batch", "run", "in.jsonl", "-o", "out.jsonl", "--redis-url", "redis://127.0.0.1:1")
    assert said.code == 75
    assert "cannot reach the broker" in said.err
    assert prism("batch", "run", "in.jsonl").code == 2


def test_progress_is_told_in_words() -> None:
    totals = Totals(100, done=20, failed=2)
    assert told(Progress(totals, 8, 900, 123.4, 2.0, 39.0)) == "2 failed, 8 running, 123 tokens/s, 39 s left"
    assert told(Progress(Totals(100), 0, 0, 0.0, 0.0, None, "a worker")) == (
        "0 running, 0 tokens/s, waiting for a worker"
    )
    assert [human_time(seconds) for seconds in (0.2, 90, 91, 5340, 5400, 12_345)] == [
        *("1 s", "2 min", "2 min"),
        *("89 min", "1 h 30 min", "3 h 26 min"),
    ]


@pytest.mark.full
def test_fifty_thousand_lines_give_their_first_answer_soon(tmp_path: Path, pool: Pool, prism: Prism) -> None:
    """Prints the time from the start of the command to the first readable answer."""
    with open("in.jsonl", "w") as file:
        for number in range(50_000):
            system = f"You are assistant {number % 50}. " + "Weigh every word with care. " * 60
            body = {"messages": [{"role": "system", "content": system}, {"role": "user", "content": "word " * 400}]}
            body |= {"model": "toy", "max_tokens": 4}
            file.write(json.dumps({"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": body}) + "\n")
    began = time.monotonic()
    process = started(pool, "in.jsonl", "-o", "out.jsonl")
    wait_for(lambda: recorded() >= 1, "the first answer", 120)
    first = time.monotonic() - began
    status = Path(f"/proc/{process.pid}/status").read_text()
    memory = int(next(row for row in status.splitlines() if row.startswith("VmHWM")).split()[1]) // 1024
    size = Path("in.jsonl").stat().st_size / 2**20
    assert memory < 200
    (found,) = [one for one in json.loads(prism("batch", "status", "--json").out) if one["state"] == "running"]
    prism("batch", "cancel", found["batch"])
    process.communicate(timeout=120)
    assert process.returncode == 1
    assert len(rows("out.jsonl")) + len(rows("out.errors.jsonl")) == 50_000
    print(f"50,000 lines, {size:.0f} MiB: first answer after {first:.1f} s, runner's memory {memory} MiB")
