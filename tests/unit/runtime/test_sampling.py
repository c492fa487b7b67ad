"""Greedy, and the temperature sampler against a slow reference that sorts everything in float64: sections 9 and 11."""

from __future__ import annotations

import math
import warnings
from collections import Counter

import numpy as np
import pytest

from prism_core import (
    MAX_VOCAB,
    Generation,
    Greedy,
    InvalidRequest,
    Sampler,
    SamplerError,
    TemperatureSampler,
    greedy,
)

from .fixture import Bench

F32 = np.float32
BAD = [
    ([], "there are 0 logits, but must be from 1 to 1048576"),
    (np.zeros(MAX_VOCAB + 1, dtype=F32), "there are 1048577 logits, but must be from 1 to 1048576"),
    ([[1.0, 2.0]], "logits must be a 1-D array of numbers, not 2-D of float64"),
    (1.0, "logits must be a 1-D array of numbers, not 0-D of float64"),
    (["a"], "logits must be a 1-D array of numbers, not 1-D of str32"),
    ([True], "logits must be a 1-D array of numbers, not 1-D of bool"),
    ([1j], "logits must be a 1-D array of numbers, not 1-D of complex128"),
    ([None], "logits must be a 1-D array of numbers, not 1-D of object"),
    (None, "logits must be a 1-D array of numbers, not 0-D of object"),
]


@pytest.mark.parametrize(
    ("logits", "token"),
    [([1, 3, 3], 1), ([-0.0, 0.0, -0.0], 0), ([0.0, -0.0], 0), ([-3, -1, -1, -2], 1), ([-2, -1, 0, 1], 3), ([5], 0)],
)
def test_greedy_takes_the_highest_and_of_equals_the_lowest_id(logits, token):
    for kind in (list, lambda values: np.array(values, dtype=F32), lambda values: np.array(values, dtype=np.float64)):
        assert greedy(kind(logits)) == token
        assert Greedy().sample(kind(logits)) == token
    assert type(greedy(logits)) is int


@pytest.mark.parametrize("size", [1, 2, 7, 8, 31, 64, 65, 1000, 4097])
def test_greedy_finds_the_first_of_equals_wherever_they_are(size):
    rng = np.random.default_rng(size)
    for _ in range(20):
        logits = rng.integers(-3, 3, size).astype(F32)
        logits[rng.random(size) < 0.3] = F32(-0.0)
        assert greedy(logits) == max(range(size), key=lambda token: (float(logits[token]), -token))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [1, 3, 17, 64, 1000])
