"""One turn on a real Runtime against a real broker."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from redis.exceptions import ResponseError

from broker import keys
from broker.failures import translated
from prism_core.sampling import TemperatureSampler
from tests.brokers import PrivateBroker
from tests.toy import STOP, ToyCheckpoint, ToyDecoder, ToyModel
from tests.unit.workers.rig import Rig
from workers.cancellation import Halt
from workers.ending import EventsRefused


@pytest.fixture
def rig(broker: PrivateBroker) -> Rig:
    return Rig(broker)


@pytest.fixture
def stepping(broker: PrivateBroker) -> Rig:
    """Its steps sleep, and so leave the interpreter to the flusher as a kernel does."""
    return Rig(broker, ToyModel(step_s=0.0005))


def test_a_turn_streams_what_the_bare_runtime_generates(rig: Rig):
    result, log = rig.run(prompt="hello", max_tokens=60)
    ids = rig.bare(list(b"hello"), 60)
    assert log.ids == ids
    assert log.text == rig.model.tokenizer.decode(ids)
    assert log.kinds()[0] == "start"
    assert (result.disposition, result.state, result.reason) == ("ended", "done", "length")
    assert log.end["reason"] == "length"
    assert log.end["n"] == 60
    assert log.end["usage"]["prompt_tokens"] == 5
    assert log.end["usage"]["completion_tokens"] == 60


def test_a_seeded_turn_draws_what_the_sampler_alone_draws(rig: Rig):
    options = {"temperature": 0.9, "top_k": 12, "seed": 5, "repetition_penalty": 1.1, "frequency_penalty": 0.2}
    _, log = rig.run(prompt="abc", max_tokens=80, top_p=0.9, **options)
    assert log.ids == rig.bare(list(b"abc"), 80, TemperatureSampler(top_p=0.9, **options))


def test_every_phase_of_a_turn_is_timed(rig: Rig):
    _, log = rig.run(prompt="abc", max_tokens=5)
    usage = log.end["usage"]
    names = ["queue_us", "prefix_us", "prefill_us", "decode_us", "sampling_us", "emit_us", "snapshot_us", "flush_us"]
    assert {*names, "flushes"} <= usage.keys()
    assert usage["decode_us"] > 0
    assert usage["flush_us"] > 0


def test_a_stop_token_ends_the_turn_and_is_not_shown(broker: PrivateBroker):
    rig = Rig(broker, ToyModel(stop_bias=4.0))
    _, log = rig.run(prompt="hello", max_tokens=500)
    assert log.end["reason"] == "stop"
    assert STOP not in log.ids
    assert len(log.ids) < 500


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_stop_string_of_many_tokens_is_never_shown_in_part(rig: Rig, length: int):
    _, plain = rig.run(prompt="hello", max_tokens=60)
    at = len(plain.text) // 2
    stop = plain.text[at : at + length]
    first = plain.text.find(stop)
    _, log = rig.run(prompt="hello", max_tokens=60, stop=[stop])
    assert log.text == plain.text[:first]
    assert log.end["reason"] == "stop"
    shown = ""
    for event in log.events:
        shown += event.text
        assert plain.text[:first].startswith(shown)


def test_a_begun_stop_string_is_shown_when_the_turn_ends_without_the_rest(rig: Rig):
    _, plain = rig.run(prompt="hello", max_tokens=20)
    _, log = rig.run(prompt="hello", max_tokens=20, stop=[plain.text[-3:] + "#"])
    assert log.text == plain.text


def test_logprobs_are_those_of_the_bare_logits(rig: Rig):
    _, log = rig.run(prompt="abc", max_tokens=10, logprobs=3)
    marks = [mark for event in log.events if event.kind == "delta" for mark in event.data["lp"]]
    assert len(marks) == 10
    for token, mark in zip(log.ids, marks, strict=True):
        assert mark["top"][0][0] == token, "greedy takes the best"
        assert mark["lp"] == pytest.approx(mark["top"][0][1])
        assert [lp for _, lp, _ in mark["top"]] == sorted((lp for _, lp, _ in mark["top"]), reverse=True)
        assert mark["b"] == rig.model.tokenizer.token_bytes(token)
        assert sum(math.exp(lp) for _, lp, _ in mark["top"]) <= 1 + 1e-9


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt": "x" * 4000, "max_tokens": 200}, "4096"),
        ({"token_ids": [5, 999_999]}, "999999"),
        ({"prompt": "x", "presence_penalty": 5.0}, "presence_penalty"),
    ],
)
def test_a_request_that_the_model_cannot_run_ends_as_failed_with_one_clear_line(rig: Rig, options, words):
    result, log = rig.run(**options)
    assert result.state == "failed"
    assert log.end["reason"].startswith("invalid_request: ")
    assert words in log.end["reason"]
    assert "\n" not in log.end["reason"]
    assert not log.ids


def test_second_turns_of_a_conversation_reuse_all_that_was_said(rig: Rig):
    first, log = rig.run(messages=[{"role": "user", "content": "one"}], conversation="c", max_tokens=30)
    second, _ = rig.run(messages=[{"role": "user", "content": "two"}], conversation="c", max_tokens=5)
    assert first.reused_tokens == 0
    # The prompt and the answer, whose closing mark alone is new.
    assert second.reused_tokens == first.prompt_tokens + len(log.ids)


def test_an_edited_message_reuses_exactly_the_prefix_before_it(rig: Rig):
    system = {"role": "system", "content": "s"}
    one, two = {"role": "user", "content": "one"}, {"role": "user", "content": "two"}
    _, log = rig.run(messages=[system, one], conversation="c", max_tokens=20)
    answer = {"role": "assistant", "content": log.text}
    rig.run(messages=[two], conversation="c", max_tokens=20)
    edited, _ = rig.run(
        messages=[system, one, answer, {"role": "user", "content": "another"}], conversation="c", max_tokens=7
    )
    kept = rig.model.chat.encode_turn([system, one], add_generation_prompt=True).token_ids
    assert edited.reused_tokens == len(kept) + len(log.ids)
    key = keys.conversation_key("local", "c")
    assert [turn.messages[-1]["content"] for turn in rig.store.transcript(key)] == ["one", "another"]


def test_a_stop_string_cuts_the_committed_ids_where_it_cuts_the_text(rig: Rig):
    ask = [{"role": "user", "content": "one"}]
    _, plain = rig.run(messages=ask, max_tokens=60)
    stop = plain.text[20:24]
    _, log = rig.run(messages=ask, conversation="c", max_tokens=60, stop=[stop])
    (turn,) = rig.store.transcript(keys.conversation_key("local", "c"))
    assert turn.text == log.text
    assert rig.model.tokenizer.decode(turn.answer_ids) == log.text


OPTIONS = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 11, "top_k": 30, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "stopped": {"stop": ["é", "zz", "qa"]},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_takeover_after_any_token_goes_on_as_if_nothing_had_happened(rig: Rig, options):
    total = 40
    _, whole = rig.run(prompt="hello", max_tokens=total, **options)
    for after in range(0, len(whole.ids) + 1, 3):
        request = rig.submit(prompt="hello", max_tokens=total, **options)
        claim = rig.store.take()
        assert claim is not None
        handed = rig.stopped_after(claim, after, Halt.DRAINED)
        seen = len(rig.log(request).ids)
        if handed.disposition == "ended":
            assert after >= len(whole.ids)
        else:
            assert handed.disposition == "handed_back"
            again = rig.store.take()
            assert again is not None
            assert again.request == request
            assert again.n == seen
            rig.turn(again, runtime=rig.new_runtime()).run()
        rig.store.settle(request)
        log = rig.log(request)
        assert (log.ids, log.text, log.end["reason"]) == (whole.ids, whole.text, whole.end["reason"])
        assert log.end["usage"]["prompt_tokens"] == 5
        assert log.end["usage"]["completion_tokens"] == len(whole.ids)


def test_a_takeover_between_the_last_delta_and_the_end_shows_the_tail_once(rig: Rig):
    """The predecessor stored every delta, the held-back tail included, and died before its end event."""
    _, whole = rig.run(prompt="hello", max_tokens=20)
    stop = [whole.text[-4:] + "#"]
    request = rig.submit(prompt="hello", max_tokens=20, stop=stop)
    claim = rig.store.take()
    assert claim is not None
    turn = rig.turn(claim)
    turn._generate()
    assert turn._flusher.flush(5.0)
    turn._flusher.close()
    assert rig.log(request).text == whole.text
    rig.store.give_back(request, claim.epoch, "drain")
    again = rig.store.take()
    assert again is not None
    rig.turn(again, runtime=rig.new_runtime()).run()
    log = rig.log(request)
    assert (log.ids, log.text) == (whole.ids, whole.text)
    assert log.kinds().count("end") == 1


def test_a_deadline_that_passes_ends_the_turn_as_expired_and_the_runtime_is_at_its_last_commit(rig: Rig):
    rig.run(prompt="before", max_tokens=5)
    before = list(rig.runtime.tokens)
    request = rig.submit(prompt="hello", max_tokens=4000)
    claim = rig.store.take()
    assert claim is not None
    result = rig.turn(dataclasses.replace(claim, remaining_ms=5)).run()
    assert result.state == "expired"
    assert rig.log(request).end["state"] == "expired"
    assert list(rig.runtime.tokens) == before


def test_a_cancelled_turn_ends_as_cancelled_and_the_runtime_is_at_its_last_commit(stepping: Rig):
    rig = stepping
    rig.run(prompt="before", max_tokens=5)
    before = list(rig.runtime.tokens)
    request = rig.submit(prompt="hello", max_tokens=4000)
    claim = rig.store.take()
    assert claim is not None
    asked = False

    def ask() -> None:
        nonlocal asked
        if not asked and len(turn._ids) > 10:
            asked = True
            rig.scripts.run("cancel", [keys.request(request)], [request, "local", "enough"])

    turn = rig.turn(claim, outside=ask)
    result = turn.run()
    log = rig.log(request)
    assert (result.state, log.end["reason"]) == ("cancelled", "enough")
    assert 10 < len(log.ids) < 4000
    assert list(rig.runtime.tokens) == before


def test_a_fenced_turn_writes_nothing_more(stepping: Rig):
    rig = stepping
    request = rig.submit(prompt="hello", max_tokens=4000)
    claim = rig.store.take()
    assert claim is not None
    fenced_at: list[int] = []

    def fence() -> None:
        if not fenced_at and len(turn._ids) > 10:
            rig.scripts.run("rescue", [keys.request(request)], [request, "w1", "worker_lost"])
            fenced_at.append(len(rig.log(request).events))

    turn = rig.turn(claim, outside=fence)
    result = turn.run()
    assert result.disposition == "lost"
    assert len(rig.log(request).events) == fenced_at[0]
    assert rig.log(request).events[-1].kind == "moved"


class Fragile(ToyDecoder):
    """Fails at one step and, once, in the recovery from it."""

    def arm(self, step: int, restores: int) -> None:
        self.left, self.restores = step, restores

    left, restores = 10**9, 0

    def evaluate_into(self, token: int, logits: np.ndarray) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError("the step failed")
        super().evaluate_into(token, logits)

    def restore(self, checkpoint: ToyCheckpoint) -> None:
        if self.restores:
            self.restores -= 1
            raise OSError("the restore failed")
        super().restore(checkpoint)


def test_a_runtime_that_faults_in_mid_turn_is_reset_and_the_turn_goes_on_where_it_was(rig: Rig):
    _, whole = rig.run(prompt="hello", max_tokens=40, stop=["zz"])
    rig.runtime.decoder.__class__ = Fragile
    rig.runtime.decoder.arm(20, restores=1)
    result, log = rig.run(prompt="hello", max_tokens=40, stop=["zz"])
    assert result.state == "done"
    assert (log.ids, log.text) == (whole.ids, whole.text)
    assert not rig.runtime.is_faulted


def test_a_decoder_that_fails_ends_the_turn_as_an_internal_error_without_a_word_of_the_prompt(rig: Rig):
    rig.runtime.decoder.__class__ = Fragile
    rig.runtime.decoder.arm(20, restores=0)
    result, log = rig.run(prompt="hello", max_tokens=40)
    reason = "internal_error: the worker met an unexpected OSError; its log says where"
    assert (result.state, log.end["reason"]) == ("failed", reason)
    again, _ = rig.run(prompt="hello", max_tokens=40)
    assert again.state == "done"


def test_events_that_the_broker_refuses_for_good_make_the_worker_give_up_and_the_turn_is_rescued(rig: Rig):
    request = rig.submit(prompt="hello", max_tokens=50)
    claim = rig.store.take()
    assert claim is not None
    rig.redis.set(keys.log(request), "no stream")
    with pytest.raises(EventsRefused):
        rig.turn(claim).run()
    rig.redis.delete(keys.log(request))
    assert rig.scripts.run("rescue", [keys.request(request)], [request, "w1", "worker_lost"]) == b"moved"


def test_a_disk_that_is_full_for_a_while_costs_no_turn(rig: Rig):
    """The server refuses writes with MISCONF while it cannot write its append-only file."""
    request = rig.submit(prompt="hello", max_tokens=30)
    claim = rig.store.take()
    assert claim is not None
    refusals = 3
    append = rig.store.append

    def full(*arguments, **more):
        nonlocal refusals
        if refusals:
            refusals -= 1
            with translated():
                raise ResponseError("MISCONF Errors writing to the AOF file: No space left on device")
        return append(*arguments, **more)

    rig.store.append = full
    assert rig.turn(claim).run().state == "done"
    assert rig.log(request).ids == rig.bare(list(b"hello"), 30)


def test_events_that_the_broker_lost_just_before_the_end_are_sent_again_and_then_the_end(rig: Rig):
    request = rig.submit(prompt="hello", max_tokens=30)
    claim = rig.store.take()
    assert claim is not None
    finish = rig.store.finish
    lost = False

    def forgetful(*arguments, **more):
        nonlocal lost
        if not lost:
            lost = True
            rig.redis.delete(keys.log(request))
            rig.redis.hset(keys.request(request), mapping={"ev": 0, "n": 0})
        return finish(*arguments, **more)

    rig.store.finish = forgetful
    assert rig.turn(claim).run().state == "done"
    log = rig.log(request)
    assert log.ids == rig.bare(list(b"hello"), 30)
    assert log.end["n"] == 30


def test_a_worker_that_must_leave_at_once_does_not_wait_for_an_absent_broker(rig: Rig):
    request = rig.submit(prompt="hello", max_tokens=30)
    claim = rig.store.take()
    assert claim is not None
    gone = False

    def leave() -> None:
        nonlocal gone
        if not gone and len(turn._ids) >= 10:
            gone = True
            rig.broker.kill()

    turn = rig.turn(claim, outside=leave, abandoned=lambda: gone)
    try:
        assert turn.run().disposition == "lost"
    finally:
        rig.broker.start()
    assert "end" not in rig.log(request).kinds()


@pytest.mark.parametrize("spec", [b"", b"\xc1", b"\x81\xa6prompt\xa1x\x81", b"\x81\xa9new_field\x01"])
def test_a_request_that_this_worker_cannot_read_fails_and_harms_nobody(rig: Rig, spec: bytes):
    request = rig.submit(prompt="hello")
    rig.redis.hset(keys.request(request), "spec", spec)
    claim = rig.store.take()
    assert claim is not None
    assert rig.turn(claim).run().state == "failed"
    assert rig.log(request).end["reason"].startswith("invalid_request: ")
    rig.store.settle(request)
    assert rig.run(prompt="next", max_tokens=3)[0].state == "done"
