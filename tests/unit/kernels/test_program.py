"""How the interpreter shares a phase's units out among threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prism_core.gguf.types import TensorType
from prism_core.kernels import words
from prism_core.kernels.families import Family, family_for
from prism_core.kernels.jit import entry
from prism_core.kernels.memory import load_i64, store_i64
from prism_core.kernels.threads import Crew
from prism_core.models.assembly import grain
from prism_core.models.graph import ALL_TOKENS
from prism_core.models.symbols import Operation, Phase


@entry(words.OPERATION, name="note_chunk")
def note_chunk(operation: Any, context: Any, begin: Any, end: Any, thread: Any) -> None:
    """(log): count every unit in word 2 * unit, and in the next one note the end of the chunk that begins there."""
    log = words.argument(operation, 0)
    for unit in range(begin, end):
        store_i64(log + 16 * unit, load_i64(log + 16 * unit) + 1)
    store_i64(log + 16 * begin + 8, end)


def chunks(units: int, group: int, tokens: int, threads: int) -> list[tuple[int, int]]:
    """[begin, end) of every chunk of one phase, in order."""
    log = np.zeros((units, 2), np.int64)
    operations, phases = np.zeros(words.OPERATION_WORDS, np.int64), np.zeros(words.PHASE_WORDS, np.int64)
    operations[[words.ENTRY, words.UNITS, words.SPAN, words.ARGUMENTS]] = (
        note_chunk.address,
        units,
        ALL_TOKENS,
        log.ctypes.data,
    )
    phases[[words.OPERATION_COUNT, words.IS_SPLIT, words.GRAIN]] = 1, 1, group
    crew = Crew(phases, operations, threads)
    try:
        crew.context[words.TOKENS] = tokens
        assert crew.run(0, 1) == 1
    finally:
        crew.close()
    assert (log[:, 0] == 1).all()
    return [(begin, int(end)) for begin, end in enumerate(log[:, 1]) if end]


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("units", [1, 3, 4, 37, 120, 1001])
def test_several_tokens_share_whole_groups_of_tiles(units: int, threads: int) -> None:
    for tokens in (2, 128):
        for begin, end in chunks(units, 4, tokens, threads):
            assert begin % 4 == 0
            assert end % 4 == 0 or end == units


def test_one_token_shares_single_tiles() -> None:
    shared = chunks(10, 4, 1, 2)
    assert min(end - begin for begin, end in shared) == 1


@pytest.mark.parametrize("threads", [2, 3])
def test_the_last_chunks_are_small_enough_to_finish_together(threads: int) -> None:
    for tokens in (1, 128):
        begin, end = chunks(4000, 4, tokens, threads)[-1]
        assert end - begin <= 4000 // (8 * threads)


def test_a_phase_goes_by_the_widest_group_of_its_matrices() -> None:
    types = {"eight": TensorType.Q4_1, "sixteen": TensorType.F16, "sixty-four": TensorType.Q1_0}

    def family_of(name: str) -> Family:
        return family_for(types[name])

    def tiles_together(kernel: str, *names: str) -> int:
        return grain(Phase([Operation(kernel, (), tiles_of=name) for name in names], split=True), family_of)

    assert [tiles_together("matmul", name) for name in types] == [4, 2, 1]
    assert tiles_together("matmul", "sixty-four", "eight") == 4
    assert tiles_together("head", "eight") == 1
    assert grain(Phase([Operation("attention", ())], split=True), family_of) == 1
