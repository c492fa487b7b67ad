"""What a request does between its prefix and its commit: sections 4, 6 and 7, beyond the golden traces."""

from __future__ import annotations

import numpy as np
import pytest

from prism_core import (
    Cancellation,
    Cancelled,
    Completion,
    DeadlineExceeded,
    DecoderError,
    Finish,
    Generation,
    Greedy,
    Prefill,
    RuntimeFaulted,
    SamplerError,
)

from .fixture import ONE, VOCAB, Bench

LONG = 10**20_000  # more digits than Python is willing to write


class Scripted:
    """A sampler that returns what it is told."""

    def __init__(self, *tokens):
        self.tokens = list(tokens)
        self.seen = []

    def sample(self, logits):
        self.seen.append(logits)
        return self.tokens.pop(0)

    def copy(self):
        twin = Scripted(*self.tokens)
        twin.seen = list(self.seen)
        return twin


def test_a_stop_token_is_drawn_but_not_evaluated_emitted_counted_or_kept():
    bench = Bench()
    assert bench.ask([1], Generation(5, (4,))) == Completion(1, 0, 2, Finish.STOP)
    assert bench.emitted == [1, 2]
    assert bench.runtime.tokens == bench.decoder.state == [1, 1, 2]
    assert bench.sampler.history == [1, 2, 4]


def test_max_tokens_counts_the_draw_of_a_stop_token_too():
    bench = Bench()
    assert bench.ask([1], Generation(3, (4,))) == Completion(1, 0, 2, Finish.STOP)
    bench = Bench()
    assert bench.ask([1], Generation(2, (4,))) == Completion(1, 0, 2, Finish.LENGTH)
    assert bench.sampler.asked == 2


def test_a_stop_token_leaves_logits_that_the_next_request_draws_from():
    bench = Bench()
    bench.ask([2, 3], Generation(1, (5,)))
    bench.trace.clear()
    assert bench.ask([2, 3]) == Completion(2, 2, 1, Finish.LENGTH)
    assert bench.trace.operations == ["C", "P", "E5", "emit5", "C"]


