"""The order of every operation and check of section 10's six requests, to the letter."""

from __future__ import annotations

import pytest

from prism_core import Generation

from .fixture import SCENARIOS, Bench, Scenario


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_a_golden_request_does_exactly_these_checks_and_operations(scenario: Scenario):
    bench = scenario.prepare()
    sampled = bench.sampler.asked
    assert scenario.ask(bench) == scenario.completion
    assert str(bench.trace) == scenario.trace
    assert bench.runtime.tokens == scenario.history
    assert bench.decoder.state == scenario.history
    assert bench.emitted == scenario.history[len(scenario.prompt) :]
    assert bench.sampler.asked == sampled + 1
    assert bench.runtime.checkpoint_count == min(len(scenario.earlier) + 1, 4)


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_greedy_by_default_answers_the_same_without_a_sampler_a_deadline_or_an_emit(scenario: Scenario):
    bench = scenario.prepare()
    quiet = {"sampler": None, "emit": None, "deadline": None, "cancellation": None}
    assert scenario.ask(bench, **quiet) == scenario.completion
    assert bench.runtime.tokens == scenario.history
    silent = [entry for entry in scenario.trace.split() if entry != "P" and not entry.startswith("emit")]
    assert bench.trace.entries == silent  # the clock is read at every check, deadline or not


@pytest.mark.parametrize("block", [1, 2, 3, 4, 5, 6, 7, 512])
def test_the_block_size_changes_no_result(block: int):
    bench = Bench()
    bench.ask([2, 3, 4, 5, 6, 7, 0], Generation(5), block=block)
    assert bench.runtime.tokens == [2, 3, 4, 5, 6, 7, 0, 3, 6, 4, 0, 0]
    cuts = "".join(entry for entry in bench.trace.entries if entry[0] in ".I").replace("I", "")
    assert [run for run in cuts.strip(".").split(".") if run and run not in "0"] == [
        "234567"[at : at + block] for at in range(0, 6, block)
    ]


def test_the_fixture_is_deterministic_over_many_tokens():
    bench = Bench()
    bench.ask([1], Generation(6))
    assert bench.runtime.tokens == [1, 1, 2, 4, 0, 0, 0]
    assert " ".join(entry for entry in bench.trace.operations if entry != "P") == (
        "C R E1 E1 emit1 E2 emit2 E4 emit4 E0 emit0 E0 emit0 E0 emit0 C"
    )
    assert " . . P . . . E4 . . emit4 . . P . . . E0 . . emit0 . . P" in str(bench.trace)
