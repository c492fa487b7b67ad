"""A Runtime over the real decoder: reuse, rollback and saved prefixes never change an answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prism_core import Cancellation, Cancelled, Generation, Limits, Model, Prefill, Runtime, TemperatureSampler
from tests.unit.engine.stepping import random_ids, tiny

NAMES = ["llama-q8_0", "gemma3-q8_0", "qwen35-q8_0"]


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, data: Path) -> Iterator[Model]:
    with tiny(data, request.param, context_tokens=1024) as opened:
        yield opened


def runtime_of(model: Model, checkpoints: int = 4) -> Runtime:
    return Runtime(model.decoder(), Limits(1024, checkpoints, 1 << 30))


def answer(runtime: Runtime, prompt: list[int], count: int = 20, **options: Any) -> tuple[list[int], int]:
    """(ids, reused tokens) of a greedy answer."""
    ids: list[int] = []
    done = runtime.generate(prompt, Generation(count), prefill=Prefill(64), emit=ids.append, **options)
    return ids, done.reused_tokens


def test_turns_of_a_conversation_equal_a_fresh_run(model: Model) -> None:
    runtime, history = runtime_of(model), random_ids(1, 50)
    for turn in range(4):
        ids, reused = answer(runtime, history)
        assert reused == (0 if turn == 0 else len(history) - 17)
        assert ids == answer(runtime_of(model), history)[0]
        history += ids + random_ids(turn, 17)


def test_returning_to_a_saved_prefix_equals_a_fresh_run(model: Model) -> None:
    runtime, first = runtime_of(model), random_ids(2, 70)
    ids, _ = answer(runtime, first)
    answer(runtime, random_ids(3, 90))
    branch = first + ids + random_ids(4, 9)
    again, reused = answer(runtime, branch)
    assert reused == len(first) + len(ids)
    assert again == answer(runtime_of(model), branch)[0]


def test_a_prefix_saved_on_the_way_serves_a_prompt_that_leaves_there(model: Model) -> None:
    runtime, prompt = runtime_of(model, 8), random_ids(5, 120)
    answer(runtime, prompt, save_at=(33, 64, 100))
    for position in (100, 33, 64):
        other = prompt[:position] + random_ids(position, 30)
        ids, reused = answer(runtime, other)
        assert reused == position
        assert ids == answer(runtime_of(model), other)[0]


@pytest.mark.parametrize("looks", [3, 8, 20, 60])
def test_a_cancelled_request_leaves_the_conversation_as_it_was(
    model: Model, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prism_core.engine.SLICE_NS", 1)  # so that checks fall into the middle of steps

    class Later(Cancellation):
        left = looks

        @property
        def is_cancelled(self) -> bool:
            self.left -= 1
            return self.left < 0

    runtime, prompt = runtime_of(model), random_ids(6, 40)
    ids, _ = answer(runtime, prompt)
    before = list(runtime.tokens)
    following = before + random_ids(7, 100)
    with pytest.raises(Cancelled):
        answer(runtime, following, cancellation=Later())
    assert list(runtime.tokens) == before == prompt + ids
    again, reused = answer(runtime, following)
    assert reused == len(before)
    assert again == answer(runtime_of(model), following)[0]


def test_seeded_sampling_gives_the_same_text_on_any_number_of_threads(model: Model) -> None:
    from prism_core import open_model

    prompt, runs = random_ids(8, 60), []
    for threads in (1, 2, 3):
        with open_model(model.path, context_tokens=1024, threads=threads) as other:
            ids: list[int] = []
            sampler = TemperatureSampler(seed=5, temperature=1.5, top_k=0, top_p=1.0)
            runtime_of(other).generate(prompt, Generation(40), sampler=sampler, emit=ids.append)
            runs.append(ids)
    assert runs[0] == runs[1] == runs[2]
    assert len(set(runs[0])) > 10


def test_identical_files_have_one_identity_and_settings_that_change_bits_another(model: Model) -> None:
    from prism_core import open_model

    with open_model(model.path, threads=2) as other, open_model(model.path, exact=True) as exact:
        assert other.identity == model.identity == model.decoder().identity
        assert exact.identity.partition("+")[0] == model.identity.partition("+")[0]
        assert exact.identity != model.identity


def test_the_memory_of_many_requests_stays_within_context_and_checkpoints(model: Model) -> None:
    decoder = model.decoder()
    budget = 3 * decoder.checkpoint_bytes_at(300)
    with pytest.warns(RuntimeWarning, match="two snapshots of a full context"):
        runtime = Runtime(decoder, Limits(1024, 8, budget))
    for seed in range(25):
        answer(runtime, random_ids(seed, 150 + 5 * seed), 5)
    arena = decoder._sequence.arena
    context_pages = -(-1024 // 32)
    assert arena.pages_in_use * arena.page_bytes <= context_pages * arena.page_bytes + budget