def test_a_value_that_is_not_finite_is_refused_at_any_place(size, value):
    for at in {0, 1, size // 2, size - 1} & set(range(size)):
        logits = np.zeros(size, dtype=F32)
        logits[at] = value
        for refuse in (greedy, Greedy().sample, TemperatureSampler(seed=1).sample):
            with pytest.raises(SamplerError) as caught:
                refuse(logits)
            assert str(caught.value) == f"logit {at} of {size} is {value}, but all must be finite"


@pytest.mark.parametrize(("logits", "words"), BAD, ids=[words[-30:] for _, words in BAD])
def test_what_is_no_vector_of_logits_is_refused(logits, words):
    for refuse in (greedy, Greedy().sample, TemperatureSampler(seed=1).sample):
        with pytest.raises(SamplerError) as caught:
            refuse(logits)
        assert str(caught.value) == words


def test_logits_that_make_no_array_are_refused():
    for refuse in (greedy, Greedy().sample, TemperatureSampler(seed=1).sample):
        with pytest.raises(SamplerError, match="logits must be a 1-D array of numbers: setting an array element"):
            refuse([[1.0], [1.0, 2.0]])


def test_a_vector_that_changes_its_form_is_looked_at_again():
    logits = np.arange(8, dtype=F32)
    sampler = TemperatureSampler(seed=1, top_k=1)
    assert sampler.sample(logits) == 7
    logits.shape = (2, 4)
    with pytest.raises(SamplerError, match="not 2-D"):
        sampler.sample(logits)


@pytest.mark.parametrize("options", [{}, {"presence_penalty": 1.0}, {"top_k": 0, "top_p": 1.0}], ids=repr)
def test_a_sampler_short_of_memory_draws_the_same_when_there_is_some_again(options, monkeypatch):
    logits = (np.random.default_rng(2).standard_normal(20_000) / 10).astype(F32)
    expected = [TemperatureSampler(seed=1, **options).sample(logits)]
    real_empty = np.empty
    for failing in range(12):
        made = []

        def empty(*shape, made=made, failing=failing, **more):
            made.append(shape)
            if len(made) == failing + 1:
                raise MemoryError
            return real_empty(*shape, **more)

        sampler = TemperatureSampler(seed=1, **options)
        monkeypatch.setattr(np, "empty", empty)
        for _ in range(2):
            try:
                drawn = sampler.sample(logits)
                break
            except MemoryError:
                pass
        monkeypatch.setattr(np, "empty", real_empty)
        assert [drawn] == expected


def test_a_vocabulary_of_1048576_is_not_too_large():
    logits = np.zeros(MAX_VOCAB, dtype=F32)
    logits[-1] = 1
    assert greedy(logits) == MAX_VOCAB - 1
    assert TemperatureSampler(seed=1, top_k=1).sample(logits) == MAX_VOCAB - 1


def test_the_samplers_keep_the_protocol():
    for sampler in (Greedy(), TemperatureSampler(seed=1)):
        assert isinstance(sampler, Sampler)
        assert type(sampler.copy()) is type(sampler)
    Greedy().restore(Greedy())


# --- parameters -------------------------------------------------------------------------------------------------------

REFUSED = [
    ("seed", 1.0, "seed must be an integer, not 1.0"),
    ("seed", True, "seed must be an integer, not True"),
    ("seed", None, "seed must be an integer, not None"),
    ("seed", 2**64, f"seed is {2**64}, but must be from {-(2**63)} to {2**64 - 1}"),
    ("seed", -(2**63) - 1, f"seed is {-(2**63) - 1}, but must be from {-(2**63)} to {2**64 - 1}"),
    ("seed", 10**5000, f"seed is <integer of 16610 bits>, but must be from {-(2**63)} to {2**64 - 1}"),
    ("temperature", 10**400, "temperature is inf, but must be at least 0"),
    ("presence_penalty", -(10**400), "presence_penalty is -inf, but must be from -2 to 2"),
    ("temperature", -0.1, "temperature is -0.1, but must be at least 0"),
    ("temperature", math.inf, "temperature is inf, but must be at least 0"),
    ("temperature", math.nan, "temperature must be a number, not nan"),
    ("temperature", "1", "temperature must be a number, not '1'"),
    ("temperature", True, "temperature must be a number, not True"),
    ("top_k", -1, "top_k is -1, but must be at least 0"),
    ("top_k", 2.0, "top_k must be an integer, not 2.0"),
    ("top_p", 0.0, "top_p is 0.0, but must be above 0 and at most 1"),
    ("top_p", 1.0000001, "top_p is 1.0000001, but must be above 0 and at most 1"),
    ("top_p", None, "top_p must be a number, not None"),
    ("min_p", -0.001, "min_p is -0.001, but must be from 0 to 1"),
    ("min_p", 1.001, "min_p is 1.001, but must be from 0 to 1"),
    ("repetition_penalty", 0.0, "repetition_penalty is 0.0, but must be above 0"),
    ("repetition_penalty", -1.0, "repetition_penalty is -1.0, but must be above 0"),
    ("repetition_penalty", math.inf, "repetition_penalty is inf, but must be above 0"),
    ("presence_penalty", 2.001, "presence_penalty is 2.001, but must be from -2 to 2"),
    ("presence_penalty", -2.001, "presence_penalty is -2.001, but must be from -2 to 2"),
    ("frequency_penalty", 2.001, "frequency_penalty is 2.001, but must be from -2 to 2"),
    ("frequency_penalty", -2.001, "frequency_penalty is -2.001, but must be from -2 to 2"),
    ("frequency_penalty", -math.inf, "frequency_penalty is -inf, but must be from -2 to 2"),
]


@pytest.mark.parametrize(("name", "value", "words"), REFUSED, ids=[f"{at}" for at in range(len(REFUSED))])
def test_a_parameter_out_of_range_is_refused(name, value, words):
    with pytest.raises(InvalidRequest) as caught:
        TemperatureSampler(**{"seed": 1, name: value})
    assert str(caught.value) == words


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 2**64 - 1),
        ("seed", -(2**63)),
        ("seed", np.int64(3)),
        ("temperature", 0),
        ("temperature", 1e308),
        ("temperature", 5e-324),
        ("temperature", np.float32(0.5)),
        ("top_k", 0),
        ("top_k", 2**70),
        ("top_p", 5e-324),
        ("top_p", 1),
        ("min_p", 0),
        ("min_p", 1),
        ("repetition_penalty", 5e-324),
        ("repetition_penalty", 1e308),
        ("presence_penalty", 2),
        ("presence_penalty", -2),
        ("frequency_penalty", 2),
        ("frequency_penalty", -2),
    ],
)
@pytest.mark.parametrize("size", [1, 8, 5000])
@pytest.mark.parametrize("top_k", [20, 0])
def test_a_parameter_at_its_bound_draws_without_a_warning(name, value, size, top_k):
    top = float(np.finfo(F32).max)
    sampler = TemperatureSampler(**{"seed": 1, "top_k": top_k, name: value})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for logits in (np.zeros(size), np.linspace(-top, top, size), np.full(size, -top), np.arange(size)):
            assert 0 <= sampler.sample(logits.astype(F32)) < size


