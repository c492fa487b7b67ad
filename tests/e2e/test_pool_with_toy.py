"""The pool end to end with worker processes and a real broker, on the toy model."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ops.bench.watch import Story
from prism_core.runtime import Generation, Limits, Runtime
from tests.pool import FAST, Pool, wait_for
from tests.toy import ToyModel

STEP_S = 0.004


def bare(messages: list[dict[str, Any]] | str, tokens: int, answers: dict[int, list[int]] | None = None) -> list[int]:
    """The ids of an uninterrupted run on a Runtime of this process."""
    model = ToyModel()
    runtime = Runtime(model.decoder(), Limits(4096, 8, 64 << 20))
    prompt = (
        list(messages.encode()) if isinstance(messages, str) else model.chat.encode_turn(messages, answers).token_ids
    )
    ids: list[int] = []
    runtime.generate(prompt, Generation(tokens, stop_tokens=model.tokenizer.stop_tokens), emit=ids.append)
    return ids


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool that no test of this file breaks: workers may die in it, it recovers."""
    with Pool(tmp_path_factory.mktemp("p"), 2, model=f"toy?step_s={STEP_S}&token_s=0.001", pool=FAST) as pool:
        yield pool


@pytest.fixture
def pool(shared: Pool) -> Pool:
    shared.wait_ready()
    return shared


def test_twenty_requests_over_five_conversations_keep_their_order_their_worker_and_their_prefixes(pool: Pool):
    turns = 4
    requests: dict[str, list[str]] = {f"c{number}": [] for number in range(5)}
    for turn in range(turns):
        for name, made in requests.items():
            message = {"role": "user", "content": f"{name} says {turn}"}
            made.append(pool.submit(messages=[message], conversation=name, max_tokens=12))
    for name, made in requests.items():
        messages: list[dict[str, Any]] = []
        answers: dict[int, list[int]] = {}
        workers, previous_end = set(), 0.0
        for turn, request in enumerate(made):
            story = pool.follow(request)
            messages.append({"role": "user", "content": f"{name} says {turn}"})
            assert story.ids == bare(messages, 12, answers)
            answers[len(messages)] = story.ids
            messages.append({"role": "assistant", "content": story.text})
            assert story.kinds[0] == "start"
            assert story.state == "done"
            assert (story.reused > 0) == (turn > 0)
            workers.add(story.starts[0]["worker"])
            record = pool.record(request)
            assert float(record["taken"]) >= previous_end
            previous_end = float(record["ended"])
        assert len(workers) == 1


def test_a_worker_killed_in_mid_stream_loses_and_repeats_no_token(pool: Pool):
    request = pool.submit(prompt="hello", max_tokens=150)
    pool.follow(request, lambda story: len(story.ids) >= 20)
    pool.kill(pool.worker_of(request))
    story = pool.follow(request)
    assert story.ids == bare("hello", 150)
    assert story.moves == ["worker_lost"]
    assert story.kinds.count("end") == 1
    assert story.text == ToyModel().tokenizer.decode(story.ids)
    assert len({start["worker"] for start in story.starts}) == 2


def test_a_cancelled_generation_ends_at_once(pool: Pool):
    request = pool.submit(prompt="hello", max_tokens=3000)
    pool.follow(request, lambda story: len(story.ids) >= 10)
    asked = time.monotonic()
    pool.cancel(request)
    story = pool.follow(request)
    print(f"cancel to end: {(story.seen_at - asked) * 1000:.1f} ms with steps of {STEP_S * 1000:g} ms")
    assert story.state == "cancelled"
    assert len(story.ids) < 3000


def test_a_prompt_of_two_thousand_tokens_is_cancelled_before_its_first_token(pool: Pool):
    request = pool.submit(token_ids=[97 + index % 26 for index in range(2000)], max_tokens=50)
    pool.follow(request, lambda story: bool(story.starts))
    asked = time.monotonic()
    pool.cancel(request)
    story = pool.follow(request)
    print(f"cancel in prefill to end: {(story.seen_at - asked) * 1000:.1f} ms")
    assert story.state == "cancelled"
    assert not story.ids


