"""The engine's benches run on a real file and count what they say; their figures are for a quiet machine to judge."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ops.bench.engine import Measure, Player, Report, bench_engine
from ops.bench.sharing import bench_sharing, busy_process
from ops.bench.synthetic import preset
from prism_core.errors import PrismError
from tests.pool import ROOT


def quiet(what: str, done: int, total: int) -> None:
    """Nobody looks at the progress here."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "tiny.gguf"
    return preset(
        path, "qwen3-0.6b", type="Q4_0", layers=1, embd=64, ffn=128, heads=2, kv_heads=1, head_dim=32, vocab=300
    )


def test_the_engine_bench_measures_each_kind_of_work_in_each_round(tiny: Path):
    found = bench_engine(tiny, threads=1, rounds=2, peer=None, short=True, report=quiet)
    assert [measure.name for measure in found.measures] == ["prefill 32", "decode 8"]
    assert all(len(measure.prism) == 2 and min(measure.prism) > 0 for measure in found.measures)
    assert found.bytes == tiny.stat().st_size
    assert json.loads(json.dumps(found.as_json()))["ratios"] == {"prefill 32": [], "decode 8": []}


def test_a_table_gives_the_median_of_the_ratios_and_their_range():
    measure = Measure("decode 128", prism=[10.0, 30.0, 20.0], peer=[10.0, 10.0, 5.0])
    report = Report("m.gguf", 2_000_000_000, 1, 3, [40.0, 80.0, 60.0], [measure], {"prism": 1.0}, {"prism": 1_000_000})
    row = report.as_markdown().splitlines()[-1]
    assert row == "| decode 128 | 20.0 | 10.0 | 3.00 (1.00-4.00) | 40.0 | 67 % |"


def test_a_peer_that_is_not_installed_is_named_with_the_remedy(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PRISM_PEER_PYTHON", sys.executable)
    with pytest.raises(PrismError, match=r"llama.cpp side stopped: .*install the extra `bench`"):
        bench_engine(tiny, threads=1, rounds=1, peer="llama.cpp", short=True, report=quiet)


def test_players_can_work_at_the_same_time(tiny: Path):
    players = [Player("prism", tiny, 1) for _ in range(2)]
    try:
        for player in players:
            player.tell({"do": "decode", "tokens": 4, "depth": 3})
        assert all(player.answer()["tokens_per_second"] > 0 for player in players)
    finally:
        for player in players:
            player.close()


def test_the_busy_neighbour_ends_with_its_block():
    with busy_process() as pid:
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_sharing_bench_answers_its_three_questions(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = bench_sharing(tiny, threads=2, workers=2, rounds=1, peer=None, report=quiet)
    assert [len(line.prism) for line in found.lines] == [1, 1, 1]
    assert all(line.prism[0] > 0 and not line.peer for line in found.lines)
    assert len(found.as_markdown().splitlines()) == 7


def test_the_command_refuses_a_peer_that_it_does_not_know(tiny: Path):
    for command in ("engine", "sharing"):
        done = subprocess.run(
            [sys.executable, "-m", "ops.cli", "bench", command, str(tiny), "--peer", "other"],
            capture_output=True, text=True, timeout=60, cwd=ROOT,
        )  # fmt: skip
        assert done.returncode == 2
        assert "peer must be llama.cpp" in done.stderr