def test_parameters_are_given_by_name_and_the_seed_is_required():
    with pytest.raises(TypeError):
        TemperatureSampler(1)
    with pytest.raises(TypeError):
        TemperatureSampler()


# --- the distribution -------------------------------------------------------------------------------------------------


class Reference:
    """The order of section 11 in float64, by sorting everything. `margin` tells how close the last draw was to a
    boundary, where rounding may choose the neighbour."""

    def __init__(self, seed, temperature=1.0, top_k=20, top_p=0.95, min_p=0.0, repetition=1.0, presence=0.0, freq=0.0):
        self.random = np.random.Generator(np.random.Philox(key=seed % 2**64))
        self.temperature, self.top_k, self.top_p, self.min_p = temperature, top_k, top_p, min_p
        self.repetition, self.presence, self.freq = repetition, presence, freq
        self.counts = Counter()

    def sample(self, logits):
        x = [float(value) for value in logits]
        for token, count in self.counts.items():
            x[token] = x[token] / self.repetition if x[token] > 0 else x[token] * self.repetition
            x[token] = float(F32(x[token] - self.presence - self.freq * count))
        order = sorted(range(len(x)), key=lambda token: (-x[token], token))
        if self.top_k:
            order = order[: self.top_k]
        odds = np.exp(np.array([x[token] - x[order[0]] for token in order]))
        share = np.cumsum(odds) / odds.sum()
        by_top_p = int(np.searchsorted(share, self.top_p)) + 1 if self.top_p < 1 else len(order)
        by_min_p = int((odds >= self.min_p).sum())
        kept = min(by_top_p, by_min_p)
        order = order[:kept]
        margins = [abs(share - self.top_p).min()] if by_top_p < by_min_p else []
        margins += [abs(np.where(odds == self.min_p, 1, odds - self.min_p)).min()]
        uniform = self.random.random()
        weights = np.exp(np.array([(x[token] - x[order[0]]) / self.temperature for token in order]))
        share = np.cumsum(weights) / weights.sum()
        margins.append(abs(share[:-1] - uniform).min() if kept > 1 else 1.0)
        self.margin = min(margins)
        token = order[min(int(np.searchsorted(share, uniform, side="right")), kept - 1)]
        self.counts[token] += 1
        return token


SETTINGS = [
    {},
    {"temperature": 0.3},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 5, "top_p": 1.0},
    {"top_k": 50, "top_p": 0.5},
    {"top_k": 0},
    {"top_k": 0, "top_p": 1.0},
    {"top_k": 0, "top_p": 1.0, "temperature": 4.0},
    {"top_k": 0, "top_p": 0.999, "min_p": 0.01},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.2},
    {"top_k": 0, "top_p": 0.3, "min_p": 0.001, "temperature": 0.7},
    {"min_p": 1.0},
    {"top_p": 0.01},
    {"top_k": 3000, "top_p": 0.9},
]


