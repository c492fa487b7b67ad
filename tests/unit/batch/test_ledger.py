"""Finished lines on disk, and every way in which writing them can be cut off."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.batch import ledger as ledger_module
from broker.batch import lock as lock_module
from broker.batch.errors import Busy, FilesFailed
from broker.batch.ledger import DONE, FAILED, OPEN, Entry, Ledger, part_of, recorded
from broker.batch.lock import BatchLock
from broker.batch.plan import Plan
from tests.unit.batch.samples import read

COUNT = 6
PLAN = Plan("0" * 26, "", 0, array("Q", range(COUNT + 1)), array("I", range(COUNT)), array("I", [0] * COUNT))


def entry(index: int, ok: bool = True, attempt: int = 1, tokens: int = 3) -> Entry:
    usage: dict[str, Any] = {"prompt_tokens": 5, "completion_tokens": tokens}
    response = {"status_code": 200, "body": {"usage": usage}} if ok else None
    value = {"id": PLAN.line_id(index, attempt), "custom_id": f"c{index}", "response": response, "error": None}
    return Entry(index, attempt, ok, json.dumps(value).encode(), usage if ok else {})


class Files:
    """An output and its errors, opened again and again."""

    def __init__(self, folder: Path) -> None:
        self.output, self.errors = folder / "out", folder / "err"

    def open(self) -> Ledger:
        return Ledger(PLAN, self.output, self.errors)

    def close(self, ledger: Ledger) -> None:
        ledger.close()

    def everything(self) -> dict[str, list[str]]:
        """custom_ids by file, of what stands there now."""
        found = {}
        for path in (self.output, part_of(self.output), self.errors, part_of(self.errors)):
            if path.exists():
                found[path.name] = [value["custom_id"] for value in read(path)]
        return found


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_what_is_recorded_is_found_again_with_its_tokens_and_tries(files: Files) -> None:
    ledger = files.open()
    ledger.record([entry(2), entry(0, ok=False), entry(1, attempt=3)])
    files.close(ledger)
    again = files.open()
    assert list(again.state) == [FAILED, DONE, DONE, OPEN, OPEN, OPEN]
    assert list(again.attempts) == [1, 3, 1, 0, 0, 0]
    assert vars(again.totals) == vars(ledger.totals)
    assert (again.totals.done, again.totals.failed, again.totals.left) == (2, 1, 3)
    assert (again.totals.prompt_tokens, again.totals.completion_tokens) == (10, 6)
    files.close(again)


def test_partial_output_is_readable_line_by_line_while_it_grows(files: Files) -> None:
    ledger = files.open()
    for index in range(3):
        ledger.record([entry(index)])
        assert files.everything() == {"out.part": [f"c{at}" for at in range(index + 1)], "err.part": []}
    files.close(ledger)


def test_a_line_is_recorded_once_whoever_repeats_it(files: Files) -> None:
    ledger = files.open()
    ledger.record([entry(0)])
    ledger.record([entry(0), entry(1)])
    ledger.record([entry(0, ok=False)])
    files.close(ledger)
    assert files.everything() == {"out.part": ["c0", "c1"], "err.part": []}


@pytest.mark.parametrize("ok", [True, False])
def test_a_torn_last_line_is_dropped_wherever_it_was_torn(files: Files, ok: bool) -> None:
    ledger = files.open()
    ledger.record([entry(0, ok=ok)])
    keep = part_of(files.output if ok else files.errors).stat().st_size
    ledger.record([entry(1, ok=ok)])
    files.close(ledger)
    part = part_of(files.output if ok else files.errors)
    whole = part.read_bytes()
    for size in range(keep, len(whole)):
        part.write_bytes(whole[:size])
        ledger = files.open()
        assert [index for index, state in enumerate(ledger.state) if state != OPEN] == [0]
        ledger.record([entry(2, ok=ok)])
        files.close(ledger)
        assert [value["custom_id"] for value in read(part)] == ["c0", "c2"]


def test_a_block_of_zeros_that_a_power_cut_left_costs_only_itself(files: Files) -> None:
    ledger = files.open()
    ledger.record([entry(0)])
    files.close(ledger)
    with open(part_of(files.output), "ab") as file:
        file.write(b"\0" * 100 + b"\n" + entry(1).text + b"\n" + b"\0" * 50)
    ledger = files.open()
    assert list(ledger.state)[:3] == [DONE, DONE, OPEN]
    ledger.record([entry(index) for index in range(2, COUNT)])
    ledger.finish()
    files.close(ledger)
    assert files.everything() == {"out": [f"c{index}" for index in range(COUNT)]}


def test_a_line_of_another_batch_is_refused_not_counted(files: Files) -> None:
    part_of(files.output).write_bytes(entry(0).text.replace(b"0" * 26, b"1" * 26) + b"\n")
    with pytest.raises(FilesFailed, match="none of this batch"):
        files.open()


def test_finished_files_get_their_names_and_no_errors_make_no_file(files: Files) -> None:
    ledger = files.open()
    ledger.record([entry(index) for index in (3, 1, 0, 2, 5, 4)])
    ledger.finish()
    files.close(ledger)
    assert files.everything() == {"out": ["c3", "c1", "c0", "c2", "c5", "c4"]}
    totals = recorded(PLAN, files.output, files.errors)
    assert (totals.done, totals.failed, totals.completion_tokens) == (6, 0, 18)


def test_finished_files_can_be_sorted(files: Files) -> None:
    ledger = files.open()
    ledger.record([entry(index, ok=index % 2 == 0) for index in (3, 1, 0, 2, 5, 4)])
    ledger.finish(ordered=True)
    files.close(ledger)
    assert files.everything() == {"out": ["c0", "c2", "c4"], "err": ["c1", "c3", "c5"]}


def test_a_retry_replaces_the_error_and_leaves_what_was_done(files: Files) -> None:
    ledger = files.open()
    ledger.record([entry(index, ok=index not in (1, 4)) for index in range(COUNT)])
    ledger.finish()
    files.close(ledger)
    ledger = files.open()
    assert ledger.retry_failed() == 2
    assert ledger.totals.left == 2
    ledger.record([entry(1, attempt=2), entry(4, ok=False, attempt=2)])
    assert (ledger.totals.done, ledger.totals.failed, ledger.totals.left) == (5, 1, 0)
    ledger.finish()
    files.close(ledger)
    assert files.everything() == {"out": ["c0", "c2", "c3", "c5", "c1"], "err": ["c4"]}
    assert read(files.errors)[0]["id"] == PLAN.line_id(4, 2)


def test_a_retry_that_is_cut_off_keeps_errors_until_they_are_replaced(files: Files) -> None:
    ledger = files.open()
    ledger.record([entry(index, ok=index > 2) for index in range(COUNT)])
    ledger.finish()
    files.close(ledger)
    ledger = files.open()
    ledger.retry_failed()
    ledger.record([entry(0, attempt=2)])
    files.close(ledger)
    ledger = files.open()
    assert list(ledger.state) == [DONE, FAILED, FAILED, DONE, DONE, DONE]
    assert list(ledger.attempts)[:3] == [2, 1, 1]
    assert (ledger.totals.done, ledger.totals.failed) == (4, 2)
    ledger.finish()
    files.close(ledger)
    assert files.everything() == {"out": ["c3", "c4", "c5", "c0"], "err": ["c1", "c2"]}


class Cut(BaseException):
    """The process dies here."""


class Scissors:
    """Counts the calls that change files, and dies before the `at`-th."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = -1
        self.count = 0
        for owner, name in ((os, "replace"), (os, "rename"), (os, "write"), (os, "fsync"), (Path, "unlink")):
            monkeypatch.setattr(owner, name, self._before(getattr(owner, name)))

    def _before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def cut(*args: Any, **options: Any) -> Any:
            if self.count == self.at:
                raise Cut
            self.count += 1
            return call(*args, **options)

        return cut


