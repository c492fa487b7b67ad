"""Both sides of every bound of sections 2 and 4, and what each refusal says: the field, the value and the limit."""

from __future__ import annotations

import array
import collections
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from prism_core import (
    Cancelled,
    DeadlineExceeded,
    Generation,
    InvalidRequest,
    Limits,
    Prefill,
    PrismError,
    Runtime,
    Timings,
)

from .fixture import DEADLINE, LIMITS, ONE, Bench, FixtureDecoder, Trace

BIG = 2**70
LONG = 10**20_000  # more digits than Python is willing to write
ENDLESS = 10**5000  # Python itself refuses to write out so many digits
TOLD = "<integer of 16610 bits>"


def decoder(**attributes) -> FixtureDecoder:
    made = FixtureDecoder(Trace())
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Limits(0, 4, 1000), "context_tokens is 0, but must be from 1 to 262144"),
        (Limits(-1, 4, 1000), "context_tokens is -1, but must be from 1 to 262144"),
        (Limits(262_145, 4, 1000), "context_tokens is 262145, but must be from 1 to 262144"),
        (Limits(8.0, 4, 1000), "context_tokens must be an integer, not 8.0"),
        (Limits(True, 4, 1000), "context_tokens must be an integer, not True"),
        (Limits("8", 4, 1000), "context_tokens must be an integer, not '8'"),
        (Limits(None, 4, 1000), "context_tokens must be an integer, not None"),
        (Limits(8, -1, 1000), "checkpoints is -1, but must be from 0 to 8"),
        (Limits(8, 9, 1000), "checkpoints is 9, but must be from 0 to 8"),
        (Limits(8, 1.5, 1000), "checkpoints must be an integer, not 1.5"),
        (Limits(8, 4, 0), "checkpoint_bytes is 0, but must be at least 1"),
        (Limits(8, 4, -5), "checkpoint_bytes is -5, but must be at least 1"),
        (Limits(8, 4, 1e9), "checkpoint_bytes must be an integer, not 1000000000.0"),
        (Limits(ENDLESS, 4, 1000), f"context_tokens is {TOLD}, but must be from 1 to 262144"),
        (Limits(8, 4, -ENDLESS), f"checkpoint_bytes is {TOLD}, but must be at least 1"),
        (Limits(8, ENDLESS, 1000), f"checkpoints is {TOLD}, but must be from 0 to 8"),
        ((ENDLESS,), f"limits must be a Limits, not ({TOLD},)"),
        ([ENDLESS], f"limits must be a Limits, not [{TOLD}]"),
        ((8, 4, 1000), "limits must be a Limits, not (8, 4, 1000)"),
    ],
)
def test_limits_out_of_range_are_refused_before_any_decoder_operation(limits, words):
    fixture = decoder()
    with pytest.raises(InvalidRequest) as caught:
        Runtime(fixture, limits)
    assert str(caught.value) == words
    assert fixture.trace.entries == []


@pytest.mark.parametrize(
    "limits",
    [
        Limits(1, 4, 1000),
        Limits(262_144, 4, 1000),
        Limits(8, 0, 1000),
        Limits(8, 8, 1000),
        Limits(8, 4, 1),
        Limits(8, 4, BIG),
        Limits(8, 4, ENDLESS),
        Limits(np.int16(8), np.uint8(4), np.int64(1000)),
    ],
)
def test_limits_at_their_bounds_are_taken(limits):
    runtime = Runtime(decoder(), limits)
    assert (runtime.tokens, runtime.checkpoint_count, runtime.is_faulted) == ([], 0, False)


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"vocab_size": 0}, "the decoder's vocab_size is 0, but must be from 1 to 1048576"),
        ({"vocab_size": -8}, "the decoder's vocab_size is -8, but must be from 1 to 1048576"),
        ({"vocab_size": 1_048_577}, "the decoder's vocab_size is 1048577, but must be from 1 to 1048576"),
        ({"vocab_size": 8.0}, "the decoder's vocab_size must be an integer, not 8.0"),
        ({"vocab_size": None}, "the decoder's vocab_size must be an integer, not None"),
        ({"identity": ""}, "the decoder's identity must be a non-empty text, not ''"),
        ({"identity": None}, "the decoder's identity must be a non-empty text, not None"),
        ({"identity": b"x"}, "the decoder's identity must be a non-empty text, not b'x'"),
    ],
)
def test_a_decoder_without_a_legal_vocabulary_or_identity_is_refused(attributes, words):
    fixture = decoder(**attributes)
    with pytest.raises(InvalidRequest) as caught:
        Runtime(fixture, LIMITS)
    assert str(caught.value) == words
    assert fixture.trace.entries == []


