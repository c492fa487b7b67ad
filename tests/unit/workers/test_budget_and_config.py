"""The memory plan and the configuration record: what does not fit or is out of range is refused in one clear line."""

from __future__ import annotations

import re

import pytest

from prism_core.errors import InvalidRequest
from prism_core.runtime import Generation, Runtime
from tests.toy import ToyModel
from workers.budget import plan
from workers.config import WorkerConfig
from workers.main import Orders

MIB = 1 << 20


def test_the_parts_add_up_to_the_budget_and_hold_two_full_contexts():
    model = ToyModel(context_tokens=4096)
    decoder = model.decoder()
    made = plan(model, decoder, memory_bytes=32 * MIB, saved_prefixes=8)
    assert made.memory_bytes == 32 * MIB
    assert made.limits.checkpoint_bytes >= 2 * decoder.checkpoint_bytes_at(4096) + 8 * MIB


def test_a_full_context_can_be_reached_and_gone_on_from_within_the_plan():
    model = ToyModel(context_tokens=512)
    decoder = model.decoder()
    made = plan(model, decoder, memory_bytes=None, saved_prefixes=8)
    runtime = Runtime(decoder, made.limits, retention="lru")
    for length in (400, 500, 511):
        runtime.generate([5] * length, Generation(max_tokens=1))
    assert runtime.checkpoint_count


def test_a_budget_that_is_too_small_names_a_context_that_fits():
    model = ToyModel(context_tokens=200_000)
    with pytest.raises(InvalidRequest, match=r"a context of .* tokens fits") as refusal:
        plan(model, model.decoder(), memory_bytes=16 * MIB, saved_prefixes=8)
    fits = int(re.findall(r"a context of (\d+) tokens fits", str(refusal.value))[0])
    smaller = ToyModel(context_tokens=fits)
    assert plan(smaller, smaller.decoder(), memory_bytes=16 * MIB, saved_prefixes=8).context_tokens == fits
    larger = ToyModel(context_tokens=fits + 1)
    with pytest.raises(InvalidRequest):
        plan(larger, larger.decoder(), memory_bytes=16 * MIB, saved_prefixes=8)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("redis_url", ""),
        ("threads", 0),
        ("threads", -1),
        ("threads", True),
        ("threads", 1.5),
        ("context_tokens", 0),
        ("context_tokens", 7),
        ("context_tokens", 300_000),
        ("memory_bytes", 1),
        ("saved_prefixes", 65),
        ("prefill_block_tokens", 513),
        ("grace_s", -1),
        ("grace_s", float("nan")),
        ("buffer_events", 0),
        ("buffer_s", "30"),
    ],
)
def test_a_field_out_of_range_is_refused_with_its_name_and_value(field: str, value: object):
    fields = {"model": "m", "redis_url": "unix:///x", field: value}
    with pytest.raises(InvalidRequest, match=field) as refusal:
        WorkerConfig(**fields)
    assert repr(value) in str(refusal.value) or value == ""
    assert "\n" not in str(refusal.value)


def test_orders_survive_the_pipe_to_a_worker():
    orders = Orders(
        config=WorkerConfig(model="m", redis_url="unix:///x", threads=3), name="w", parent=7, pool={"lease_ms": 900}
    )
    assert Orders.from_json(orders.to_json()) == orders