@pytest.mark.parametrize("ordered", [False, True])
def test_cut_off_before_any_change_of_a_file_nothing_is_lost_or_doubled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    scissors = Scissors(monkeypatch)
    at = 0
    while True:
        files = Files(tmp_path / str(at))
        files.output.parent.mkdir()
        scissors.count, scissors.at = 0, at
        done = _whole_life(files, ordered)
        scissors.at = -1
        if done:
            break
        assert _whole_life(files, ordered)
        found = files.everything()
        assert sorted(found["out"]) == ["c0", "c1", "c2", "c3", "c4"], at
        assert found == {"out": found["out"], "err": ["c5"]}, at
        at += 1
    print(f"cut before each of {at} changes of files")
    assert at > 15


def _whole_life(files: Files, ordered: bool) -> bool:
    """A batch, its finish, and a retry of one of its failed lines; False if it was cut off."""
    ledger = None
    try:
        ledger = files.open()
        ledger.record(entry(index, ok=index < 4) for index in range(COUNT) if ledger.state[index] == OPEN)
        ledger.finish(ordered=ordered)
        ledger = files.open()
        ledger.retry_failed()
        ledger.record(
            entry(index, ok=index != 5, attempt=ledger.attempts[index] + 1)
            for index in range(COUNT)
            if ledger.state[index] == OPEN
        )
        ledger.finish(ordered=ordered)
    except Cut:
        return False
    finally:
        if ledger is not None:
            ledger.close()
    return True


