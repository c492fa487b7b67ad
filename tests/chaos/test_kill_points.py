"""A worker is killed at each of its script calls in turn, on both sides of the call, and no reader can tell."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

import pytest

from broker.keys import conversation_key, new_ulid
from ops.bench import killpoints
from prism_core.runtime import Generation, Limits, Runtime
from tests.pool import Pool, wait_for
from tests.toy import ToyModel

TOKENS = 6


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    folder = tmp_path_factory.mktemp("k")
    # A step longer than the flusher's tick: nearly every token then is a call of its own.
    with Pool(folder, 3, model="toy?step_s=0.01", prepare=killpoints.PREPARE) as pool:
        yield pool


@cache
def expected() -> list[list[int]]:
    """The ids of two turns of one conversation."""
    model = ToyModel()
    runtime = Runtime(model.decoder(), Limits(4096, 8, 64 << 20))
    first: list[int] = []
    runtime.generate(model.chat.encode_turn([ASK]).token_ids, Generation(TOKENS), emit=first.append)
    messages = [ASK, {"role": "assistant", "content": model.tokenizer.decode(first)}, ASK]
    second: list[int] = []
    runtime.generate(model.chat.encode_turn(messages, {1: first}).token_ids, Generation(TOKENS), emit=second.append)
    return [first, second]


ASK = {"role": "user", "content": "go"}


def check_point(pool: Pool, side: str, k: int) -> bool:
    """Two turns of a conversation with a worker killed at the k-th call; False if they needed fewer calls."""
    wait_for(lambda: len(pool.workers()) >= 2, "two workers", 60)
    killpoints.aim(pool.redis, side, k)
    name = new_ulid()
    requests = [pool.submit(messages=[ASK], conversation=name, max_tokens=TOKENS) for _ in range(2)]
    for request, ids in zip(requests, expected(), strict=True):
        story = pool.follow(request)
        assert (k, story.state, story.ids) == (k, "done", ids)
        assert story.text == ToyModel().tokenizer.decode(ids)
        assert story.kinds.count("end") == 1
        assert len(story.moves) <= 1
    wait_for(lambda: not pool.redis.zcard("prism:live"), "no open request")
    assert pool.redis.llen(f"prism:c:{conversation_key('local', name)}:hist") == 2
    wait_for(lambda: not any(pool.redis.scard(key) for key in pool.redis.scan_iter("prism:w:*:run")), "settling")
    for request in requests:
        assert pool.redis.hget(f"prism:rq:job:{request}", "status") == b"finished"
    return killpoints.has_fired(pool.redis)


@pytest.mark.parametrize("side", killpoints.SIDES)
def test_a_worker_killed_at_one_script_call_or_another_is_never_noticed_by_a_reader(pool: Pool, side: str):
    seed = random.SystemRandom().randrange(1 << 32)
    points = sorted(random.Random(seed).sample(range(1, 7), 4))  # six calls are made at the least
    print(f"seed {seed}: points {points} {side} a call")
    assert all(check_point(pool, side, k) for k in points)


@pytest.mark.full
@pytest.mark.parametrize("side", killpoints.SIDES)
def test_a_worker_killed_at_every_script_call_is_never_noticed_by_a_reader(pool: Pool, side: str):
    points = 0
    while check_point(pool, side, points + 1):
        points += 1
    print(f"{points} kill points {side} a call")
    assert points >= 11