@pytest.mark.parametrize("size", [1, 2, 8, 100, 8192, 9001, 40_000])
@pytest.mark.parametrize("setting", SETTINGS, ids=repr)
def test_draws_agree_with_the_reference(setting, size):
    seed = 1000 + size
    sampler, reference = TemperatureSampler(seed=seed, **setting), Reference(seed, **setting)
    rng = np.random.default_rng(seed)
    compared = 0
    for spread in (0.0, 0.5, 2.0, 5.0) if size < 10_000 else (1.0, 4.0):
        for kind in ("smooth", "ties"):
            logits = (rng.standard_normal(size) * spread).astype(F32)
            if kind == "ties":
                logits = np.round(logits)
            expected, drawn = reference.sample(logits), sampler.sample(logits)
            if reference.margin > 1e-6:
                assert drawn == expected, (seed, spread, kind)
                compared += 1
    assert compared > 0


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition": 1.3},
        {"repetition": 0.7},
        {"presence": 1.5},
        {"presence": -1.0},
        {"freq": 0.8},
        {"freq": -0.3},
        {"repetition": 1.1, "presence": 0.5, "freq": 0.25},
    ],
    ids=repr,
)
@pytest.mark.parametrize("setting", [{}, {"top_k": 0, "top_p": 0.9}, {"temperature": 0.1}], ids=repr)
def test_penalties_on_the_samplers_own_draws_agree_with_the_reference(penalties, setting):
    names = {"repetition": "repetition_penalty", "presence": "presence_penalty", "freq": "frequency_penalty"}
    sampler = TemperatureSampler(seed=7, **setting, **{names[name]: value for name, value in penalties.items()})
    reference = Reference(7, **setting, **penalties)
    rng = np.random.default_rng(7)
    base = (rng.standard_normal(300) * 2).astype(F32)
    for step in range(150):
        logits = base + rng.standard_normal(300).astype(F32) / 4
        expected = reference.sample(logits)
        drawn = sampler.sample(logits)
        assert drawn == expected or reference.margin < 1e-6, step
        assert sampler.draws == step + 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["f2", ">f4", "f8", ">f8", "g", "i1", "u1", ">i2", "u4", "i8", "u8"])
def test_every_number_type_is_read_as_float32_and_refused_where_it_is_not_finite(kind):
    rng = np.random.default_rng(7)
    for size in (1, 65, 5000):
        logits = rng.integers(0, 9, size).astype(kind)
        for options in ({"top_k": 0}, {"top_k": 20, "presence_penalty": 1.0}, {"temperature": 0}):
            read, plain = TemperatureSampler(seed=1, **options), TemperatureSampler(seed=1, **options)
            assert [read.sample(logits) for _ in range(5)] == [plain.sample(logits.astype(F32)) for _ in range(5)]
        if logits.dtype.kind == "f":
            for value in (np.nan, np.inf, -np.inf):
                logits[size // 2] = value
                for refuse in (greedy, Greedy().sample, TemperatureSampler(seed=1).sample):
                    with pytest.raises(SamplerError, match=f"logit {size // 2} of {size} is {value}"):
                        refuse(logits)


def test_logits_are_not_changed_and_other_number_types_are_read_as_float32():
    logits = np.arange(10, dtype=F32)
    logits.flags.writeable = False
    sampler = TemperatureSampler(seed=1, presence_penalty=1.0, frequency_penalty=1.0)
    first = [sampler.sample(logits) for _ in range(20)]
    assert logits.tolist() == list(range(10))
    for kind in (list, lambda x: np.asarray(x, dtype=np.float64), lambda x: np.asarray(x, dtype=np.int16)):
        sampler = TemperatureSampler(seed=1, presence_penalty=1.0, frequency_penalty=1.0)
        assert [sampler.sample(kind(range(10))) for _ in range(20)] == first
    assert TemperatureSampler(seed=1, temperature=0).sample([1e300, -1e300]) == 0


def test_the_shares_of_many_draws_follow_the_softmax():
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125])).astype(F32)
    sampler = TemperatureSampler(seed=11, top_p=1.0)
    counts = Counter(sampler.sample(logits) for _ in range(8000))
    for token, share in enumerate([0.5, 0.25, 0.125, 0.125]):
        assert abs(counts[token] / 8000 - share) < 5 * math.sqrt(share * (1 - share) / 8000)