def test_a_history_of_one_token_comes_back_with_its_logits():
    bench = Bench()
    bench.ask([1], Generation(1, (1,)))
    assert bench.runtime.tokens == [1]
    with pytest.raises(ZeroDivisionError):
        bench.ask([2], emit=lambda token: 1 // 0)
    assert bench.ask([1], Generation(2)).reused_tokens == 1
    assert bench.runtime.tokens == [1, 1, 2]


def test_every_token_is_evaluated_before_it_is_emitted():
    bench = Bench()
    states = []
    bench.ask([1], Generation(3), emit=lambda token: states.append((token, list(bench.decoder.state))))
    assert states == [(1, [1, 1]), (2, [1, 1, 2]), (4, [1, 1, 2, 4])]
    assert all(type(token) is int for token, _ in states)


@pytest.mark.parametrize(
    "drawn",
    [-1, VOCAB, 2**70, -(2**70), LONG, 1.0, np.float32(1), True, np.True_, "1", None, [1], np.array([1])],
    ids=lambda drawn: repr(drawn) if drawn is not LONG else "long",
)
def test_what_is_no_token_of_the_vocabulary_is_the_samplers_error(drawn):
    bench = Bench()
    sampler = Scripted(1, drawn)
    with pytest.raises(SamplerError) as caught:
        bench.ask([1], Generation(2), sampler=sampler)
    shown = "<integer of 66439 bits>" if drawn is LONG else repr(drawn)
    assert str(caught.value) == f"the sampler returned {shown}, but a token is an integer in 0..7"
    assert bench.trace.operations[-2:] == ["emit1", "S"]
    assert sampler.tokens == [1, drawn]
    assert sampler.seen == []
    assert bench.runtime.tokens == bench.decoder.state == []


@pytest.mark.parametrize("drawn", [10**5000, -(10**5000)], ids=["huge", "far below"])
def test_a_draw_of_thousands_of_digits_is_the_samplers_error_too(drawn):
    with pytest.raises(SamplerError, match="the sampler returned <integer of 16610 bits>, but a token is an integer"):
        Bench().ask([1], sampler=Scripted(drawn))


@pytest.mark.parametrize("drawn", [0, VOCAB - 1, np.int8(3), np.uint64(7), np.array(5)], ids=repr)
def test_any_integer_of_the_vocabulary_is_a_token(drawn):
    bench = Bench()
    bench.ask([1], sampler=Scripted(drawn))
    assert bench.runtime.tokens == [1, int(drawn)]
    assert type(bench.decoder.state[1]) is int


@pytest.mark.parametrize(("how", "error"), [("expire", DeadlineExceeded), ("cancel", Cancelled)])
def test_cancellation_and_expiry_beat_a_token_outside_the_vocabulary(how, error):
    bench = Bench()

    class Slow(Scripted):
        def sample(self, logits):
            bench.trace.expire() if how == "expire" else bench.trace.cancellation.cancel()
            return super().sample(logits)

    with pytest.raises(error):
        bench.ask([1], sampler=Slow(99))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", range(VOCAB))
def test_a_logit_that_is_not_finite_is_the_decoders_error_at_any_place(at, value):
    bench = Bench()
    bench.ask([1])
    bench.decoder.bad_logits = {at: value}
    for prompt in ([2, 3], [1, 1]):
        with pytest.raises(DecoderError) as caught:
            bench.ask(prompt)
        assert str(caught.value) == f"the decoder left {np.float32(value)} as logit {at} of 8: all must be finite"
        assert bench.trace.operations[-1] == "S"
        assert bench.runtime.tokens == bench.decoder.state == [1, 1]
    bench.decoder.bad_logits = {}
    assert bench.ask([1, 1]).reused_tokens == 2


@pytest.mark.parametrize("written", range(VOCAB))
def test_a_short_write_is_the_decoders_error(written):
    bench = Bench()
    bench.ask([1])

    def short(token, logits):
        bench.decoder.state.append(token)
        logits[:written] = 0.0

    bench.decoder.evaluate_into = short
    with pytest.raises(DecoderError, match=f"the decoder left nan as logit {written} of 8"):
        bench.ask([1, 1])
    assert bench.decoder.state == [1, 1]


def test_logits_of_any_finite_size_are_good():
    bench = Bench()
    top = float(np.finfo(np.float32).max)
    bench.decoder.bad_logits = {0: top, 1: -top, 2: 1e-45}
    bench.ask([1])
    assert bench.runtime.tokens == [1, 0]


def test_decoder_errors_beat_bad_logits_which_beat_cancellation_and_expiry():
    bench = Bench()
    bench.decoder.bad_logits = {3: np.nan}

    def fail_and_expire():
        bench.trace.expire()
        raise OSError("decoder")

    bench.trace.instead[2] = fail_and_expire
    with pytest.raises(OSError, match="decoder"):
        bench.ask([1])
    for disturb in (bench.trace.expire, bench.trace.cancellation.cancel):
        bench.trace.now = 0.0
        bench.trace.operations.clear()
        bench.trace.after[2] = disturb
        with pytest.raises(DecoderError):
            bench.ask([1])
        assert bench.trace.operations == ["C", "R", "E1", "S"]


def test_the_sampler_sees_read_only_logits():
    bench = Bench()

    class Scribbler(Scripted):
        def sample(self, logits):
            logits[0] = 9.0
            return 1

    with pytest.raises(ValueError, match="read-only"):
        bench.ask([1], sampler=Scribbler())
    sampler = Scripted(3)
    bench.ask([1], sampler=sampler)
    (logits,) = sampler.seen
    assert (logits.dtype, logits.shape) == (np.float32, (VOCAB,))


def test_greedy_as_a_sampler_and_by_default_agree():
    one, two = Bench(), Bench()
    one.ask([1, 2], Generation(9), sampler=None)
    two.ask([1, 2], Generation(9), sampler=Greedy())
    assert one.runtime.tokens == two.runtime.tokens


def test_a_block_reaches_the_decoder_as_plain_integers_with_a_check_to_call():
    bench = Bench()
    blocks = []

    def ingest_block(tokens, check):
        blocks.append((list(tokens), [type(token) for token in tokens]))
        before = bench.trace.checks
        check()
        assert bench.trace.checks == before + 1
        bench.decoder.state.extend(tokens)

    bench.decoder.ingest_block = ingest_block
    bench.ask(np.array([1, 2, 3, 4, 5]), block=3)
    assert blocks == [([1, 2, 3], [int] * 3), ([4], [int])]


def test_the_check_that_a_decoder_calls_inside_a_block_raises_there_and_undoes_the_request():
    bench = Bench()
    went_on = []

    def ingest_block(tokens, check):
        bench.decoder.state.append(tokens[0])
        bench.trace.expire()
        check()
        went_on.append(True)

    bench.decoder.ingest_block = ingest_block
    with pytest.raises(DeadlineExceeded):
        bench.ask([1, 2, 3], block=2)
    assert not went_on
    assert bench.decoder.state == []


def test_the_logits_are_invalid_while_a_block_is_ingested():
    bench = Bench()
    bench.ask([1])
    inside = []

    def ingest_block(tokens, check):
        inside.append(np.isnan(bench.runtime._conversation.live.logits).all())
        bench.decoder.state.extend(tokens)

    bench.decoder.ingest_block = ingest_block
    bench.ask([1, 1, 3, 4])
    assert inside == [True]


def test_the_uncached_part_is_cut_into_blocks_from_its_first_token():
    bench = Bench()
    bench.ask([1])
    bench.trace.clear()
    bench.ask([1, 1, 2, 3, 4, 5, 6], block=3)
    assert " . I2 I3 I4 . . . I5 . . . E6 . " in str(bench.trace)


def test_any_object_with_is_cancelled_cancels():
    class Flag:
        is_cancelled = False

    flag = Flag()
    bench = Bench()
    bench.ask([1], cancellation=flag)
    bench.ask([1], cancellation=flag, emit=None)
    with pytest.raises(Cancelled, match="the request was cancelled"):
        bench.ask([1], Generation(5), cancellation=flag, emit=lambda _: setattr(flag, "is_cancelled", True))


def test_is_cancelled_may_be_a_method():
    class Method:
        answer = False

        def is_cancelled(self):
            return self.answer

    flag = Method()
    bench = Bench()
    bench.ask([1], cancellation=flag)
    flag.answer = True
    with pytest.raises(Cancelled):
        bench.ask([1], cancellation=flag)


def test_a_cancellation_starts_unset_and_stays_set():
    flag = Cancellation()
    assert flag.is_cancelled is False
    flag.cancel()
    assert flag.is_cancelled is True
    flag.cancel()
    assert flag.is_cancelled is True


def test_an_error_of_is_cancelled_before_the_snapshot_touches_nothing():
    class Broken:
        @property
        def is_cancelled(self):
            raise OSError("broker")

    bench = Bench()
    with pytest.raises(OSError, match="broker"):
        bench.ask([1], cancellation=Broken())
    assert bench.trace.operations == []


def test_emitted_tokens_come_in_order_on_the_callers_thread():
    import threading

    bench = Bench()
    threads = []
    bench.ask([1], Generation(4), emit=lambda token: threads.append((token, threading.get_ident())))
    assert threads == [(token, threading.get_ident()) for token in (1, 2, 4, 0)]


def test_the_time_of_emit_counts_against_the_deadline():
    bench = Bench()
    with pytest.raises(DeadlineExceeded):
        bench.ask([1], emit=lambda _: bench.trace.expire())
    assert bench.runtime.tokens == []


def test_reset_latches_first_and_clears_everything_only_if_it_works():
    bench = Bench()
    bench.ask([1])
    latched = []
    real_reset = bench.decoder.reset

    def watching_reset():
        latched.append(bench.runtime.is_faulted)
        real_reset()

    bench.decoder.reset = watching_reset
    error = OSError("reset")
    bench.decoder.reset_error = error
    with pytest.raises(OSError, match="reset") as caught:
        bench.runtime.reset()
    assert caught.value is error
    assert bench.runtime.is_faulted
    assert (bench.runtime.tokens, bench.runtime.checkpoint_count) == ([1, 1], 1)
    with pytest.raises(RuntimeFaulted, match=r"call reset\(\)"):
        bench.ask([1])
    bench.decoder.reset_error = None
    bench.trace.expire()
    bench.trace.cancellation.cancel()
    bench.runtime.reset()
    assert latched == [True, True]
    assert not bench.runtime.is_faulted
    assert (bench.runtime.tokens, bench.runtime.checkpoint_count, bench.decoder.state) == ([], 0, [])


def test_reset_really_forgets_the_saved_prefixes_and_the_logits():
    bench = Bench()
    bench.ask([1])
    bench.runtime.reset()
    bench.trace.clear()
    assert bench.ask([1, 1]).reused_tokens == 0
    assert bench.trace.operations[:3] == ["C", "R", "I1"]


def test_tokens_is_an_unchanging_view_of_integers():
    bench = Bench()
    bench.ask([1])
    tokens = bench.runtime.tokens
    bench.ask([1, 1, 5, 6])
    assert tokens == [1, 1] == list(tokens)
    assert tokens == (1, 1) != (1, 2)
    assert tokens != 5
    assert (len(tokens), tokens[0], tokens[-1], tokens[:1], 1 in tokens, tokens.index(1)) == (2, 1, 1, [1], True, 0)
    assert type(tokens[0]) is int
    assert [type(token) for token in tokens] == [int, int]
    assert repr(tokens) == "TokenView([1, 1])"
    assert np.asarray(tokens).tolist() == [1, 1]
    assert np.asarray(tokens, dtype=np.int64).dtype == np.int64
    with pytest.raises(TypeError):
        tokens[0] = 2
    with pytest.raises(TypeError):
        hash(tokens)
    with pytest.raises(IndexError):
        tokens[2]
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(tokens)[0] = 2
    with pytest.raises(AttributeError):
        bench.runtime.tokens = []


def test_neither_tokens_nor_the_samplers_logits_can_be_made_writable():
    bench = Bench()
    bench.ask([1])
    sampler = Scripted(1)
    bench.ask([2], sampler=sampler)
    for array in (np.asarray(bench.runtime.tokens), np.asarray(bench.runtime.tokens[:1]), *sampler.seen):
        with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
            array.flags.writeable = True
    copied = np.array(bench.runtime.tokens)
    copied[0] = 7
    assert bench.runtime.tokens == [2, 1]
    bench.runtime.reset()
    assert np.asarray(bench.runtime.tokens).shape == (0,)


def test_tokens_shows_the_last_commit_during_a_request_and_its_recovery():
    bench = Bench()
    bench.ask([1])
    seen = []
    for at in range(12):
        bench.trace.after[len(bench.trace.operations) + at] = lambda: seen.append(list(bench.runtime.tokens))
    with pytest.raises(SamplerError):
        bench.ask([2, 3], Generation(2), sampler=Scripted(5, 99))
    assert bench.trace.operations[-1] == "S"
    assert seen == [[1, 1]] * len(seen)
    assert len(seen) == 7


def test_a_request_works_in_a_context_of_262144_tokens():
    from prism_core import Limits

    bench = Bench(Limits(262_144, 1, 1 << 30))
    bench.decoder.ingest_block = lambda tokens, check: bench.decoder.state.extend(tokens)
    bench.ask([1] * 262_143, block=512)
    assert len(bench.runtime.tokens) == 262_144


def test_completions_and_options_are_records():
    assert Completion(1, 2, 3, Finish.STOP) == Completion(1, 2, 3, Finish("stop"))
    assert (Finish.STOP.value, Finish.LENGTH.value) == ("stop", "length")
    assert ONE.stop_tokens == ()
    assert Prefill() == Prefill(1)
    with pytest.raises(AttributeError):
        ONE.max_tokens = 5
