"""`DecoderBase`: a decoder that works token by token and returns its logits, under a Runtime."""

from __future__ import annotations

import numpy as np
import pytest

from prism_core import Decoder, DecoderBase, DecoderError, Generation, Limits, Prefill, Runtime

from .fixture import LIMITS, ONE, SCENARIOS, VOCAB, FixtureDecoder


class Simple(DecoderBase):
    """The fixture's arithmetic, in the base's form."""

    identity = "simple"
    vocab_size = VOCAB

    def __init__(self, answer=None):
        self.calls = []
        self.answer = answer

    def checkpoint_bytes(self):
        return 4 * len(self.state)

    def reset(self):
        self.state = []

    def ingest(self, token):
        self.calls.append(("ingest", token))
        self.state.append(token)

    def evaluate(self, token):
        self.state.append(token)
        if self.answer is not None:
            return self.answer
        logits = [-1.0] * VOCAB
        logits[sum(self.state) % VOCAB] = 1.0
        return logits

    def checkpoint(self):
        return tuple(self.state)

    def restore(self, checkpoint):
        self.state = list(checkpoint)


def test_the_base_and_the_fixture_keep_the_protocol():
    assert isinstance(Simple(), Decoder)
    assert isinstance(FixtureDecoder(), Decoder)
    assert not isinstance(object(), Decoder)


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_the_base_answers_the_golden_requests(scenario):
    runtime = Runtime(Simple(), LIMITS)
    for prompt in scenario.earlier:
        runtime.generate(prompt, ONE)
    completion = runtime.generate(scenario.prompt, scenario.options, prefill=Prefill(scenario.block))
    assert completion == scenario.completion
    assert runtime.tokens == scenario.history


def test_a_block_is_ingested_in_order_with_a_check_between_each_two():
    decoder = Simple()
    decoder.reset()
    decoder.ingest_block([1, 2, 3], lambda: decoder.calls.append("check"))
    assert decoder.calls == [("ingest", 1), "check", ("ingest", 2), "check", ("ingest", 3)]


def test_an_error_of_the_check_stops_the_block():
    decoder = Simple()
    decoder.reset()
    with pytest.raises(ZeroDivisionError):
        decoder.ingest_block([1, 2, 3], lambda: 1 // 0)
    assert decoder.state == [1]


@pytest.mark.parametrize("answer", [[], [0.0] * 7, [0.0] * 9, np.zeros((1, VOCAB)), 0.0])
def test_logits_of_another_length_are_the_decoders_error(answer):
    runtime = Runtime(Simple(answer), LIMITS)
    with pytest.raises(DecoderError) as caught:
        runtime.generate([3], ONE)
    shape = np.asarray(answer).shape
    assert str(caught.value) == f"evaluate(3) returned logits of shape {shape}, but the vocabulary has 8 tokens"
    assert runtime.tokens == []


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
def test_logits_that_float32_cannot_hold_are_the_decoders_error(bad):
    runtime = Runtime(Simple([0.0] * 7 + [bad]), LIMITS)
    with pytest.raises(DecoderError, match="as logit 7 of 8"):
        runtime.generate([3], ONE)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32])
def test_logits_of_another_number_type_are_converted(dtype):
    runtime = Runtime(Simple(np.arange(VOCAB, dtype=dtype)), LIMITS)
    runtime.generate([3], Generation(2))
    assert runtime.tokens == [3, 7, 7]


def test_a_decoder_that_only_evaluates_ingests_by_evaluating():
    class Evaluating(Simple):
        ingest = DecoderBase.ingest

    runtime = Runtime(Evaluating(), LIMITS)
    runtime.generate([2, 3, 4], ONE)
    assert runtime.tokens == runtime.decoder.state == [2, 3, 4, 1]


def test_a_decoder_without_evaluate_says_so_when_it_is_needed():
    class Mute(Simple):
        evaluate = DecoderBase.evaluate

    with pytest.raises(DecoderError, match="Mute defines neither evaluate nor what it is needed for"):
        Runtime(Mute(), LIMITS).generate([2], ONE)


def test_every_other_part_of_the_protocol_must_be_given():
    for name in ("checkpoint_bytes", "reset", "checkpoint", "restore"):
        with pytest.raises(TypeError, match=name):
            type("Partial", (Simple,), {name: getattr(DecoderBase, name)})()


def test_a_vocabulary_of_one_token_works():
    class One(Simple):
        vocab_size = 1

    runtime = Runtime(One([0.5]), Limits(4, 1, 1000))
    runtime.generate([0], Generation(3))
    assert runtime.tokens == [0, 0, 0, 0]