@pytest.mark.parametrize("vocab_size", [1, 1_048_576])
def test_vocabularies_at_the_bounds_are_taken(vocab_size):
    fixture = decoder(vocab_size=vocab_size)
    runtime = Runtime(fixture, LIMITS)
    assert runtime.decoder is fixture
    assert fixture.trace.entries == ["R"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"retention": "mru"}, "retention is 'mru', but must be one of fifo, lru"),
        ({"retention": None}, "retention is None, but must be one of fifo, lru"),
        ({"clock": None}, "clock must be callable, not None"),
        ({"clock": 5.0}, "clock must be callable, not 5.0"),
        ({"checkpoint_ceiling": 7}, "checkpoint_ceiling is 7, but must be at least 8"),
        ({"checkpoint_ceiling": 64.0}, "checkpoint_ceiling must be an integer, not 64.0"),
    ],
)
def test_other_options_of_the_runtime_are_checked(options, words):
    fixture = decoder()
    with pytest.raises(InvalidRequest) as caught:
        Runtime(fixture, LIMITS, **options)
    assert str(caught.value) == words
    assert fixture.trace.entries == []


def test_a_ceiling_raises_the_number_of_checkpoints_that_may_be_asked_for():
    Runtime(decoder(), Limits(8, 64, 1000), checkpoint_ceiling=64)
    Runtime(decoder(), Limits(8, 8, 1000), checkpoint_ceiling=8)
    with pytest.raises(InvalidRequest, match="checkpoints is 65, but must be from 0 to 64"):
        Runtime(decoder(), Limits(8, 65, 1000), checkpoint_ceiling=64)


def test_an_error_of_the_decoders_reset_fails_the_construction():
    error = OSError("no memory")
    with pytest.raises(OSError, match="no memory") as caught:
        Runtime(decoder(reset_error=error), LIMITS)
    assert caught.value is error


