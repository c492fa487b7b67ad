"""State and logits depend on the tokens alone, to the bit: not on blocks, threads, or what was restored before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from prism_core import Model
from tests.unit.engine.stepping import ARCHITECTURES, after, each, evaluate, no_check, random_ids, tiny

FILES = [*(f"{name}-q8_0" for name in ARCHITECTURES), "qwen3-q4_k_m", "qwen3-q4_1", "qwen3-f16"]
LENGTH = 301
"""Beyond a segment of attention (256), and no multiple of anything."""


@pytest.fixture(scope="module", params=FILES)
def model(request: pytest.FixtureRequest, data: Path) -> Iterator[Model]:
    with tiny(data, request.param, context_tokens=512) as opened:
        yield opened


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return random_ids(11, LENGTH)


def test_any_split_into_blocks_gives_the_logits_of_single_tokens(model: Model, ids: list[int]) -> None:
    decoder = model.decoder()
    for token in ids[:-1]:
        decoder.ingest_block([token], no_check)
    wanted = evaluate(decoder, ids[-1])
    following = evaluate(decoder, 5)
    seed = 23
    print("seed", seed)
    cuts = np.random.default_rng(seed)
    splits = [[7] * 40, [64] * 4, [512], [1, 31, 1, 32, 2, 33], [int(n) for n in cuts.integers(1, 50, 30)]]
    for split in splits:
        decoder.reset()
        assert np.array_equal(after(decoder, ids, split), wanted), split
        assert np.array_equal(evaluate(decoder, 5), following), split


def test_evaluating_every_token_gives_the_state_of_ingesting_them(model: Model, ids: list[int]) -> None:
    decoder = model.decoder()
    evaluated = each(decoder, ids)[-1]
    decoder.reset()
    assert np.array_equal(after(decoder, ids), evaluated)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(model: Model, ids: list[int], threads: int) -> None:
    from prism_core import open_model

    alone = model.decoder()
    with open_model(model.path, context_tokens=512, threads=threads) as many:
        together = many.decoder()
        for split in ([64] * 4, [1, 2, 3, 50]):
            alone.reset()
            together.reset()
            assert np.array_equal(after(together, ids, split), after(alone, ids, split))
            assert np.array_equal(each(together, ids[:20]), each(alone, ids[:20]))


def test_restoring_gives_the_run_that_was_saved_any_number_of_times(model: Model, ids: list[int]) -> None:
    decoder = model.decoder()
    saved = {}
    for at, token in enumerate(ids[:100]):
        if at in (0, 1, 31, 32, 33, 70):
            saved[at] = decoder.checkpoint()
        evaluate(decoder, token)
    straight = {at: after(model.decoder(), [*ids[:at], 9, 8, 7]) for at in saved}
    for at in (70, 0, 33, 70, 31, 1, 32, 33):
        decoder.restore(saved[at])
        assert decoder.length == at
        assert np.array_equal(after(decoder, [9, 8, 7]), straight[at]), at


def test_a_checkpoint_survives_what_others_write_into_its_last_page(model: Model, ids: list[int]) -> None:
    decoder = model.decoder()
    after(decoder, ids[:40])
    early = decoder.checkpoint()
    wanted = after(decoder, ids[40:50])
    late = decoder.checkpoint()
    beyond = evaluate(decoder, 3)
    for _ in range(2):
        decoder.restore(early)
        after(decoder, [1, 2, 3, 4, 5, 6, 7, 8])  # would overwrite slots that `late` sees
        decoder.restore(late)
        assert np.array_equal(evaluate(decoder, 3), beyond)
        decoder.restore(early)
        assert np.array_equal(after(decoder, ids[40:50]), wanted)
