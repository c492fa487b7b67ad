"""Section 1: the names that `prism_core` exports, and the forms that callers rely on."""

from __future__ import annotations

import inspect
import time
from dataclasses import MISSING, FrozenInstanceError, fields, is_dataclass
from enum import Enum

import pytest

import prism_core

from .fixture import Bench, FixtureDecoder

RECORDS = {
    "Limits": {"context_tokens": MISSING, "checkpoints": MISSING, "checkpoint_bytes": MISSING},
    "Generation": {"max_tokens": MISSING, "stop_tokens": ()},
    "Prefill": {"block_tokens": 1},
    "Completion": dict.fromkeys(("prompt_tokens", "reused_tokens", "generated_tokens", "finish"), MISSING),
}
CONSTANTS = {
    "MAX_CONTEXT_TOKENS": 262_144,
    "MAX_CHECKPOINTS": 8,
    "MAX_VOCAB": 1_048_576,
    "MAX_STOP_TOKENS": 256,
    "MAX_PREFILL_BLOCK_TOKENS": 512,
    "SNAPSHOT_OVERHEAD_BYTES": 80,
}
ERRORS = {
    "InvalidRequest": ValueError,
    "Cancelled": None,
    "DeadlineExceeded": TimeoutError,
    "RuntimeFaulted": None,
    "RestoreFailed": None,
    "DecoderError": None,
    "SamplerError": None,
    "BudgetExceeded": None,
    "ModelError": None,
}
OTHERS = "Finish Cancellation Runtime greedy Greedy Sampler TemperatureSampler Decoder DecoderBase PrismError Timings"


def test_every_name_of_the_contract_is_exported():
    promised = {*RECORDS, *CONSTANTS, *ERRORS, *OTHERS.split()}
    assert promised <= set(prism_core.__all__) <= set(dir(prism_core))
    assert all(hasattr(prism_core, name) for name in prism_core.__all__)
    with pytest.raises(AttributeError, match="module 'prism_core' has no attribute 'Generate'"):
        prism_core.Generate  # noqa: B018


@pytest.mark.parametrize(("name", "value"), CONSTANTS.items())
def test_a_constant_is_what_the_contract_says(name, value):
    assert getattr(prism_core, name) == value


@pytest.mark.parametrize(("name", "expected"), RECORDS.items(), ids=RECORDS)
def test_a_record_has_these_fields_in_this_order_and_is_frozen(name, expected):
    kind = getattr(prism_core, name)
    assert is_dataclass(kind)
    assert [(field.name, field.default) for field in fields(kind)] == list(expected.items())
    record = kind(*range(1, len(expected) + 1))
    assert record == kind(**dict(zip(expected, range(1, len(expected) + 1), strict=True)))
    with pytest.raises(FrozenInstanceError):
        setattr(record, next(iter(expected)), 5)


def test_finish_has_two_members_that_are_texts():
    assert issubclass(prism_core.Finish, Enum)
    assert {one.name: one.value for one in prism_core.Finish} == {"STOP": "stop", "LENGTH": "length"}


@pytest.mark.parametrize(("name", "builtin"), ERRORS.items(), ids=ERRORS)
def test_an_error_is_a_prism_error_and_of_the_builtin_kind_that_fits(name, builtin):
    kind = getattr(prism_core, name)
    assert kind.__bases__ == (prism_core.PrismError, *([builtin] if builtin else []))
    assert issubclass(prism_core.PrismError, Exception)


def test_generate_takes_prompt_and_options_by_place_and_the_rest_by_name_off_by_default():
    off = {"cancellation": None, "deadline": None, "sampler": None, "emit": None, "stop_when": None, "on_prefix": None}
    extensions = {"save_at": (), "keep_saved": False, "timings": None}
    parameters = inspect.signature(prism_core.Runtime.generate).parameters.values()
    by_place = [one for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    by_name = {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}
    assert [(one.name, one.default) for one in by_place[1:]] == [
        ("prompt", inspect._empty),
        ("options", inspect._empty),
    ]
    assert by_name == {"prefill": prism_core.Prefill(1), **off, **extensions}


def test_a_runtime_is_by_default_a_fifo_of_at_most_eight_on_the_monotonic_clock():
    parameters = inspect.signature(prism_core.Runtime).parameters.values()
    assert {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY} == {
        "clock": time.monotonic,
        "retention": "fifo",
        "checkpoint_ceiling": 8,
    }


def test_by_default_deadlines_are_of_the_monotonic_clock():
    runtime = prism_core.Runtime(FixtureDecoder(), prism_core.Limits(32, 4, 16_384))
    with pytest.raises(prism_core.DeadlineExceeded):
        runtime.generate([1], prism_core.Generation(1), deadline=time.monotonic())
    runtime.generate([1], prism_core.Generation(1), deadline=time.monotonic() + 600)
    assert runtime.tokens == [1, 1]


def test_a_new_runtime_is_empty_and_without_a_fault():
    bench = Bench()
    runtime = bench.runtime
    assert (runtime.tokens, runtime.checkpoint_count, runtime.is_faulted) == ([], 0, False)
    assert runtime.decoder is bench.decoder
    for name in ("tokens", "decoder", "is_faulted", "checkpoint_count"):
        with pytest.raises(AttributeError):
            setattr(runtime, name, None)
