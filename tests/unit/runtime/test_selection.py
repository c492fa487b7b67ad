"""The compiled search of the highest logit: exactly what numpy finds, wherever it is used."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from prism_core import (
    DeadlineExceeded,
    DecoderError,
    Generation,
    Greedy,
    Limits,
    Runtime,
    SamplerError,
    TemperatureSampler,
    greedy,
)
from prism_core.candidates import Compiled
from prism_core.kernels.selection import BLOCK, highest
from tests.unit.runtime.fixture import SCENARIOS, Bench

F32 = np.float32
SIZES = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3, 20_000]
KINDS = {
    "smooth": lambda rng, size: rng.standard_normal(size),
    "ties": lambda rng, size: rng.integers(-3, 3, size),
    "equal": lambda rng, size: np.full(size, -1.5),
    "zeros": lambda rng, size: np.where(rng.random(size) < 0.5, -0.0, 0.0),
    "rising": lambda rng, size: np.arange(size),
    "falling": lambda rng, size: -np.arange(size),
    "extreme": lambda rng, size: rng.choice([-3.4028235e38, 3.4028235e38, 1e-45, -1e-45, 0.0], size),
}


@pytest.fixture
def lent() -> Iterator[None]:
    before = Compiled.highest
    highest.warm()
    Compiled.lend(highest)
    yield
    Compiled.lend(before)


def found(logits: np.ndarray) -> int:
    return highest(logits.ctypes.data, logits.size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_the_highest_is_the_first_of_equals(kind, size):
    rng = np.random.default_rng(size)
    for _ in range(10):
        logits = KINDS[kind](rng, size).astype(F32)
        assert found(logits) == logits.argmax() == Greedy().sample(logits) == greedy(logits)
        shifted = np.concatenate((logits[:1], logits))[1:]  # not aligned to more than a float
        assert found(shifted) == logits.argmax()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -np.nan])
@pytest.mark.parametrize("size", SIZES[:-1])
def test_a_value_that_is_not_finite_is_noticed_anywhere(size, value):
    for at in range(size):
        logits = np.zeros(size, dtype=F32)
        logits[at] = value
        assert found(logits) == -1, at
    assert found(np.full(size, value, dtype=F32)) == -1


@pytest.mark.parametrize("options", [{}, {"top_k": 0}, {"top_k": 100}, {"presence_penalty": 1.0}], ids=repr)
def test_whatever_holds_the_logits_the_same_is_drawn(options):
    rows = (np.random.default_rng(6).standard_normal((60, 500)) * 3).astype(F32)
    buffer = np.empty(500, dtype=F32)
    forms = {
        "read-only": lambda row: np.frombuffer(row.tobytes(), dtype=F32),
        "one buffer": lambda row: (np.copyto(buffer, row), buffer)[1],
        "strided": lambda row: np.repeat(row, 2)[::2],
        "backwards": lambda row: row[::-1].copy()[::-1],
        "float64": lambda row: row.astype(np.float64),
        "big-endian": lambda row: row.astype(">f4"),
        "list": lambda row: row.tolist(),
    }
    for make in (Greedy, lambda: TemperatureSampler(seed=3, **options)):
        sampler = make()
        expected = [sampler.sample(row) for row in rows]
        for name, form in forms.items():
            sampler = make()
            assert [sampler.sample(form(row)) for row in rows] == expected, name
        mixed = make()
        kinds = list(forms.values())
        assert [mixed.sample(kinds[at % len(kinds)](row)) for at, row in enumerate(rows)] == expected


def test_greedy_over_float64_tells_apart_what_float32_would_not():
    assert Greedy().sample([1.0, 1.0 + 1e-12]) == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("options", [{}, {"top_k": 0}, {"top_k": 100}, {"temperature": 0}, {"presence_penalty": 1.0}])
def test_a_sampler_refuses_logits_that_are_not_finite_by_place_and_value(value, options):
    for at in (0, 1, 999):
        logits = np.zeros(1000, dtype=F32)
        logits[at] = value
        for drawn in ([], [5, at], [at, at]):
            with pytest.raises(SamplerError) as caught:
                TemperatureSampler(seed=1, **options).resume(drawn).sample(logits)
            assert str(caught.value) == f"logit {at} of 1000 is {value}, but all must be finite"


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_runtime_goes_the_same_way(name, lent):
    scenario = SCENARIOS[name]
    bench = scenario.prepare()
    assert scenario.ask(bench, sampler=None) == scenario.completion
    assert str(bench.trace) == scenario.trace.replace(" P ", " ")
    assert bench.runtime.tokens == scenario.history


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", range(8))
def test_a_logit_that_is_not_finite_is_still_the_decoders_error(at, value, lent):
    bench = Bench()
    bench.decoder.bad_logits = {at: value}
    with pytest.raises(DecoderError) as caught:
        bench.ask([1], sampler=None)
    assert str(caught.value) == f"the decoder left {F32(value)} as logit {at} of 8: all must be finite"


def test_greedy_draws_from_logits_that_were_put_back_not_from_the_last_ones(lent):
    bench = Bench(Limits(32, 4, 16_384))
    bench.ask([1], sampler=None)  # 1 1, next 2
    bench.ask([7], sampler=None)  # 7 7, next 6
    bench.ask([1, 1], sampler=None)
    assert bench.runtime.tokens == [1, 1, 2]  # from a saved prefix
    bench.trace.clear()
    bench.trace.after[3] = bench.trace.expire
    with pytest.raises(DeadlineExceeded):
        bench.ask([5, 6], sampler=None)
    bench.trace.clear()
    bench.ask([1, 1, 2], sampler=None)
    assert bench.runtime.tokens == [1, 1, 2, 4]  # from the rollback


def test_equal_logits_are_drawn_by_the_lowest_id(lent):
    class Flat:
        identity, vocab_size = "flat", 300

        def reset(self): ...
        def ingest_block(self, tokens, check): ...
        def restore(self, checkpoint): ...
        def checkpoint(self): ...

        def checkpoint_bytes(self):
            return 0

        def evaluate_into(self, token, logits):
            logits[:] = -0.0
            logits[7:] = 0.0

    runtime = Runtime(Flat(), Limits(9, 0, 10_000))
    runtime.generate([1], Generation(3))
    assert runtime.tokens == [1, 0, 0, 0]