def test_a_frozen_worker_is_fenced_and_writes_nothing_when_it_wakes(pool: Pool):
    request = pool.submit(prompt="frozen", max_tokens=200)
    pool.follow(request, lambda story: len(story.ids) >= 10)
    worker = pool.worker_of(request)
    pid = pool.pid_of(worker)
    os.kill(pid, signal.SIGSTOP)
    try:
        story = pool.follow(request)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: worker not in pool.workers(), "the zombie to be out of the pool")
    wait_for(lambda: pid not in pool.supervisor.pids, "the zombie to exit")
    assert story.ids == bare("frozen", 200)
    assert story.moves == ["worker_lost"]
    assert pool.redis.xlen(f"prism:r:{request}:log") == len(story.kinds)


def test_an_edited_message_reuses_exactly_the_unedited_prefix(pool: Pool):
    def user(text: str) -> dict[str, str]:
        return {"role": "user", "content": text}

    system = {"role": "system", "content": "be good"}
    first = pool.follow(pool.submit(messages=[system, user("one")], conversation="edit", max_tokens=10))
    pool.follow(pool.submit(messages=[user("two")], conversation="edit", max_tokens=10))
    answer = {"role": "assistant", "content": first.text}
    edited = pool.follow(
        pool.submit(messages=[system, user("one"), answer, user("2")], conversation="edit", max_tokens=10)
    )
    prompt = ToyModel().chat.encode_turn([system, user("one")]).token_ids
    assert edited.reused == len(prompt) + len(first.ids)
    assert edited.ids == bare([system, user("one"), answer, user("2")], 10, {2: first.ids})


def test_a_request_that_cannot_run_fails_with_one_line_and_no_start(pool: Pool):
    story = pool.follow(pool.submit(prompt="x" * 4096, max_tokens=10))
    assert story.kinds == ["end"]
    assert story.end is not None
    assert story.end["reason"].startswith("invalid_request: ")


def survive(folder: Path, outage_s: float, tokens: int, **options: Any) -> None:
    """A turn in progress goes on after an outage, on the same process, without a hole."""
    with Pool(folder, 2, model=f"toy?step_s={STEP_S}", **options) as pool:
        pids = pool.supervisor.pids
        request = pool.submit(prompt="outage", max_tokens=tokens)
        pool.follow(request, lambda story: len(story.ids) >= 20)
        pool.broker.kill()
        time.sleep(outage_s)  # the outage itself
        pool.broker.start()
        story = pool.follow(request)
        assert story.ids == bare("outage", tokens)
        assert not story.moves
        assert pool.supervisor.pids == pids


def test_workers_survive_a_broker_that_is_killed_and_comes_back_after_their_leases_lapsed(tmp_path: Path):
    survive(tmp_path, 2.0, 400, pool=FAST)


def test_a_decoder_whose_buffer_is_full_waits_for_the_broker_and_goes_on(tmp_path: Path):
    survive(tmp_path, 0.7, 400, config={"buffer_events": 10})


@pytest.mark.full
def test_workers_survive_half_a_minute_without_a_broker(tmp_path: Path):
    survive(tmp_path, 31.0, 4000)


def test_a_drain_ends_no_turn_early_and_loses_none(tmp_path: Path):
    with Pool(tmp_path, 2, model=f"toy?step_s={STEP_S}", config={"grace_s": 20.0}) as pool:
        running = [pool.submit(prompt=f"drain {number}", max_tokens=150) for number in range(2)]
        for request in running:
            pool.follow(request, lambda story: len(story.ids) >= 5)
        waiting = [pool.submit(prompt=f"later {number}", max_tokens=5) for number in range(3)]
        pool.supervisor.stop()
        for number, request in enumerate(running):
            story = pool.follow(request)
            assert story.ids == bare(f"drain {number}", 150)
            assert not story.moves
        wait_for(lambda: not pool.supervisor.pids, "the workers to leave")
        assert not pool.workers()
        assert all(pool.record(request)["state"] == b"queued" for request in waiting)


def test_a_drain_whose_grace_is_over_hands_the_turn_back(tmp_path: Path):
    with Pool(tmp_path, 1, model=f"toy?step_s={STEP_S}", config={"grace_s": 0.2}) as pool:
        request = pool.submit(prompt="moved", max_tokens=3000)
        pool.follow(request, lambda story: len(story.ids) >= 10)
        pool.supervisor.stop()
        story: Story = pool.follow(request, lambda story: bool(story.moves))
        assert story.moves == ["drain"]
        wait_for(lambda: not pool.supervisor.pids, "the worker to leave")
        assert pool.record(request)["state"] == b"queued"
        assert pool.record(request)["attempt"] == b"0"
