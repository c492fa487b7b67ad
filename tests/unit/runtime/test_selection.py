"""The compiled selection of the few highest logits: exactly what numpy's selects, wherever it is used."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from prism_core import (
    DeadlineExceeded,
    DecoderError,
    Generation,
    Limits,
    Runtime,
    SamplerError,
    TemperatureSampler,
)
from prism_core.candidates import FEW, Few, Selector
from prism_core.kernels.selection import BLOCK, few_highest
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
    before = Few._lent
    few_highest.warm()
    Few.lend(few_highest)
    yield
    Few.lend(before)


def by_numpy(action):
    """What `action` gives without the compiled function."""
    before = Few._lent
    Few.lend(None)
    try:
        return action()
    finally:
        Few.lend(before)


def run(logits: np.ndarray, count: int) -> tuple[int, list[int], list[float]]:
    """The kernel, with a guard behind each of its outputs."""
    ids, values = np.full(count + 1, -7, dtype=np.int64), np.full(count + 1, -7, dtype=F32)
    finite = few_highest(logits.ctypes.data, logits.size, count, ids.ctypes.data, values.ctypes.data)
    assert (ids[count], values[count]) == (-7, -7)
    return finite, ids[:count].tolist(), values[:count].tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_the_highest_come_in_order_whatever_their_number(kind, size):
    rng = np.random.default_rng(size)
    logits = KINDS[kind](rng, size).astype(F32)
    order = np.lexsort((np.arange(size), -logits))
    for count in {1, 2, 20, FEW} & set(range(1, size + 1)):
        assert run(logits, count) == (1, order[:count].tolist(), logits[order[:count]].tolist())
    shifted = np.concatenate((logits[:1], logits))[1:]  # not aligned to more than a float
    assert run(shifted, 1)[1] == order[:1].tolist()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -np.nan])
@pytest.mark.parametrize("size", SIZES[:-1])
def test_a_value_that_is_not_finite_is_noticed_anywhere(size, value):
    for at in range(size):
        logits = np.zeros(size, dtype=F32)
        logits[at] = value
        assert run(logits, 1)[0] == 0, at
    assert run(np.full(size, value, dtype=F32), 1)[0] == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 5, 300, 20_000])
def test_a_selector_gives_the_same_with_and_without_it(kind, size, lent):
    logits = KINDS[kind](np.random.default_rng(size), size).astype(F32)
    for count in (1, 20, FEW):
        assert Selector(size).few(logits, count) == by_numpy(lambda count=count: Selector(size).few(logits, count))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 1},
        {"top_k": FEW},
        {"top_k": FEW + 1},
        {"top_k": 0, "top_p": 1.0},
        {"top_k": 0, "top_p": 0.9, "temperature": 2.0},
        {"top_k": 0, "top_p": 1.0, "min_p": 0.1},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"temperature": 0, "presence_penalty": 1.0},
    ],
    ids=repr,
)
@pytest.mark.parametrize("size", [1, 20, 64, 65, 2000, 20_000])
def test_a_sampler_draws_the_same_with_and_without_it(options, size, lent):
    rows = (np.random.default_rng(size).standard_normal((40, size)) * 3).astype(F32)
    rows[::5] = np.round(rows[::5])
    strided = np.repeat(rows[0], 2)[::2]  # the kernel takes no such vector

    def draws() -> list[int]:
        sampler = TemperatureSampler(seed=3, **options)
        return [sampler.sample(row) for row in (*rows, strided, rows[0].astype(np.float64), rows[0].astype(">f4"))]

    assert draws() == by_numpy(draws)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("options", [{}, {"top_k": 0}, {"top_k": 100}, {"temperature": 0}, {"presence_penalty": 1.0}])
def test_a_sampler_refuses_the_same_logits_with_the_same_words(value, options, lent):
    for at in (0, 1, 999):
        logits = np.zeros(1000, dtype=F32)
        logits[at] = value
        with pytest.raises(SamplerError) as caught:
            TemperatureSampler(seed=1, **options).sample(logits)
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
