"""Specs, configuration, names and transcripts: limits at construction, round trips, and one clear line for a
mistake."""

from __future__ import annotations

import dataclasses
import re
import time
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker import calls, events, keys
from broker.config import PoolConfig
from broker.errors import InvalidCursor, InvalidRequest, NotFound
from broker.spec import RequestSpec
from broker.store import Lease
from broker.transcript import TurnRecord
from prism_core import codec


@given(
    prompt=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    max_tokens=st.integers(1, 262_144),
    temperature=st.floats(0, 100),
    seed=st.none() | st.integers(0, (1 << 64) - 1),
    stop=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5), max_size=4),
)
def test_a_spec_comes_back_as_it_went(**options: Any) -> None:
    spec = RequestSpec(**options)
    assert RequestSpec.unpack(spec.pack()) == spec


def test_a_spec_of_each_kind_of_input_comes_back() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    for spec in (
        RequestSpec(messages=[message], template={"enable_thinking": False}),
        RequestSpec(token_ids=[1, 2, 3], logprobs=0, top_k=5, history="replace"),
    ):
        assert RequestSpec.unpack(spec.pack()) == spec


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "exactly one of prompt, messages and token_ids"),
        ({"prompt": "a", "token_ids": [1]}, "prompt and token_ids"),
        ({"prompt": ""}, "prompt must be a string that is not empty"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "\ud800"}, "Unicode"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": object()}]}, "messages[0]"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [True]}, "token_ids"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens must be an integer from 1 to 262144, got 0"),
        ({"prompt": "a", "max_tokens": -3}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 2.5}, "max_tokens"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens"),
        ({"prompt": "a", "temperature": -0.1}, "temperature"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p must be a number above 0 up to 1, got 0"),
        ({"prompt": "a", "top_p": 1.1}, "top_p"),
        ({"prompt": "a", "min_p": -1}, "min_p"),
        ({"prompt": "a", "top_k": -1}, "top_k"),
        ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
        ({"prompt": "a", "presence_penalty": float("inf")}, "presence_penalty"),
        ({"prompt": "a", "seed": -1}, "seed"),
        ({"prompt": "a", "seed": 1 << 64}, "seed"),
        ({"prompt": "a", "stop": 5}, "stop must be a list"),
        ({"prompt": "a", "stop": [""]}, "each stop"),
        ({"prompt": "a", "stop": ["x"] * 17}, "at most 16"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "temperature": 10**400}, "temperature must be a number from 0 to 100, got 1000000"),
        ({"prompt": "a", "temperature": -(10**5000)}, "number from 0 to 100, got a value too long"),
        ({"prompt": "a", "top_k": 10**5000}, "integer from 0 to 1048576, got a value too long to show"),
        ({"prompt": "a", "stop": [10**5000]}, "each stop must be a string"),
        ({"prompt": "a", "template": {"x": 10**5000}}, "template: "),
        ({"token_ids": [10**5000]}, "each of token_ids must be 0 to 1048575"),
        ({"prompt": "a", "template": []}, "template"),
        ({"prompt": "a", "template": {1: 2}}, "the name of a variable must be a string, got 1"),
        ({"prompt": "a", "template": {"messages": []}}, "the variable 'messages' is set by the engine"),
        ({"prompt": "a", "template": {"answers": {}}}, "the variable 'answers' is set by the engine"),
        ({"prompt": "a", "template": {"add_generation_prompt": False}}, "'add_generation_prompt' is set by the engine"),
        ({"prompt": "a", "history": "sometimes"}, "history"),
        ({"prompt": "a", "temprature": 1}, "did you mean 'temperature'"),
    ],
)
def test_a_mistake_in_a_spec_is_one_line_that_names_it(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        RequestSpec.of(options)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_unreadable_spec_is_an_error_not_a_crash() -> None:
    for data in (b"", b"\x93", codec.pack([1]), codec.pack({"prompt": "a", "newer": 1}), codec.pack({})):
        with pytest.raises((InvalidRequest, codec.CodecError)):
            RequestSpec.unpack(data)


def test_a_digest_depends_on_everything_asked_and_not_on_a_drawn_seed() -> None:
    spec = RequestSpec(prompt="a", temperature=1.0)
    assert spec.seeded().seed is not None
    assert spec.digest() == RequestSpec(prompt="a", temperature=1.0).digest()
    others = [{"prompt": "b"}, {"max_tokens": 5}, {"seed": 1}, {"stop": ["x"]}, {"template": {"tools": []}}]
    digests = {dataclasses.replace(spec, **other).digest() for other in others}
    assert len(digests | {spec.digest()}) == len(others) + 1


def test_affinity_stays_the_same_while_a_chat_grows() -> None:
    head = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    grown = [*head, {"role": "assistant", "content": "a"}, {"role": "user", "content": "v"}]
    assert RequestSpec(messages=head).affinity() == RequestSpec(messages=grown).affinity()
    assert RequestSpec(messages=head[1:]).affinity() != RequestSpec(messages=head).affinity()
    assert RequestSpec(prompt="x" * 300 + "a").affinity() == RequestSpec(prompt="x" * 300 + "b").affinity()
    assert RequestSpec(token_ids=[1]).affinity() != RequestSpec(token_ids=[2]).affinity()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"request": "a b"}, "request id"),
        ({"request": ""}, "request id"),
        ({"request": "x" * 65}, "request id"),
        ({"request": "r\n"}, "request id"),
        ({"conversation": "c:d"}, "conversation"),
        ({"conversation": ""}, "conversation"),
        ({"group": "a/b"}, "group"),
        ({"priority": "urgent"}, "interactive, background, batch"),
        ({"model": "x" * 300}, "model"),
    ],
)
def test_ids_and_priorities_are_checked_before_they_become_keys(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        calls.Submission(**{"request": "r", **options})
    assert says in str(raised.value)


@pytest.mark.parametrize("deadline", [0, -1, float("inf"), float("nan"), 1e9, True, "5"])
def test_a_deadline_is_positive_and_bounded(deadline: Any) -> None:
    with pytest.raises(InvalidRequest, match="deadline"):
        calls.submit(calls.Submission(request="r", deadline_s=deadline), RequestSpec(prompt="a"), PoolConfig())


def test_a_request_that_is_too_long_is_refused_before_it_is_sent() -> None:
    config = PoolConfig(max_spec_bytes=100)
    with pytest.raises(InvalidRequest, match="limit is 100"):
        calls.submit(calls.Submission(request="r"), RequestSpec(prompt="a" * 200), config)


def test_every_number_of_the_pool_is_documented_and_checked() -> None:
    source = files("broker").joinpath("config.py").read_text()
    for field in dataclasses.fields(PoolConfig):
        assert re.search(rf'    {field.name}: \w+ = .*\n    """[A-Z]', source), field.name
        for bad in (0, -1, True, "5", float("nan")):
            with pytest.raises(InvalidRequest, match=field.name):
                PoolConfig(**{field.name: bad})


def test_numbers_of_the_pool_that_contradict_each_other_are_refused() -> None:
    for bad in (
        {"beat_ms": 3000},
        {"result_s": 10},
        {"log_s": 10**6},
        {"default_deadline_s": 10**6},
        {"max_open_batch": 20_000},
        {"barren_takes": 50},
        {"conversation_s": 100},
    ):
        with pytest.raises(InvalidRequest):
            PoolConfig(**bad)


def test_ulids_are_unique_and_sort_by_time() -> None:
    first = keys.new_ulid()
    until = time.time_ns() + 3_000_000
    while time.time_ns() < until:
        pass
    later = [keys.new_ulid() for _ in range(1000)]
    assert all(re.fullmatch(r"[0-9A-HJKMNP-TV-Z]{26}", ulid) for ulid in later)
    assert len(set(later)) == 1000
    assert all(first < ulid for ulid in later)


def test_owners_share_no_key() -> None:
    alice, bob = keys.owner_of("sk-alice"), keys.owner_of("sk-bob")
    assert len({alice, bob, keys.owner_of(None)}) == 3
    assert "alice" not in alice
    assert keys.conversation_key(alice, "c") != keys.conversation_key(bob, "c")
    assert keys.idempotency(alice, "k") != keys.idempotency(bob, "k")


@pytest.mark.parametrize("key", ["", "x" * 256, 5])
def test_idempotency_keys_are_bounded(key: Any) -> None:
    with pytest.raises(InvalidRequest, match="idempotency_key"):
        keys.idempotency("local", key)


@given(st.integers(0, 10**15 - 1), st.integers(0, 10**15 - 1))
def test_cursors_come_back(epoch: int, ev: int) -> None:
    cursor = events.Cursor(epoch, ev)
    assert events.parse_cursor(str(cursor)) == cursor


@given(st.text())
def test_anything_else_is_no_cursor(text: str) -> None:
    if not re.fullmatch(r"(0|[1-9][0-9]*)-(0|[1-9][0-9]*)", text):
        with pytest.raises(InvalidCursor):
            events.parse_cursor(text)


def test_events_come_back() -> None:
    cursor = events.Cursor(2, 5)
    start = events.Event.unpack(cursor, events.start(attempt=1, worker="w", prompt_tokens=3, reused_tokens=2))
    assert (start.kind, start.data["reused_tokens"], start.id, start.sequence) == ("start", 2, "2-5", 5)
    delta = events.Event.unpack(cursor, events.delta(n=2, ids=[1, 2], text="hé", logprobs=[[0.5]]))
    assert (delta.text, delta.token_ids, delta.data["lp"], delta.state) == ("hé", [1, 2], [[0.5]], None)
    end = events.Event.unpack(cursor, events.end(state="done", reason="stop", usage={"a": 1}, n=2))
    assert (end.state, end.data["usage"]) == ("done", {"a": 1})
    for bad in (b"", codec.pack([1]), codec.pack({"n": 1}), codec.pack({"k": 5})):
        with pytest.raises(codec.CodecError):
            events.Event.unpack(cursor, bad)


def test_turns_come_back_and_damaged_ones_are_an_error() -> None:
    turn = TurnRecord(request="r", model="m", messages=[{"role": "user", "content": "x"}], answer_ids=[1], text="y")
    assert TurnRecord.unpack(turn.pack()) == turn
    for bad in (b"", codec.pack([1]), codec.pack({"request": "r"})):
        with pytest.raises(codec.CodecError):
            TurnRecord.unpack(bad)


def test_leases_come_back_and_tolerate_newer_fields() -> None:
    lease = Lease(worker="w1", model="m", host="h", pid=5, name="toy")
    assert Lease.unpack(lease.pack()) == lease
    assert Lease.unpack(lease.pack()[:-1] + ',"newer":1}') == lease
    with pytest.raises(InvalidRequest, match="worker"):
        Lease(worker="a b", model="m", host="h", pid=5).pack()


def test_a_missing_or_foreign_record_is_not_found() -> None:
    values: list[bytes | None] = [None] * len(calls.RECORD_FIELDS)
    with pytest.raises(NotFound):
        calls.read_record("r", "local", values)
    values[0] = b"somebody"
    with pytest.raises(NotFound):
        calls.read_record("r", "local", values)
    assert calls.read_record("r", "", values).owner == "somebody"


def test_python_and_lua_spell_the_same_names() -> None:
    scripts = "\n".join(path.read_text() for path in files("broker").joinpath("scripts").iterdir())
    assert f"local P, RQ, QUEUE = '{keys.PRISM}', '{keys.RQ}:', '{keys.RQ}:queue:'" in scripts
    for name in (keys.LIVE, keys.WORKERS, keys.DRAINING, keys.REAPING, keys.STATS, keys.MODELS, keys.NAMES, keys.BOOT):
        assert f"P .. '{name.removeprefix(keys.PRISM)}'" in scripts, name
    assert "{'interactive', 'background', 'batch'}" in scripts
    assert keys.PRIORITIES == ("interactive", "background", "batch")


def test_every_script_begins_with_its_contract() -> None:
    for path in files("broker").joinpath("scripts").iterdir():
        lines = path.read_text().splitlines()
        assert lines[1].startswith("-- "), path
        assert lines[2].startswith("-- "), path
        if path.name.startswith("_"):
            assert lines[0].startswith("-- Part: "), path
            assert lines[2].startswith("-- Gives: "), path
        else:
            assert re.match(r"-- KEYS \S+\. ARGV 1 ", lines[0]), path
            assert lines[2].startswith("-- Returns "), path
            assert lines[3].startswith("-- needs: "), path
