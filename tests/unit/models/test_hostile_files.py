"""Files that nobody should trust: each runs, and right, or is refused in one sentence; no other end is accepted.

Every case goes through `prism models inspect`, `open_model`, the tokenizer, the chat template, a decoder and a Runtime
in a process of its own (hostile.py). The default suite takes a sample; `--full` takes all of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.models.mutations import FAMILIES, Case, at_random, huge

ROOT = Path(__file__).parents[3]
SECONDS = 60.0
EACH_NTH = 41
RANDOM_CASES, ALL_RANDOM_CASES = 48, 1500
SEED = 20


class Examiner:
    """The process that examines files."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "model.gguf"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.models.hostile", str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
        )  # fmt: skip
        assert self._read() == "ready"

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def outcome(self, path: Path, **options: Any) -> tuple[str, str]:
        assert self._process.stdin is not None
        print(
            json.dumps({"path": str(path), "options": options, "seconds": SECONDS}),
            file=self._process.stdin,
            flush=True,
        )
        kind, text = json.loads(self._read())
        return kind, text

    def check(self, cases: list[Case]) -> Counter[str]:
        """Examine all; the error lists what was found."""
        count: Counter[str] = Counter()
        findings = []
        for name, build in cases:
            path = build(self.path)
            if path is None:
                continue
            kind, text = self.outcome(path)
            count[kind] += 1
            if kind not in ("ran", "refused", "overflowed"):
                findings.append(f"{name}: {kind}: {text}")
        assert not findings, "\n".join(findings)
        return count

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture(scope="module")
def examiner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Examiner]:
    made = Examiner(tmp_path_factory.mktemp("hostile"))
    yield made
    made.close()


def test_a_sample_of_odd_files_runs_right_or_is_refused(examiner: Examiner) -> None:
    cases = [case for family in FAMILIES.values() for case in family()]
    print(f"every {EACH_NTH}th of {len(cases)} cases, from {SEED}")
    count = examiner.check(cases[SEED::EACH_NTH])
    assert min(count["ran"], count["refused"]) > 3, count


def test_a_sample_of_random_files_runs_right_or_is_refused(examiner: Examiner) -> None:
    print(f"seeds {SEED} to {SEED + RANDOM_CASES - 1}")
    count = examiner.check([(f"seed {seed}", at_random(seed)) for seed in range(SEED, SEED + RANDOM_CASES)])
    assert min(count["ran"], count["refused"]) > 3, count


def test_a_file_that_claims_to_be_huge_is_refused_unread(examiner: Examiner) -> None:
    path = huge(examiner.path)
    assert path.stat().st_size > 500 << 30
    kind, text = examiner.outcome(path)
    assert kind == "refused"
    assert "needs 550,425,985,856 bytes" in text
    assert "over the memory budget of 201,326,592" in text


@pytest.mark.full
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_odd_file_runs_right_or_is_refused(examiner: Examiner, family: str) -> None:
    count = examiner.check(list(FAMILIES[family]()))
    assert min(count["ran"], count["refused"] + count["overflowed"]) > 10, count


@pytest.mark.full
@pytest.mark.timeout(5400)
def test_many_random_files_run_right_or_are_refused(examiner: Examiner) -> None:
    cases = [(f"seed {seed}", at_random(seed)) for seed in range(1000, 1000 + ALL_RANDOM_CASES)]
    count = examiner.check(cases)
    assert min(count["ran"], count["refused"]) > 100, count