P30 = [1] * 30
REFUSED = [
    ({"prompt": []}, "prompt is empty, but must have at least 1 token"),
    ({"prompt": ()}, "prompt is empty, but must have at least 1 token"),
    ({"prompt": np.array([], dtype=np.int32)}, "prompt is empty, but must have at least 1 token"),
    ({"options": Generation(0)}, "max_tokens is 0, but must be at least 1"),
    ({"options": Generation(-1)}, "max_tokens is -1, but must be at least 1"),
    ({"options": Generation(1.0)}, "max_tokens must be an integer, not 1.0"),
    ({"options": Generation(True)}, "max_tokens must be an integer, not True"),
    ({"options": 5}, "options must be a Generation, not 5"),
    ({"prefill": Prefill(0)}, "block_tokens is 0, but must be from 1 to 512"),
    ({"prefill": Prefill(513)}, "block_tokens is 513, but must be from 1 to 512"),
    ({"prefill": Prefill(2.5)}, "block_tokens must be an integer, not 2.5"),
    ({"prefill": 64}, "prefill must be a Prefill, not 64"),
    (
        {"prompt": P30, "options": Generation(3)},
        "prompt has 30 tokens and max_tokens is 3: together 33, but context_tokens is 32",
    ),
    (
        {"prompt": [1], "options": Generation(32)},
        "prompt has 1 tokens and max_tokens is 32: together 33, but context_tokens is 32",
    ),
    (
        {"prompt": range(10**15), "options": Generation(1)},
        "prompt has 1000000000000000 tokens and max_tokens is 1: together 1000000000000001, but context_tokens is 32",
    ),
    (
        {"prompt": np.ones(33, dtype=np.int8), "options": Generation(40)},
        "prompt has 33 tokens and max_tokens is 40: together 73, but context_tokens is 32",
    ),
    ({"options": Generation(1, [1] * 257)}, "stop_tokens has 257 ids, but may have 256 at most"),
    ({"options": Generation(1, range(10**12))}, "stop_tokens has 1000000000000 ids, but may have 256 at most"),
    ({"options": Generation(1, (1, 8))}, "stop_tokens[1] is 8, outside the vocabulary 0..7"),
    ({"options": Generation(1, (-1,))}, "stop_tokens[0] is -1, outside the vocabulary 0..7"),
    ({"options": Generation(1, (1, "</s>"))}, "stop_tokens[1] must be an integer, not '</s>'"),
    ({"options": Generation(1, (1, True))}, "stop_tokens[1] must be an integer, not True"),
    ({"options": Generation(1, 5)}, "stop_tokens must be a sequence of integers, not 5"),
    ({"options": Generation(1, {1: 2})}, "stop_tokens must be a sequence of integers, not {1: 2}"),
    ({"prompt": [0, 8]}, "prompt[1] is 8, outside the vocabulary 0..7"),
    ({"prompt": [0, -1]}, "prompt[1] is -1, outside the vocabulary 0..7"),
    ({"prompt": [BIG]}, f"prompt[0] is {BIG}, outside the vocabulary 0..7"),
    ({"prompt": [1, ENDLESS]}, f"prompt[1] is {TOLD}, outside the vocabulary 0..7"),
    ({"prompt": {ENDLESS}}, f"prompt must be a sequence of integers, not {{{TOLD}}}"),
    ({"options": Generation(1, [-ENDLESS])}, f"stop_tokens[0] is {TOLD}, outside the vocabulary 0..7"),
    ({"options": Generation(-ENDLESS)}, f"max_tokens is {TOLD}, but must be at least 1"),
    (
        {"prompt": [1], "options": Generation(ENDLESS)},
        f"prompt has 1 tokens and max_tokens is {TOLD}: together {TOLD}, but context_tokens is 32",
    ),
    ({"prefill": Prefill(ENDLESS)}, f"block_tokens is {TOLD}, but must be from 1 to 512"),
    ({"prompt": [1, 2, 3], "save_at": (1, ENDLESS)}, f"save_at[1] is {TOLD}, but must be from 1 to 2"),
    ({"prompt": np.array([7, 8])}, "prompt[1] is 8, outside the vocabulary 0..7"),
    ({"prompt": np.array([2**64 - 1], dtype=np.uint64)}, f"prompt[0] is {2**64 - 1}, outside the vocabulary 0..7"),
    ({"prompt": [1, 2.0]}, "prompt[1] must be an integer, not 2.0"),
    ({"prompt": [1, True]}, "prompt[1] must be an integer, not True"),
    ({"prompt": [1, np.True_]}, "prompt[1] must be an integer, not np.True_"),
    ({"prompt": [1, None]}, "prompt[1] must be an integer, not None"),
    ({"prompt": "ab"}, "prompt[0] must be an integer, not 'a'"),
    ({"prompt": 5}, "prompt must be a sequence of integers, not 5"),
    ({"prompt": None}, "prompt must be a sequence of integers, not None"),
    ({"prompt": {1, 2}}, "prompt must be a sequence of integers, not {1, 2}"),
    ({"prompt": {1: 2}}, "prompt must be a sequence of integers, not {1: 2}"),
    ({"prompt": {1: 2}.keys()}, "prompt must be a sequence of integers, not dict_keys([1])"),
    ({"prompt": list}, "prompt must be a sequence of integers, not <class 'list'>"),
    ({"options": Generation(1, iter([1]))}, None),
    ({"prompt": np.array([1.0])}, "prompt must be a 1-D array of integers, not 1-D of float64: array([1.])"),
    ({"prompt": np.array([True])}, "prompt must be a 1-D array of integers, not 1-D of bool: array([ True])"),
    ({"prompt": np.array([[1]])}, "prompt must be a 1-D array of integers, not 2-D of int64: array([[1]])"),
    ({"prompt": np.array(1)}, "prompt must be a 1-D array of integers, not 0-D of int64: array(1)"),
    (
        {"prompt": memoryview(np.ones((1, 1), dtype=np.int16))},
        "prompt must be a 1-D array of integers, not 2-D of int16: <memory",
    ),
    (
        {"prompt": memoryview(np.array(1, dtype=np.int8))},
        "prompt must be a 1-D array of integers, not 0-D of int8: <memory",
    ),
    (
        {"prompt": memoryview(np.ones(1, dtype=np.float32))},
        "prompt must be a 1-D array of integers, not 1-D of float32: <memory",
    ),
    (
        {"prompt": memoryview(np.array([True]))},
        "prompt must be a 1-D array of integers, not 1-D of bool: <memory",
    ),
    (
        {"prompt": memoryview(b"a").cast("c")},
        "prompt must be a 1-D array of integers, not 1-D of bytes8: <memory",
    ),
    ({"deadline": "soon"}, "deadline must be a number, not 'soon'"),
    ({"deadline": float("nan")}, "deadline must be a number, not nan"),
    ({"emit": 3}, "emit must be callable or None, not 3"),
    ({"stop_when": 3}, "stop_when must be callable or None, not 3"),
    ({"on_prefix": 3}, "on_prefix must be callable or None, not 3"),
    ({"timings": 3}, "timings must be a Timings, not 3"),
    ({"keep_saved": 1}, "keep_saved must be a bool, not 1"),
    ({"prompt": [1, 2, 3], "save_at": (0, 1)}, "save_at[0] is 0, but must be from 1 to 2"),
    ({"prompt": [1, 2, 3], "save_at": (3,)}, "save_at[0] is 3, but must be from 1 to 2"),
    ({"prompt": [1, 2, 3], "save_at": (2, 2)}, "save_at must strictly increase, but save_at[1] is 2 after 2"),
    ({"prompt": [1, 2, 3], "save_at": (2, 1)}, "save_at must strictly increase, but save_at[1] is 1 after 2"),
    ({"prompt": [1, 2, 3], "save_at": range(1, 10**9)}, "save_at[2] is 3, but must be from 1 to 2"),
    ({"prompt": [1, 2, 3], "save_at": (1.5,)}, "save_at[0] must be an integer, not 1.5"),
    ({"prompt": [1, 2, 3], "save_at": 2}, "save_at must be a sequence of integers, not 2"),
    ({"prompt": [1], "save_at": (1,)}, "save_at[0] is 1, but must be from 1 to 0"),
    ({"prompt": [LONG]}, "prompt[0] is <integer of 66439 bits>, outside the vocabulary 0..7"),
    ({"options": Generation(1, (LONG,))}, "stop_tokens[0] is <integer of 66439 bits>, outside the vocabulary 0..7"),
    (
        {"options": Generation(LONG)},
        "prompt has 3 tokens and max_tokens is <integer of 66439 bits>: together <integer of 66439 bits>, "
        "but context_tokens is 32",
    ),
    ({"prefill": Prefill(LONG)}, "block_tokens is <integer of 66439 bits>, but must be from 1 to 512"),
    ({"prefill": Prefill(2**128 - 1)}, f"block_tokens is {2**128 - 1}, but must be from 1 to 512"),
    ({"prefill": Prefill(2**128)}, "block_tokens is <integer of 129 bits>, but must be from 1 to 512"),
    (
        {"prompt": memoryview(np.ones(2, dtype=np.float32))},
        None,
    ),
]