def test_a_full_disk_records_nothing_and_leaves_whole_lines(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = files.open()
    ledger.record([entry(0)])
    write = os.write

    def short(file: int, data: Any) -> int:
        if len(data) > 20:
            return write(file, bytes(data[:20]))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ledger_module.os, "write", short)
    with pytest.raises(FilesFailed, match=r"out\.part: No space left on device"):
        ledger.record([entry(1)])
    monkeypatch.undo()
    assert ledger.state[1] == OPEN
    assert ledger.totals.done == 1
    ledger.record([entry(1)])
    files.close(ledger)
    assert files.everything()["out.part"] == ["c0", "c1"]


def test_a_disk_that_fails_to_sync_records_nothing(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = files.open()

    def fail(file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(ledger_module.os, "fsync", fail)
    with pytest.raises(FilesFailed, match="Input/output error"):
        ledger.record([entry(0)])
    monkeypatch.undo()
    assert (ledger.state[0], ledger.totals.done) == (OPEN, 0)
    files.close(ledger)
    assert files.everything()["out.part"] == []


def test_a_writer_without_the_batchs_lock_is_refused(files: Files) -> None:
    ledger = files.open()
    with pytest.raises(Busy, match=r"out\.part"):
        files.open()
    files.close(ledger)
    files.close(files.open())


def test_a_second_holder_of_the_lock_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    lock = BatchLock(tmp_path / "plan")
    with pytest.raises(Busy, match="plan is being written by another process"):
        BatchLock(tmp_path / "plan")
    lock.close()
    lock.close()
    BatchLock(tmp_path / "plan").close()


def _hold(path: str, ready: Any) -> None:
    lock = BatchLock(Path(path))
    ready.send(True)
    ready.recv()
    lock.close()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[multiprocessing.process.BaseProcess]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_hold, args=(str(tmp_path / "plan"), there))
    process.start()
    assert here.recv()
    yield process
    process.kill()
    process.join()


def test_the_lock_ends_with_its_process(tmp_path: Path, holder: multiprocessing.process.BaseProcess) -> None:
    with pytest.raises(Busy):
        BatchLock(tmp_path / "plan")
    holder.kill()
    holder.join()
    BatchLock(tmp_path / "plan").close()


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan"
    flock = lock_module.fcntl.flock

    def late(file: int, how: int) -> None:
        monkeypatch.undo()
        path.unlink()
        flock(file, how)

    monkeypatch.setattr(lock_module.fcntl, "flock", late)
    lock = BatchLock(path)
    with pytest.raises(Busy):
        BatchLock(path)
    lock.close()


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(FilesFailed, match=r"cannot write .*absent/plan: No such file"):
        BatchLock(tmp_path / "absent" / "plan")
    with pytest.raises(FilesFailed, match=r"cannot write .*absent/out\.part: No such file"):
        Ledger(PLAN, tmp_path / "absent" / "out", tmp_path / "absent" / "err")
