"""Sixty kills, stalls, cut connections and broker deaths in a row: every promise holds, seen from outside."""

from __future__ import annotations

import os
import random

from ops.bench.chaos import Chaos
from tests.pool import ROOT


def test_a_pool_under_kills_stalls_and_a_dying_broker_breaks_no_promise():
    seed = int(os.environ.get("PRISM_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    chaos = Chaos(
        model="toy?step_s=0.003",
        oracle="toy",
        opener="tests.toy:open_toy",
        environment={"PYTHONPATH": str(ROOT)},
        seed=seed,
        kills=60,
        minutes=0.6,
        say=print,
    )
    report = chaos.go()
    print(report.to_dict())
    assert not report.violations, report.violations[:5]
    assert report.kills >= 20, "a slow machine, but not that slow"
    assert report.tokens > 2000
