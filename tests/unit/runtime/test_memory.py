"""No allocation of the vocabulary's size per token, and a rollback snapshot that costs no more than its logits."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from prism_core import Generation, Greedy, Limits, Prefill, Runtime, TemperatureSampler

VOCAB = 100_000
LOGITS_BYTES = 4 * VOCAB


class Wide:
    """A decoder with a large vocabulary and a state of one number."""

    identity = "wide"
    vocab_size = VOCAB

    def __init__(self):
        self.rows = np.random.default_rng(3).standard_normal((4, VOCAB)).astype(np.float32) * 6

    def checkpoint_bytes(self):
        return 8

    def reset(self):
        self.state = 0

    def ingest_block(self, tokens, check):
        for token in tokens:
            self.state += token

    def evaluate_into(self, token, logits):
        self.state += token
        logits[:] = self.rows[self.state % 4]

    def checkpoint(self):
        return self.state

    def restore(self, checkpoint):
        self.state = checkpoint


class Watch:
    """An emit callback that notes the peak of traced memory since the token before."""

    def __init__(self):
        self.peaks = []

    def __call__(self, token):
        current, peak = tracemalloc.get_traced_memory()
        self.peaks.append(peak - self.current if self.peaks else 0)
        tracemalloc.reset_peak()
        self.current = current


SAMPLERS = {
    "default": lambda: None,
    "greedy": Greedy,
    "temperature": lambda: TemperatureSampler(seed=1),
    "penalties": lambda: TemperatureSampler(seed=1, repetition_penalty=1.1, frequency_penalty=0.1),
    "no top-k": lambda: TemperatureSampler(seed=1, top_k=0, top_p=1.0),
    "temperature 0": lambda: TemperatureSampler(seed=1, temperature=0, presence_penalty=0.1),
}


@pytest.fixture
def traced():
    tracemalloc.start()
    yield
    tracemalloc.stop()


def peaks_of_one_answer(sampler):
    runtime = Runtime(Wide(), Limits(200, 2, 1 << 30))
    watch = Watch()
    runtime.generate([1], Generation(80), sampler=sampler, emit=watch)
    return watch.peaks


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_token_allocates_nothing_of_the_vocabularys_size(name, traced):
    """What the same answer takes each time: memory of anything else in this process is there only now and then."""
    rounds = [peaks_of_one_answer(SAMPLERS[name]()) for _ in range(3)]
    least = [min(peaks) for peaks in zip(*rounds, strict=True)]
    assert len(least) == 80
    assert max(least[2:]) < LOGITS_BYTES / 4, rounds  # the first token makes the sampler's buffers


def test_a_rollback_snapshot_of_a_long_conversation_costs_its_logits_and_little_more(traced):
    runtime = Runtime(Wide(), Limits(4000, 0, 1 << 30))
    runtime.generate([1] * 2000, Generation(1), prefill=Prefill(512))
    before, _ = tracemalloc.get_traced_memory()
    during = []
    runtime.generate(
        list(runtime.tokens), Generation(1), on_prefix=lambda n: during.append(tracemalloc.get_traced_memory()[0])
    )
    assert during[0] - before < LOGITS_BYTES + 100_000


def test_memory_is_given_back_after_a_request_and_after_a_failed_one(traced):
    runtime = Runtime(Wide(), Limits(200, 1, 1 << 30))
    runtime.generate([1], Generation(3))
    runtime.generate([1], Generation(3))
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(5):
        runtime.generate([2], Generation(3), sampler=TemperatureSampler(seed=2))
        with pytest.raises(ZeroDivisionError):
            runtime.generate([3], Generation(3), emit=lambda token: 1 // 0)
    after, _ = tracemalloc.get_traced_memory()
    assert after - before < LOGITS_BYTES / 2


def test_buffers_are_not_shared_between_a_sampler_and_its_copies():
    sampler = TemperatureSampler(seed=1, presence_penalty=1.0)
    logits = np.arange(VOCAB, dtype=np.float32)
    sampler.sample(logits)
    twin = sampler.copy()
    twin.sample(logits)
    buffers = [array for one in (sampler, twin) for array in (one._plan._words, *one._plan._scratch)]
    for at, one in enumerate(buffers):
        assert not any(np.shares_memory(one, other) for other in buffers[at + 1 :])