def test_top_p_keeps_the_fewest_that_reach_it_and_at_least_one():
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125])).astype(F32)
    for top_p, kept in ((0.001, 1), (0.49, 1), (0.51, 2), (0.74, 2), (0.76, 3), (0.88, 4), (1.0, 4)):
        sampler = TemperatureSampler(seed=3, top_p=top_p, temperature=100.0)
        assert {sampler.sample(logits) for _ in range(200)} == set(range(kept)), top_p


def test_top_p_runs_over_the_probabilities_renormalised_after_top_k():
    logits = np.log(np.array([0.3, 0.2, 0.2, 0.2, 0.1])).astype(F32)
    sampler = TemperatureSampler(seed=3, top_k=2, top_p=0.59, temperature=100.0)  # 0.3 / 0.5 = 0.6
    assert {sampler.sample(logits) for _ in range(100)} == {0}
    sampler = TemperatureSampler(seed=3, top_k=2, top_p=0.61, temperature=100.0)
    assert {sampler.sample(logits) for _ in range(100)} == {0, 1}


def test_top_p_and_min_p_look_at_temperature_1():
    logits = np.log(np.array([0.6, 0.3, 0.1])).astype(F32)
    for temperature in (0.5, 1.0, 50.0):
        sampler = TemperatureSampler(seed=3, top_p=0.7, temperature=temperature)
        assert {sampler.sample(logits) for _ in range(300)} == {0, 1}
        sampler = TemperatureSampler(seed=3, top_p=1.0, min_p=0.2, temperature=temperature)
        assert {sampler.sample(logits) for _ in range(300)} == {0, 1}


def test_of_equal_logits_top_k_keeps_the_lowest_ids():
    for size in (8, 20_000):
        sampler = TemperatureSampler(seed=3, top_k=3, top_p=1.0)
        assert {sampler.sample(np.zeros(size, dtype=F32)) for _ in range(100)} == {0, 1, 2}
        logits = np.zeros(size, dtype=F32)
        logits[5] = 1.0
        logits[:3] = -0.0
        assert {sampler.sample(logits) for _ in range(100)} == {0, 1, 5}


def test_temperature_0_takes_the_best_after_penalties_and_still_counts_its_draws():
    sampler = TemperatureSampler(seed=3, temperature=0, presence_penalty=2.0)
    assert [sampler.sample([3.0, 2.5, 2.0]) for _ in range(4)] == [0, 1, 2, 0]
    assert sampler.draws == 4


# --- reproducibility --------------------------------------------------------------------------------------------------


def walk(sampler: TemperatureSampler, steps: int, seed: int = 0, vocab: int = 50) -> list[int]:
    """Draws whose logits depend on the step and on what was drawn before."""
    rows = np.random.default_rng(seed).standard_normal((200, vocab)).astype(F32) * 2
    drawn: list[int] = []
    for step in range(steps):
        drawn.append(sampler.sample(rows[step] + (rows[drawn[-1]] if drawn else 0)))
    return drawn


def test_a_stream_is_a_function_of_its_seed():
    streams = [tuple(walk(TemperatureSampler(seed=seed), 100)) for seed in (1, 1, 2, -1, 2**64 - 1)]
    assert streams[0] == streams[1] != streams[2]
    assert streams[3] == streams[4]  # a negative seed is taken modulo 2**64


def test_draw_n_uses_the_nth_number_of_the_seeds_philox():
    flat = np.zeros(1000, dtype=F32)
    sampler = TemperatureSampler(seed=77, top_k=0, top_p=1.0)
    random = np.random.Generator(np.random.Philox(key=77))
    for _ in range(200):
        assert sampler.sample(flat) == int(random.random() * 1000)


