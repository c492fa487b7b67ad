"""Rotary frequencies and magnitudes against published numbers."""

from __future__ import annotations

import itertools
import math

import pytest

from prism_core.models.hyper import Rope

BONSAI_8B = Rope(dims=128, base=1e6, scaling="yarn", factor=4.0, original_context=16384)


def test_yarn_of_bonsai_8b_keeps_fast_pairs_slows_slow_ones_and_blends_between() -> None:
    plain = Rope(dims=128, base=1e6).frequencies()
    scaled = BONSAI_8B.frequencies()
    ratios = [after / before for after, before in zip(scaled, plain, strict=True)]
    assert ratios[:21] == pytest.approx([1.0] * 21)
    assert ratios[37:] == pytest.approx([0.25] * 27)
    assert ratios[20:38] == sorted(ratios[20:38], reverse=True)
    assert ratios[21] == pytest.approx(1 - 0.75 / 17)


def test_yarn_of_bonsai_8b_turns_with_its_published_magnitude() -> None:
    assert pytest.approx(1.138629, abs=1e-6) == BONSAI_8B.magnitude
    assert pytest.approx(1.29648, abs=1e-5) == BONSAI_8B.magnitude**2


def test_linear_scaling_divides_all_angles_and_leaves_the_magnitude() -> None:
    plain, scaled = Rope(dims=8, base=1e4), Rope(dims=8, base=1e4, scaling="linear", factor=8.0)
    assert scaled.frequencies() == [frequency / 8 for frequency in plain.frequencies()]
    assert scaled.magnitude == plain.magnitude == 1.0


def test_plain_frequencies_fall_from_one_to_the_base() -> None:
    frequencies = Rope(dims=64, base=1e5).frequencies()
    assert len(frequencies) == 32
    assert frequencies[0] == 1.0
    assert frequencies[-1] == pytest.approx(1e5 ** (-62 / 64))
    assert all(math.isclose(a / b, 1e5 ** (2 / 64)) for a, b in itertools.pairwise(frequencies))
