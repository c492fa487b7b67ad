"""A whole input file: each problem with its line, a plan that finds every line again, and little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from broker.batch import validate as validation
from broker.batch.errors import BadFile, Problem
from broker.batch.plan import Plan, PlanUnreadable
from broker.batch.validate import MAX_LINES, digest, validate
from broker.gateway.config import GatewayConfig
from tests.unit.batch.samples import chat, pack, text, written

CONFIG = GatewayConfig()
ROOT = Path(__file__).parents[3]


def problems(path: Path, **options: str) -> list[Problem]:
    with pytest.raises(BadFile) as caught:
        validate(path, CONFIG, **options)
    return caught.value.problems


def test_a_plan_finds_every_line_again(tmp_path: Path) -> None:
    values = [chat(f"id-{number}", "x" * number) for number in range(50)]
    path = written(tmp_path / "in", values)
    plan = validate(path, CONFIG)
    assert plan.count == 50
    assert sorted(plan.order) == list(range(50))
    with open(path, "rb") as file:
        for index in plan.order:
            assert json.loads(plan.read(file.fileno(), index)) == values[index]


@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n", b"\n\n\n", b"\n  \n"])
def test_the_end_of_a_file_may_look_as_editors_leave_it(tmp_path: Path, ending: bytes) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"\xef\xbb\xbf" + pack(chat("a")) + b"\r\n" + pack(chat("b")) + ending)
    plan = validate(path, CONFIG)
    assert plan.count == 2
    assert digest(path) == plan.sha256
    with open(path, "rb") as file:
        assert [json.loads(plan.read(file.fileno(), index))["custom_id"] for index in range(2)] == ["a", "b"]


def test_every_bad_line_is_named_not_only_the_first(tmp_path: Path) -> None:
    rows = [chat("a"), b"{", chat("b"), chat("c", temperature=99), chat("a")]
    found = problems(written(tmp_path / "in", rows))
    assert [problem.line for problem in found] == [2, 4, 5]
    assert [problem.code for problem in found] == ["invalid_json", "invalid_value", "duplicate_custom_id"]
    assert str(found[2]) == "line 5: custom_id 'a' was used before, in line 1"


def test_many_problems_are_counted_and_the_first_ones_told(tmp_path: Path) -> None:
    path = written(tmp_path / "in", [b"{"] * 500)
    with pytest.raises(BadFile, match="499 more") as caught:
        validate(path, CONFIG)
    assert len(caught.value.problems) == validation.MAX_PROBLEMS
    assert caught.value.total == 500


def test_a_blank_line_in_the_middle_is_a_problem(tmp_path: Path) -> None:
    assert [(p.line, p.code) for p in problems(written(tmp_path / "in", [chat("a"), b"", b" ", chat("b")]))] == [
        (2, "blank_line")
    ]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_a_file_without_a_request_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "in"
    path.write_bytes(content)
    assert len(problems(path)) == 1


def test_a_line_that_is_too_long_is_named_and_the_next_one_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "MAX_LINE_BYTES", 300)
    just = chat("b", "")
    just["body"]["messages"][0]["content"] = "x" * (300 - len(pack(just)))
    rows = [chat("a", "x" * 10_000_000), just, b"{"]
    found = problems(written(tmp_path / "in", rows))
    assert [(problem.line, problem.code) for problem in found] == [(1, "line_too_long"), (3, "invalid_json")]


def test_the_limits_of_lines_and_bytes_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "in", [chat(str(number)) for number in range(4)])
    monkeypatch.setattr(validation, "MAX_LINES", 3)
    assert [(p.line, p.code) for p in problems(path)] == [(4, "too_many_lines")]
    monkeypatch.setattr(validation, "MAX_BYTES", path.stat().st_size - 1)
    (found,) = problems(path)
    assert found.code == "file_too_large"
    assert str(path.stat().st_size) in found.message


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    assert problems(tmp_path / "absent")[0].code == "unreadable"
    assert problems(tmp_path)[0].code == "unreadable"
    os.mkfifo(tmp_path / "pipe")
    keep = os.open(tmp_path / "pipe", os.O_RDWR)
    assert problems(tmp_path / "pipe")[0].code == "not_a_file"
    os.close(keep)


def test_the_models_that_lines_name_are_kept_with_their_first_line(tmp_path: Path) -> None:
    rows = [chat("a"), chat("b", model="m"), text("c", model="n"), text("d", model="m")]
    assert validate(written(tmp_path / "in", rows), CONFIG).models == {"m": 2, "n": 3}


def test_a_plan_outlives_its_process_and_knows_its_lines_names(tmp_path: Path) -> None:
    plan = validate(written(tmp_path / "in", [chat(str(number), "x" * 300) for number in range(9)]), CONFIG)
    plan.save(tmp_path / "plan")
    again = Plan.load(tmp_path / "plan")
    assert vars(again) == vars(plan)
    assert plan.requests(4, 2, 3) == [f"b{plan.batch}-5-2", f"b{plan.batch}-5-2-1", f"b{plan.batch}-5-2-2"]
    assert plan.parse_id(plan.line_id(4, 2)) == (4, 2)
    for other in (f"batch_req_{plan.batch}-10-1", f"batch_req_{plan.batch}-0-1", "batch_req_X-1-1", None, 7):
        assert plan.parse_id(other) is None


def test_a_broken_plan_is_an_error_not_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "plan"
    validate(written(tmp_path / "in", [chat()]), CONFIG).save(path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(PlanUnreadable):
            Plan.load(path)
    for other in (b"\x01", b"\x80", b"\x81\xa7version\x01"):
        path.write_bytes(other)
        with pytest.raises(PlanUnreadable):
            Plan.load(path)


def test_a_plan_takes_the_place_of_a_longer_one_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "plan"
    validate(written(tmp_path / "in", [chat(str(number)) for number in range(100)]), CONFIG).save(path)
    inode = path.stat().st_ino
    small = validate(written(tmp_path / "in", [chat()]), CONFIG)
    small.save(path)
    assert path.stat().st_ino == inode
    assert vars(Plan.load(path)) == vars(small)


def test_the_reading_can_be_stopped(tmp_path: Path) -> None:
    path = written(tmp_path / "in", [chat(str(number)) for number in range(validation.REPORT_LINES + 1)])

    def stop(done: int, total: int) -> None:
        assert 0 < done < total
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        validate(path, CONFIG, report=stop)


MEASURE = """
import re, sys, time
from pathlib import Path
from broker.batch.validate import validate
from broker.gateway.config import GatewayConfig
began = time.perf_counter()
plan = validate(Path(sys.argv[1]), GatewayConfig())
seconds = time.perf_counter() - began
most = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())
print(plan.count, seconds, int(most[1]) // 1024)
"""


def measured(path: Path) -> tuple[int, float, int]:
    """(lines, seconds, most memory in MiB) of a check in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines, seconds, memory = done.stdout.split()
    return int(lines), float(seconds), int(memory)


def test_memory_does_not_grow_with_the_lines_texts(tmp_path: Path) -> None:
    small = measured(written(tmp_path / "small", [chat(str(number)) for number in range(2000)]))
    large = measured(written(tmp_path / "large", [chat(str(number), "x" * 20_000) for number in range(2000)]))
    print(f"2,000 lines of 0.2 KB: {small[2]} MiB; of 20 KB (40 MB): {large[2]} MiB in {large[1]:.2f} s")
    assert large[2] - small[2] < 16


@pytest.mark.full
def test_the_largest_file_is_checked_in_less_than_200_mib(tmp_path: Path) -> None:
    path = tmp_path / "in"
    with open(path, "wb") as file:
        for number in range(MAX_LINES):
            system = f"You are assistant {number % 100}. " + "Consider every word with care. " * 60
            file.write(pack(chat(f"request-{number}", f"{number} " + "word " * 400, system, model="m")) + b"\n")
    lines, seconds, memory = measured(path)
    print(f"{lines} lines, {path.stat().st_size / 2**20:.0f} MiB: {seconds:.1f} s, {memory} MiB")
    assert lines == MAX_LINES
    assert memory < 200
