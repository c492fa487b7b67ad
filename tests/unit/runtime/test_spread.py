"""Draws from a whole large vocabulary: the same as from the full order in float64, without putting it in order."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from prism_core import TemperatureSampler, candidates, spread
from prism_core.spread import FEW_ENOUGH, Spread

F32 = np.float32
TOP = float(np.finfo(F32).max)
SUBNORMAL = 1e-45
CLOSE = 1e-6  # of all the weight: how far float32's exp may move a boundary
KINDS = {
    "smooth": lambda rng, size: rng.standard_normal(size) * 2,
    "flat": lambda rng, size: rng.standard_normal(size) * 1e-3,
    "equal": lambda rng, size: np.full(size, 3.0),
    "two levels": lambda rng, size: (rng.random(size) < 0.5) * 1.0,
    "steps": lambda rng, size: np.round(rng.standard_normal(size), 2),
    "all scales": lambda rng, size: -np.exp(rng.uniform(-100, 88, size)),
    "subnormal": lambda rng, size: rng.integers(0, 3, size) * SUBNORMAL,
    "dense but for outliers": lambda rng, size: np.where(
        rng.random(size) < 0.001, rng.choice([20.0, -TOP, 1e30, TOP]), rng.standard_normal(size) * 1e-5
    ),
    "zeros": lambda rng, size: np.where(rng.random(size) < 0.5, -0.0, 0.0),
}


def by_full_order(logits, top_k, top_p, min_p, temperature, uniform):
    """(ids in order, their weights, running share of them, distance of the nearest cut from rounding either way)."""
    exact = logits.astype(np.float64)
    order = np.lexsort((np.arange(exact.size), -exact))[:top_k]
    gaps = exact[order] - exact[order[0]]
    odds = np.exp(gaps)
    kept, near = order.size, 1.0
    if top_p < 1:
        share = np.cumsum(odds) / odds.sum()
        kept, near = int(np.searchsorted(share, top_p)) + 1, np.abs(share - top_p).min()
    if min_p > 0:
        kept = min(kept, int((odds >= min_p).sum()))
        near = min(near, np.abs(odds[odds != min_p] - min_p).min(initial=1.0))
    with np.errstate(over="ignore"):
        weights = np.exp(gaps[:kept] / temperature)
    return order[:kept], weights, np.cumsum(weights) / weights.sum(), near


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, FEW_ENOUGH, FEW_ENOUGH + 1, 30_000])
def test_a_draw_is_that_of_the_full_order(kind, size):
    seed = size
    rng = np.random.default_rng(seed)
    drawing = Spread(size)
    compared = 0
    for trial in range(60):
        logits = KINDS[kind](rng, size).astype(F32)
        asked = {
            "top_k": int(rng.choice([size, max(1, size // 2), 1])),
            "top_p": float(rng.choice([1.0, 0.9, 0.5])),
            "min_p": float(rng.choice([0.0, 0.0, 0.1, 1.0])),
            "temperature": float(rng.choice([1.0, 0.5, 3.0, 1e-8, 1e8, 5e-324, 1e300])),
            "uniform": float(rng.choice([rng.random(), rng.random(), 0.0, 1 - 2**-53])),
        }
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            token = drawing.draw(logits, **asked)
        order, weights, share, near = by_full_order(logits, **asked)
        if near < CLOSE:
            continue
        place = int(np.flatnonzero(order == token)[0])
        before = share[place - 1] if place else 0.0
        assert before - CLOSE <= asked["uniform"] <= share[place] + CLOSE, (seed, trial, asked)
        assert weights[place] > 0, (seed, trial, asked)  # never one without weight
        compared += 1
    assert compared > 20


@pytest.mark.parametrize("uniform", [0.0, 0.1, 0.5, 0.9, 1 - 2**-53])
def test_equals_are_drawn_by_id(uniform):
    for size in (1, 100, FEW_ENOUGH, 3 * FEW_ENOUGH):
        logits = np.zeros(size, dtype=F32)
        asked = {"min_p": 0.0, "temperature": 1.0, "uniform": uniform}
        assert Spread(size).draw(logits, top_k=size, top_p=1.0, **asked) == int(uniform * size)
        assert Spread(size).draw(logits, top_k=max(1, size // 4), top_p=1.0, **asked) == int(
            uniform * max(1, size // 4)
        )
        if size % 4 == 0:
            assert Spread(size).draw(logits, top_k=size, top_p=0.25, **asked) == int(uniform * size / 4)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 0, "top_p": 1.0},
        {"top_k": 0, "top_p": 1.0, "temperature": 2.0},
        {"top_k": 0, "top_p": 0.9},
        {"top_k": 0, "top_p": 1.0, "min_p": 0.01},
        {"top_k": 30_000, "top_p": 1.0},
        {"top_k": 30_000, "top_p": 0.9, "frequency_penalty": 0.5},
    ],
    ids=repr,
)
@pytest.mark.parametrize("deviation", [0.01, 1.0, 3.0])
def test_no_large_vocabulary_is_put_in_order_as_a_whole(options, deviation, monkeypatch):
    ordered = []
    real = candidates.descending

    def watching(logits, ids):
        ordered.append(ids.size)
        return real(logits, ids)

    monkeypatch.setattr(candidates, "descending", watching)
    monkeypatch.setattr(spread, "descending", watching)
    sampler = TemperatureSampler(seed=1, **options)
    logits = (np.random.default_rng(1).standard_normal(100_000) * deviation).astype(F32)
    for _ in range(50):
        sampler.sample(logits)
    assert max(ordered, default=0) <= 16_384


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-45, 1e-40, 1e-31])
@pytest.mark.parametrize("size", [3, 70, 2000, 20_000])
@pytest.mark.parametrize("top_k", [0, 2, 70, 17_000])
def test_a_tiny_temperature_tells_even_the_closest_logits_apart(temperature, size, top_k):
    """Their gap is 1.4e-45: at a temperature far below it only the best has any weight, at one far above all have."""
    logits = np.zeros(size, dtype=F32)
    logits[1] = SUBNORMAL
    sampler = TemperatureSampler(seed=1, top_k=top_k, top_p=1.0, temperature=temperature)
    drawn = {sampler.sample(logits) for _ in range(40)}
    assert drawn == {1} if temperature < SUBNORMAL / 100 else len(drawn) > 1


def test_buffers_are_made_once_and_not_shared_with_copies():
    logits = np.zeros(20_000, dtype=F32)
    sampler = TemperatureSampler(seed=1, top_k=0)
    sampler.sample(logits)
    made = sampler._spread
    sampler.sample(logits)
    assert sampler._spread is made
    twin = sampler.copy()
    twin.sample(logits)
    assert twin._spread is not made
