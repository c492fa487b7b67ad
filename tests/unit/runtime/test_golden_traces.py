"""The order of every operation and check of section 10's six requests, to the letter."""

from __future__ import annotations

import pytest

from prism_core import Completion, Finish, Generation

from .fixture import ONE, Bench

O1 = ". . . C . . . R . . . . E1 . . P . . . E1 . . emit1 . . . C ."
O2 = ". . . C . . . R . . . . I2 . . . E3 . . P . . . E5 . . emit5 . . . C ."
O3 = ". . . C . . . . P . . . E2 . . emit2 . . . C ."
O4 = ". . . C . . . S . . . . E3 . . P . . . E5 . . emit5 . . . C ."
O5 = ". . . C . . . R . . . . I2 . . . E3 . . P . . . C ."
O6 = ". . . C . . . R . . . . I2 I3 . . . I4 I5 . . . I6 I7 . . . E0 . . P . . . E3 . . emit3 . . . C ."


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_o1_to_o5_follow_each_other_on_one_runtime(bench):
    assert bench.ask([1]) == Completion(1, 0, 1, Finish.LENGTH)
    assert (str(bench.trace), bench.runtime.tokens) == (O1, [1, 1])
    bench.trace.clear()
    assert bench.ask([2, 3]) == Completion(2, 0, 1, Finish.LENGTH)
    assert (str(bench.trace), bench.runtime.tokens) == (O2, [2, 3, 5])
    bench.trace.clear()
    assert bench.ask([2, 3, 5]) == Completion(3, 3, 1, Finish.LENGTH)
    assert (str(bench.trace), bench.runtime.tokens) == (O3, [2, 3, 5, 2])
    bench.trace.clear()
    assert bench.ask([1, 1, 3]) == Completion(3, 2, 1, Finish.LENGTH)
    assert (str(bench.trace), bench.runtime.tokens) == (O4, [1, 1, 3, 5])
    bench.trace.clear()
    assert bench.ask([2, 3], Generation(1, (5,))) == Completion(2, 0, 0, Finish.STOP)
    assert (str(bench.trace), bench.runtime.tokens) == (O5, [2, 3])
    assert bench.emitted == [1, 5, 2, 5]