@pytest.mark.parametrize(
    ("arguments", "words"), REFUSED, ids=lambda value: value[:60] if isinstance(value, str) else ""
)
def test_an_argument_out_of_range_is_refused_and_nothing_is_touched(arguments, words):
    bench = Bench()
    bench.ask([2, 3])
    bench.trace.clear()
    call = {"prompt": [2, 3, 5], "options": ONE, "deadline": DEADLINE} | arguments
    sampler = (bench.sampler.asked, list(bench.sampler.history))
    with pytest.raises(InvalidRequest) as caught:
        bench.runtime.generate(
            call.pop("prompt"), call.pop("options"), **({"sampler": bench.sampler, "emit": bench.emit} | call)
        )
    if words is not None:
        assert str(caught.value).partition(" at 0x")[0] == words
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, PrismError)
    assert bench.trace.entries == ["."]
    assert (bench.sampler.asked, bench.sampler.history) == sampler
    assert (bench.runtime.tokens, bench.runtime.checkpoint_count) == ([2, 3, 5], 1)
    assert bench.ask([2, 3, 5]).reused_tokens == 3


def test_a_sampler_without_a_sample_method_is_refused():
    class Copied:
        def copy(self):
            return self

    with pytest.raises(InvalidRequest, match=r"sampler must have a method sample\(logits\), but is <"):
        Bench().ask([1], sampler=Copied())


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        ({"prompt": P30, "options": Generation(2)}, 32),
        ({"prompt": [1], "options": Generation(31)}, 32),
        ({"prompt": [1], "prefill": Prefill(512)}, 2),
        ({"prompt": [1], "prefill": Prefill(np.int64(1))}, 2),
        ({"prompt": [0, 7], "options": Generation(1, (0, 7))}, 2),
        ({"prompt": [1], "options": Generation(1, [1] * 256)}, 1),
        ({"prompt": [1], "options": Generation(1, {0, 1})}, 1),
        ({"prompt": [1], "options": Generation(1, frozenset())}, 2),
        ({"prompt": [1], "options": Generation(1, np.array([1, 2], dtype=np.uint8))}, 1),
        ({"prompt": [1], "options": Generation(np.uint16(1))}, 2),
        ({"prompt": [1], "deadline": 1}, 2),
        ({"prompt": [1], "deadline": np.float32(1)}, 2),
        ({"prompt": [1], "deadline": float("inf")}, 2),
        ({"prompt": [1], "deadline": ENDLESS}, 2),
        ({"prompt": [1], "timings": Timings()}, 2),
        ({"prompt": [1, 2, 3], "save_at": (1, 2)}, 4),
        ({"prompt": [1, 2, 3], "save_at": np.array([2])}, 4),
    ],
)
def test_arguments_at_their_bounds_are_taken(arguments, tokens):
    bench = Bench()
    call = {"prompt": [1], "options": ONE} | arguments
    bench.runtime.generate(call.pop("prompt"), call.pop("options"), **call)
    assert len(bench.runtime.tokens) == tokens