@pytest.mark.parametrize("at", [0, 1, 3, 4, 5, 63, 64, 65, 127, 128, 150])
def test_a_sampler_resumed_at_draw_n_continues_identically(at):
    rows = np.random.default_rng(5).standard_normal((200, 50)).astype(F32)
    options = {"seed": 9, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    whole = TemperatureSampler(**options)
    drawn = [whole.sample(row) for row in rows]
    resumed = TemperatureSampler(**options).resume(drawn[:at])
    assert resumed.draws == at
    assert [resumed.sample(row) for row in rows[at:]] == drawn[at:]


@pytest.mark.parametrize("kind", [tuple, np.array])
def test_resume_replaces_what_was_drawn_before(kind):
    options = {"seed": 9, "frequency_penalty": 1.0}
    used = TemperatureSampler(**options)
    walk(used, 90)
    assert walk(used.resume(kind([3, 4, 3])), 20) == walk(TemperatureSampler(**options).resume([3, 4, 3]), 20)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1, -1], "ids[1] is -1, outside the vocabulary 0..1048575"),
        ([MAX_VOCAB], "ids[0] is 1048576, outside the vocabulary 0..1048575"),
        ([1.5], "ids[0] must be an integer, not 1.5"),
        (5, "ids must be a sequence of integers, not 5"),
    ],
)
def test_resume_takes_only_token_ids(ids, words):
    with pytest.raises(InvalidRequest) as caught:
        TemperatureSampler(seed=1).resume(ids)
    assert str(caught.value) == words


def test_a_resumed_token_outside_the_logits_is_refused():
    sampler = TemperatureSampler(seed=1, presence_penalty=1.0).resume([8])
    with pytest.raises(SamplerError, match="token 8 was drawn before, but there are only 8 logits"):
        sampler.sample(np.zeros(8, dtype=F32))
    sampler.sample(np.zeros(9, dtype=F32))


@pytest.mark.parametrize("at", [0, 1, 63, 64, 100])
def test_a_copy_is_exact_and_independent_and_goes_back(at):
    options = {"seed": 4, "repetition_penalty": 1.1, "frequency_penalty": 0.4, "temperature": 1.5}
    sampler = TemperatureSampler(**options)
    walk(sampler, at, seed=1)
    saved = sampler.copy()
    first = walk(sampler, 70, seed=2)
    assert walk(saved.copy(), 70, seed=2) == first
    for _ in range(2):
        sampler.restore(saved)
        assert sampler.draws == at
        assert walk(sampler, 70, seed=2) == first


def test_a_sampler_serves_vocabularies_of_different_sizes_one_after_the_other():
    sampler = TemperatureSampler(seed=1)
    for size in (8, 20_000, 9, 30_000):
        assert sampler.sample(np.arange(size, dtype=F32)) in range(size)
    sampler = TemperatureSampler(seed=1, presence_penalty=0.5)
    for size in (8, 9, 20_000, 30_000):
        assert sampler.sample(np.arange(size, dtype=F32)) in range(size)


def test_a_sampled_request_is_the_same_however_it_is_cut_and_after_failures():
    whole = Bench()
    whole.ask([1], Generation(12), sampler=TemperatureSampler(seed=21, temperature=8.0, presence_penalty=1.0))
    tokens = list(whole.runtime.tokens)
    assert len(set(tokens)) > 4
    bench = Bench()
    sampler = TemperatureSampler(seed=21, temperature=8.0, presence_penalty=1.0)
    prompt = [1]
    for length in (1, 3, 2, 6):
        for at in (1, 2, 3):
            bench.trace.clear()
            bench.trace.after[at] = bench.trace.expire
            with pytest.raises(TimeoutError):
                bench.ask(prompt, Generation(length), sampler=sampler)
        bench.trace.clear()
        bench.ask(prompt, Generation(length), sampler=sampler)
        prompt = list(bench.runtime.tokens)
    assert prompt == tokens
    taken_over = Bench()
    resumed = TemperatureSampler(seed=21, temperature=8.0, presence_penalty=1.0).resume(tokens[1:8])
    taken_over.ask(tokens[:8], Generation(5), sampler=resumed, block=4)
    assert taken_over.runtime.tokens == tokens
