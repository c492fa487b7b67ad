"""Draws by the kernel: to the token those of the full order, whatever the logits and wherever the kernel looks."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from prism_core import TemperatureSampler
from prism_core.kernels import selection
from prism_core.kernels.dealing import FEW, PASSES, SMALL
from prism_core.kernels.drawing import MANY
from prism_core.kernels.surveying import SAMPLED
from prism_core.kernels.weights import BLOCK, LANES
from prism_core.penalties import Penalties
from prism_core.temperature import Plan

from . import exact

F32 = np.float32


def sampled(size: int) -> np.ndarray:
    """Where a kernel looks that wants to know what about to expect."""
    return np.arange(size) // LANES % SAMPLED == 0


TOP = float(np.finfo(F32).max)
SUBNORMAL = 1e-45
KINDS = {
    "smooth": lambda rng, size: rng.standard_normal(size) * rng.choice([1, 3, 10]),
    "flat": lambda rng, size: rng.standard_normal(size) * 1e-3,
    "equal": lambda rng, size: np.full(size, 3.0),
    "two levels": lambda rng, size: (rng.random(size) < 0.5) * 1.0,
    "steps": lambda rng, size: np.round(rng.standard_normal(size), 1),
    "all scales": lambda rng, size: -np.exp(rng.uniform(-100, 88, size)),
    "subnormal": lambda rng, size: rng.integers(0, 3, size) * SUBNORMAL,
    "dense but for outliers": lambda rng, size: np.where(
        rng.random(size) < 0.001, rng.choice([20.0, -TOP, 1e30, TOP]), rng.standard_normal(size) * 1e-5
    ),
    "zeros": lambda rng, size: np.where(rng.random(size) < 0.5, -0.0, 0.0),
    "higher where one looks": lambda rng, size: rng.standard_normal(size) + 3 * sampled(size),
    "lower where one looks": lambda rng, size: rng.standard_normal(size) - 3 * sampled(size),
    "nothing where one looks": lambda rng, size: rng.standard_normal(size) * 1e-3 - 1000 * sampled(size),
    "all where one looks": lambda rng, size: rng.standard_normal(size) * 1e-3 - 10 * ~sampled(size),
    "rising": lambda rng, size: np.sort(rng.standard_normal(size)),
    "falling evenly": lambda rng, size: np.arange(size) * -rng.choice([1e-4, 1e-3]),
    "far apart": lambda rng, size: rng.choice([-TOP, -1e38, 0.0, 1e38, TOP], size),
    "far below": lambda rng, size: np.where(np.arange(size) == size // 2, 40.0, rng.standard_normal(size)),
}
SIZES = [1, 2, 15, 16, 17, SMALL - 1, SMALL, SMALL + 1, 2 * FEW, 1000, BLOCK, MANY, MANY + 1, 5000, 30_001, 100_000]


def drawn(logits: np.ndarray, uniform: float, *, top_k=0, top_p=1.0, min_p=0.0, temperature=1.0) -> int:
    plan = Plan(logits.size, top_k, top_p, min_p, temperature, Penalties(1.0, 0.0, 0.0))
    return plan.draw(plan.address, logits.ctypes.data, logits.size, -1, 0, 0, uniform)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_a_draw_is_that_of_the_full_order(kind, size):
    seed = size
    rng = np.random.default_rng(seed)
    for trial in range(80 if size < 3000 else 20 if size < 50_000 else 6):
        logits = KINDS[kind](rng, size).astype(F32)
        asked = {
            "top_k": int(rng.choice([0, 0, 1, 20, FEW, FEW + 1, max(1, size // 2), size, size + 5])),
            "top_p": float(rng.choice([1.0, 0.95, 0.5, 5e-324])),
            "min_p": float(rng.choice([0.0, 0.0, 0.1, 1e-6, 1.0])),
            "temperature": float(rng.choice([1.0, 1.0, 0.5, 3.0, 1e-8, 1e8, 5e-324, 1e300])),
        }
        for uniform in (rng.random(), 0.0, 1 - 2**-53):
            expected = exact.draw(logits, uniform, **asked)
            assert drawn(logits, uniform, **asked) == expected, (seed, trial, asked, uniform)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_that_misleads_costs_few_passes(kind):
    """Two guesses and then whatever is left, for each of at most three steps."""
    seed = 6
    rng = np.random.default_rng(seed)
    for size in (MANY + 1, 30_001, 100_000):
        for _ in range(4):
            logits = KINDS[kind](rng, size).astype(F32)
            for asked in ((0, 1.0, 0.0), (0, 0.95, 0.0), (0, 1 - 2**-24, 0.0), (size // 3, 0.9, 1e-3)):
                plan = Plan(size, *asked, 1.0, Penalties(1.0, 0.0, 0.0))
                for uniform in (0.0, 0.3, 0.6, 0.9, 0.99, 1 - 2**-53):
                    plan.draw(plan.address, logits.ctypes.data, size, -1, 0, 0, uniform)
                    steps = (asked[0] > 0) + (asked[1] < 1) + 1
                    assert plan._words[PASSES] <= 3 * steps, (seed, size, asked, uniform)


@pytest.mark.parametrize("size", [selection.SAMPLED * selection.PARTS + more for more in (-1, 0, 1, 63, 64, 5000)])
def test_the_few_best_are_found_wherever_they_are(size):
    """A sample tells what they reach at least: they may be in it, outside it, or all equal what it tells."""
    seed = size
    rng = np.random.default_rng(seed)
    looked_at = np.arange(size) // selection.PARTS % selection.SAMPLED == 0
    for logits in (
        looked_at * 1.0,
        looked_at * -1.0,
        np.where(looked_at, 2.0, rng.standard_normal(size)),
        np.where(looked_at, -2.0, rng.integers(-3, 3, size)),
        np.arange(size),
        -np.arange(size),
        np.full(size, -TOP),
        np.where(rng.random(size) < 40 / size, 0.0, -TOP),
    ):
        logits = logits.astype(F32)
        for top_k in (1, 2, FEW - 1, FEW):
            for uniform in (0.0, 0.5, 1 - 2**-53):
                asked = {"top_k": top_k, "temperature": 1e30}
                assert drawn(logits, uniform, **asked) == exact.draw(logits, uniform, **asked), (seed, top_k)


def test_the_weights_are_those_of_the_softmax():
    x = -np.random.default_rng(1).uniform(0, 29, 100_000).astype(F32)
    assert np.abs(exact.exponential(x) / np.exp(x.astype(np.float64)) - 1).max() < 2e-7
    logits = x * F32(3)
    for temperature in (0.7, 1.0, 5.0):
        share = exact.weights(logits, F32(0), temperature) / exact.UNIT
        assert np.abs(share - np.exp(logits.astype(np.float64) / temperature)).max() < 1e-6


@pytest.mark.parametrize("uniform", [0.0, 0.1, 0.5, 0.9, 1 - 2**-53])
def test_equals_are_drawn_by_id(uniform):
    for size in (1, 100, 4096, 12_288):
        logits = np.zeros(size, dtype=F32)
        few = max(1, size // 4)
        assert drawn(logits, uniform) == int(uniform * size)
        assert drawn(logits, uniform, top_k=few) == int(uniform * few)
        if size % 4 == 0:
            assert drawn(logits, uniform, top_p=0.25) == int(uniform * size / 4)


def test_where_the_logits_begin_in_memory_makes_no_difference():
    rng = np.random.default_rng(4)
    for size in (1, 63, 1000, 5001):
        logits = (rng.standard_normal(size) * 2).astype(F32)
        for shift in (1, 3, 8, 15):
            room = np.full(size + 32, np.nan, dtype=F32)  # nothing beside the logits may be taken for one
            room[shift : shift + size] = logits
            for asked in ({}, {"top_k": 100}, {"top_p": 0.8, "temperature": 2.0}):
                moved = drawn(room[shift : shift + size], 0.6, **asked)
                assert moved == exact.draw(logits, 0.6, **asked), (size, shift, asked)


@pytest.mark.parametrize("repetition", [1.0, 1.7, 0.6, 1e300, 1e-300])
@pytest.mark.parametrize("presence", [0.0, 2.0, -2.0])
def test_a_draw_with_penalties_is_that_of_the_lowered_logits(repetition, presence):
    rng = np.random.default_rng(3)
    for size, top_k in ((5, 0), (100, 20), (3000, 0), (3000, 500)):
        penalties = Penalties(repetition, presence, 0.25)
        plan = Plan(size, top_k, 0.9, 0.0, 1.0, penalties)
        for _ in range(30):
            logits = (rng.standard_normal(size) * rng.choice([1.0, 4e37])).astype(F32)
            penalties.record(rng.integers(0, size, 3).tolist())
            lowered = logits.copy()
            for token, place in penalties._places.items():
                value = float(logits[token])
                value = value / penalties.repetition if value > 0 else value * penalties.repetition
                lowered[token] = min(max(value - penalties._offsets[place], -TOP), TOP)
            before, uniform = logits.copy(), rng.random()
            token = plan.draw(plan.address, logits.ctypes.data, size, *penalties.of(size), uniform)
            assert token == exact.draw(lowered, uniform, top_k=top_k, top_p=0.9)
            assert (logits == before).all()


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("asked", [{}, {"top_k": 1}, {"top_k": 20}, {"top_k": 200}], ids=repr)
def test_a_value_that_is_not_finite_is_noticed_anywhere(value, asked):
    for size in (1, 5, 127, 128, 300):
        logits = np.zeros(size, dtype=F32)
        plan = Plan(size, asked.get("top_k", 0), 0.9, 0.0, 1.0, Penalties(1.0, 1.0, 0.0))
        for at in range(size):
            logits[at] = value
            for penalised in (-1, 0):
                assert plan.draw(plan.address, logits.ctypes.data, size, penalised, 0, 0, 0.5) == -1, at
            logits[at] = 0.0


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-45, 1e-40, 1e-31])
@pytest.mark.parametrize("size", [3, 70, 2000, 20_000])
@pytest.mark.parametrize("top_k", [0, 2, 70, 17_000])
def test_a_tiny_temperature_tells_even_the_closest_logits_apart(temperature, size, top_k):
    """Their gap is 1.4e-45: at a temperature far below it only the best has any weight, at one far above all have."""
    logits = np.zeros(size, dtype=F32)
    logits[1] = SUBNORMAL
    sampler = TemperatureSampler(seed=1, top_k=top_k, top_p=1.0, temperature=temperature)
    seen = {sampler.sample(logits) for _ in range(20)}
    assert seen == {1} if temperature < SUBNORMAL / 100 else len(seen) > 1


def test_buffers_are_made_once_and_not_shared_with_copies():
    logits = np.zeros(20_000, dtype=F32)
    sampler = TemperatureSampler(seed=1, top_k=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler.sample(logits)
    made = sampler._plan
    sampler.sample(logits)
    assert sampler._plan is made
    twin = sampler.copy()
    twin.sample(logits)
    assert twin._plan is not made