def test_reuse_does_not_make_room_in_the_context():
    bench = Bench()
    bench.ask(P30, Generation(2))
    assert len(bench.runtime.tokens) == 32
    with pytest.raises(InvalidRequest, match="together 33, but context_tokens is 32"):
        bench.ask(list(bench.runtime.tokens))


class Indexed:
    """The old sequence protocol, of no registered kind."""

    def __init__(self, ids):
        self.ids = ids

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, at):
        return self.ids[at]


@pytest.mark.parametrize(
    "kind",
    [
        tuple,
        list,
        collections.deque,
        bytes,
        bytearray,
        lambda ids: memoryview(bytes(ids)),
        lambda ids: memoryview(np.array(ids, dtype=np.int64)),
        lambda ids: memoryview(np.array(ids * 2, dtype=np.uint16))[:3],
        lambda ids: memoryview(np.array(ids, dtype=">u4")),
        lambda ids: memoryview(np.array(ids * 2)[:3])[::1],
        lambda ids: array.array("q", ids),
        np.array,
        lambda ids: np.array(ids, dtype=np.uint8),
        lambda ids: np.array(ids, dtype=">i8"),
        lambda ids: np.array(ids * 2)[:3],
        lambda ids: [np.int16(token) for token in ids],
        lambda ids: [np.array(token) for token in ids],
        lambda ids: Indexed(ids),
    ],
)
def test_any_integer_sequence_is_a_prompt(kind):
    bench = Bench()
    assert bench.ask(kind([2, 3, 5])).prompt_tokens == 3
    assert bench.runtime.tokens == [2, 3, 5, 2]
    assert all(type(token) is int for token in bench.decoder.state)


def test_a_range_and_a_token_view_are_prompts():
    bench = Bench()
    bench.ask(range(3))
    assert bench.runtime.tokens == [0, 1, 2, 3]
    assert bench.ask(bench.runtime.tokens).reused_tokens == 4


@pytest.mark.parametrize("kind", [list, np.array])
def test_a_prompt_is_copied_and_never_retained(kind):
    bench = Bench()
    prompt = kind([2, 3])
    bench.ask(prompt, emit=lambda _: prompt.__setitem__(0, 7))
    prompt[1] = 6
    assert bench.runtime.tokens == [2, 3, 5]
    assert bench.ask([2, 3, 5]).reused_tokens == 3


