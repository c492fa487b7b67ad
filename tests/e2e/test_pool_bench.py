"""The pool bench runs and gives each figure a sane value; the figures themselves are for a quiet machine to judge."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ops.bench.pool import bench_pool
from tests.pool import ROOT


def test_the_pool_bench_measures_every_promise(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    path = Path("toy?step_s=0.003")
    figures = bench_pool(path, opener="tests.toy:open_toy", rounds=4, kills=1, stalls=0)
    print(*(figure.line() for figure in figures), sep="\n")
    assert [figure.promise for figure in figures] == ["P17", "P11", "P11", "P8", "P8", "P6", "P7", "P10", "P10"]
    stalls = figures.pop(6)
    assert math.isnan(stalls.value), "no stall was asked for"
    assert not stalls.holds
    assert all(math.isfinite(figure.value) for figure in figures)