def test_a_sequence_that_lies_about_its_length_cannot_overrun_the_context():
    class Liar(collections.UserList):
        def __len__(self):
            return 2

    with pytest.raises(InvalidRequest, match="together 3, but context_tokens is 32"):
        Bench().ask(Liar([1] * 40))


@pytest.mark.parametrize("bad", [{"prompt": []}, {"options": 5}, {"prefill": 3}])
def test_cancellation_beats_expiry_and_both_beat_bad_arguments(bad):
    bench = Bench()
    call = {"prompt": [1], "options": ONE} | bad
    bench.trace.expire()
    with pytest.raises(DeadlineExceeded):
        bench.ask(call["prompt"], call["options"], **{k: v for k, v in call.items() if k == "prefill"})
    bench.trace.cancellation.cancel()
    with pytest.raises(Cancelled):
        bench.ask(call["prompt"], call["options"], **{k: v for k, v in call.items() if k == "prefill"})
    assert bench.trace.entries == ["."]


def test_a_deadline_counts_as_passed_when_the_clock_equals_it():
    bench = Bench()
    bench.trace.now = DEADLINE
    with pytest.raises(DeadlineExceeded, match=r"the deadline 100.0 has passed: the clock reads 100.0") as caught:
        bench.ask([1])
    assert isinstance(caught.value, TimeoutError)
    bench.trace.now = np.nextafter(DEADLINE, 0)
    bench.ask([1])


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.longdouble, int])
def test_a_narrow_deadline_does_not_round_the_clock(kind):
    """Beside a float32, numpy would read a clock of 2047.999999999 as 2048."""
    bench = Bench()
    bench.trace.now = np.nextafter(2048.0, 0).item()
    bench.ask([1], deadline=kind(2048))
    bench.trace.now = 2048.0
    with pytest.raises(DeadlineExceeded, match="the deadline 2048"):
        bench.ask([1], deadline=kind(2048))


@pytest.mark.parametrize("deadline", [-ENDLESS, -(10**400), float("-inf")], ids=["endless", "long", "inf"])
def test_a_deadline_far_in_the_past_has_passed(deadline):
    with pytest.raises(DeadlineExceeded, match=r"has passed: the clock reads 0\.0"):
        Bench().ask([], deadline=deadline)


def test_a_narrow_deadline_is_compared_with_the_whole_of_the_clocks_reading():
    bench = Bench()
    deadline = np.float16(100.0)
    bench.trace.now = 100.0 - 1e-9  # rounded to half precision this would be 100
    bench.ask([1], deadline=deadline)
    bench.trace.now = 100.0
    with pytest.raises(DeadlineExceeded, match=r"the deadline 100.0 has passed: the clock reads 100.0"):
        bench.ask([1], deadline=deadline)


@pytest.mark.parametrize("now", [0.0, 50.0, float("inf")])
@pytest.mark.parametrize(
    "deadline",
    ["soon", float("nan"), np.float32("nan"), True, False, np.True_, 1j, Decimal(5), np.array(5.0), [5.0]],
    ids=repr,
)
def test_a_deadline_that_is_no_number_is_refused_and_never_passes(deadline, now):
    bench = Bench()
    bench.trace.now = now
    with pytest.raises(InvalidRequest) as caught:
        bench.ask([1], deadline=deadline)
    assert str(caught.value) == f"deadline must be a number, not {deadline!r}"
    assert bench.trace.operations == []


@pytest.mark.parametrize("deadline", [LONG, Fraction(LONG, 3)], ids=["integer", "fraction"])
def test_a_deadline_beyond_any_float_is_no_deadline_and_its_negative_has_passed(deadline):
    bench = Bench()
    bench.ask([1], deadline=deadline)
    with pytest.raises(DeadlineExceeded, match=r"the deadline -inf has passed: the clock reads 0.0"):
        bench.ask([1], deadline=-deadline)


def test_every_refusal_leaves_the_request_repeatable():
    bench = Bench()
    for arguments, _ in REFUSED:
        call = {"prompt": [1], "options": ONE} | arguments
        prompt, options = call.pop("prompt"), call.pop("options")
        with pytest.raises(InvalidRequest):
            bench.runtime.generate(prompt, options, **call)
    assert bench.ask([1]).reused_tokens == 0
    assert bench.runtime.tokens == [1, 1]
