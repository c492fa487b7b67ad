"""The memory of a sequence: counted pages, copies only where somebody would notice, nothing leaked."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_core import DecoderError, kv
from tests.unit.engine.stepping import after, evaluate, no_check, random_ids, tiny

PAGE_BYTES = 512


def write(sequence: kv.Sequence, values: list[int]) -> None:
    """What a step does to pages: 16 bytes per position, each byte the token."""
    sequence.begin(len(values))
    for offset, value in enumerate(values):
        position = sequence.length + offset
        page = sequence.arena._pages[sequence._pages[position // 32]]
        page[position % 32 * 16 :][:16] = value
    sequence.end(len(values))


def read(sequence: kv.Sequence) -> list[int]:
    """The tokens that the pages hold, first to last."""
    return [
        int(sequence.arena._pages[sequence._pages[position // 32]][position % 32 * 16])
        for position in range(sequence.length)
    ]


actions = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 70)),
        st.tuples(st.just("break off"), st.integers(1, 70)),
        st.tuples(st.just("save"), st.just(0)),
        st.tuples(st.just("restore"), st.integers(0, 5)),
        st.tuples(st.just("drop"), st.integers(0, 5)),
        st.tuples(st.just("reset"), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(actions, st.integers(0, 255))
def test_pages_behave_as_lists_of_tokens_would(steps: list[tuple[str, int]], first: int) -> None:
    sequence = kv.Sequence(PAGE_BYTES, 0, 300)
    model: list[int] = []
    saved: list[tuple[kv.Checkpoint, list[int]]] = []
    value = first
    for action, number in steps:
        if action == "write" and len(model) + number <= 300:
            values = [(value + offset) % 256 for offset in range(number)]
            value += number
            write(sequence, values)
            model += values
        elif action == "break off" and len(model) + number <= 300:
            sequence.begin(number)
        elif action == "save":
            saved.append((sequence.checkpoint(), list(model)))
        elif action == "restore" and saved:
            checkpoint, model = saved[number % len(saved)]
            model = list(model)
            sequence.restore(checkpoint)
        elif action == "drop" and saved:
            del saved[number % len(saved)]
        elif action == "reset":
            sequence.reset()
            model = []
        assert read(sequence) == model
    for checkpoint, tokens in saved:
        sequence.restore(checkpoint)
        assert read(sequence) == tokens


def test_a_checkpoint_counts_every_page_that_it_refers_to() -> None:
    sequence = kv.Sequence(PAGE_BYTES, 0, 300)
    assert sequence.checkpoint_bytes() == 0
    write(sequence, [1] * 33)
    assert sequence.checkpoint_bytes() == 2 * PAGE_BYTES
    assert sequence.checkpoint_bytes(32) == PAGE_BYTES
    assert sequence.checkpoint_bytes(300) == 10 * PAGE_BYTES


def test_pages_are_used_again_when_checkpoints_die() -> None:
    sequence = kv.Sequence(PAGE_BYTES, 0, 64)
    for round_ in range(200):
        sequence.reset()
        write(sequence, [round_ % 256] * 64)
        checkpoint = sequence.checkpoint()
        sequence.reset()
        write(sequence, [7] * 40)
        sequence.restore(checkpoint)
        assert read(sequence) == [round_ % 256] * 64
    del checkpoint
    gc.collect()
    assert sequence.arena.pages_in_use == 2
    assert sequence.arena.pages <= kv.PAGES_PER_SLAB


def test_a_part_filled_page_is_copied_only_where_a_checkpoint_would_see_the_change() -> None:
    sequence = kv.Sequence(PAGE_BYTES, 0, 64)
    write(sequence, [1] * 10)
    early = sequence.checkpoint()
    write(sequence, [2] * 5)
    assert sequence.arena.pages_in_use == 1  # slots behind all that `early` sees
    late = sequence.checkpoint()
    sequence.restore(early)
    write(sequence, [3] * 2)
    assert sequence.arena.pages_in_use == 2
    assert read(sequence) == [1] * 10 + [3] * 2
    sequence.restore(late)
    assert read(sequence) == [1] * 10 + [2] * 5


def test_a_full_context_says_so() -> None:
    sequence = kv.Sequence(PAGE_BYTES, 0, 40)
    write(sequence, [1] * 38)
    with pytest.raises(DecoderError, match="3 more tokens after 38 do not fit the context of 40"):
        sequence.begin(3)
    write(sequence, [2] * 2)


def test_the_checkpoint_of_another_decoder_is_refused(data: Path) -> None:
    with tiny(data, "llama-q8_0") as model:
        first, second = model.decoder(), model.decoder()
        for stranger in (first.checkpoint(), None, "state"):
            with pytest.raises(DecoderError, match="made by another decoder"):
                second.restore(stranger)


class Stop(Exception):
    """What an interrupted request raises."""


def interrupted_after(calls: int) -> Any:
    left = [calls]

    def check() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Stop

    return check


@pytest.mark.parametrize("name", ["llama-q8_0", "qwen35-q8_0"])
def test_a_step_that_is_broken_off_is_undone_by_restoring(data: Path, name: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("prism_core.engine.SLICE_NS", 1)  # a check after every phase
    ids = random_ids(1, 60)
    with tiny(data, name, context_tokens=256) as model:
        decoder = model.decoder()
        after(decoder, ids)
        saved = decoder.checkpoint()
        wanted = after(decoder, ids)
        for calls in (0, 1, 5, 17):
            decoder.restore(saved)
            with pytest.raises(Stop):
                decoder.ingest_block(ids, interrupted_after(calls))
            decoder.restore(saved)
            assert np.array_equal(after(decoder, ids), wanted)
        assert decoder.length == 120


def test_a_hybrid_refuses_to_go_on_from_half_a_step(data: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("prism_core.engine.SLICE_NS", 1)
    with tiny(data, "qwen35-q8_0", context_tokens=256) as model:
        decoder = model.decoder()
        evaluate(decoder, 1)
        with pytest.raises(Stop):
            decoder.ingest_block([1, 2, 3], interrupted_after(4))
        for operation in (
            lambda: evaluate(decoder, 1),
            lambda: decoder.ingest_block([1], no_check),
            decoder.checkpoint,
        ):
            with pytest.raises(DecoderError, match="half-way"):
                operation()
        decoder.reset()
        evaluate(decoder, 1)


def test_recurrent_state_is_copied_exactly_and_counted(data: Path) -> None:
    ids = random_ids(2, 40)
    with tiny(data, "qwen35-q8_0", context_tokens=256) as model:
        decoder = model.decoder()
        assert decoder.checkpoint_bytes() == 0
        state = model.describe()["recurrent_state_bytes"]
        after(decoder, ids)
        pages = 2 * 32 * model.describe()["kv_bytes_per_token"]
        assert decoder.checkpoint_bytes() == pages + state
        assert decoder.checkpoint_bytes_at(40) == pages + state
        saved = decoder.checkpoint()
        state_before = saved.state.memory.copy()
        wanted = after(decoder, ids)
        assert np.array_equal(saved.state.memory, state_before)
        decoder.restore(saved)
        assert np.array_equal(after(decoder, ids), wanted)


def test_saving_two_thousand_tokens_copies_no_page(data: Path) -> None:
    with tiny(data, "llama-q8_0", context_tokens=2048) as model:
        decoder = model.decoder()
        decoder.ingest_block(random_ids(3, 2000), no_check)
        in_use = decoder._sequence.arena.pages_in_use
        begun = time.perf_counter()
        checkpoints = [decoder.checkpoint() for _ in range(10)]
        print(f"{(time.perf_counter() - begun) / 10 * 1e6:.0f} us each")
        assert decoder._sequence.arena.pages_in_use == in_use
        assert {checkpoint.length for checkpoint in checkpoints} == {2000}


def test_ids_outside_the_vocabulary_never_reach_a_kernel(data: Path) -> None:
    from prism_core import InvalidRequest

    with tiny(data, "llama-q8_0") as model:
        decoder = model.decoder()
        for bad in ([-1], [1024], [3, 1 << 40], []):
            with pytest.raises(InvalidRequest):
                decoder.ingest_block(bad, no_check)
        with pytest.raises(InvalidRequest, match=r"0\.\.1023, not 1024"):
            evaluate(decoder, 1024)
        with pytest.raises(DecoderError, match="logits must be float32 of 1024 values"):
            decoder.evaluate_into(1, np.empty(1000, dtype=np.float32))
        assert decoder.length == 0


def test_an_interrupt_at_any_line_never_gives_a_page_to_two_owners() -> None:
    """Raise at every traced line of a restore and a reset in turn, then reset and look at who owns what."""
    for line in range(60):
        sequence = kv.Sequence(PAGE_BYTES, 0, 300)
        write(sequence, [1] * 100)
        saved = sequence.checkpoint()
        write(sequence, [2] * 100)
        left = [line]

        def trace(frame: Any, event: str, argument: Any, left: list[int] = left) -> Any:
            if event == "line" and frame.f_code.co_filename == kv.__file__:
                left[0] -= 1
                if left[0] < 0:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        for operation in (lambda sequence=sequence, saved=saved: sequence.restore(saved), sequence.reset):
            sys.settrace(trace)
            try:
                operation()
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
        sequence.reset()
        write(sequence, [3] * 250)
        assert len(set(sequence._pages)) == len(sequence._pages)
        assert not set(sequence._pages) & set(saved.pages)
        sequence.restore(saved)
        assert read(sequence) == [1] * 100


def broken_off_at(instruction: int, operation: Any) -> bool:
    """Interrupts an operation at one of the instructions of kv.py; whether it came to its end before."""
    left = [instruction]

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != kv.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left[0] -= 1
            if left[0] < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        operation()
    except KeyboardInterrupt:
        return False
    finally:
        sys.settrace(None)
    return True


OPERATIONS = {
    "begin": lambda sequence, saved: write(sequence, [4] * 90),
    "begin in a shared page": lambda sequence, saved: (sequence.restore(saved), write(sequence, [4] * 90)),
    "checkpoint": lambda sequence, saved: sequence.checkpoint(),
    "restore": lambda sequence, saved: sequence.restore(saved),
    "reset": lambda sequence, saved: sequence.reset(),
    "collecting": lambda sequence, saved: (sequence.checkpoint(), write(sequence, [4])),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_pages_that_interrupts_lost_are_found_again_before_memory_grows(name: str) -> None:
    """Break an operation off at every instruction in turn, all on one arena: it stays within its bound to the page."""
    sequence = kv.Sequence(1 << 16, 0, 320)  # 64 pages at a time
    write(sequence, [1] * 100)
    saved = sequence.checkpoint()
    finished, instruction = False, 0
    while not finished:
        sequence.restore(saved)
        write(sequence, [2] * 50)
        finished = broken_off_at(instruction, lambda: OPERATIONS[name](sequence, saved))
        instruction += 1
        sequence.restore(saved)
        assert read(sequence) == [1] * 100
    assert instruction > 20
    sequence.reset()
    others = []
    while len(others) < 50:  # a page each, beside the four of `saved`
        sequence.reset()
        write(sequence, [3] * 32)
        others.append(sequence.checkpoint())
    pages = [page for checkpoint in (saved, *others) for page in checkpoint.pages]
    assert len(set(pages)) == len(pages)
    assert sequence.arena.pages == kv.PAGES_PER_SLAB


def test_an_interrupt_at_any_instruction_of_a_growing_step_leaves_the_arena_sound() -> None:
    """Break a step that needs new pages off at every instruction in turn, go back, and go on where it had been."""
    finished = False
    instruction = 0
    while not finished:
        sequence = kv.Sequence(1 << 20, 0, 1000)  # four pages at a time
        write(sequence, [1] * 100)
        saved = sequence.checkpoint()
        finished = broken_off_at(instruction, lambda sequence=sequence: sequence.begin(100))
        instruction += 1
        sequence.restore(saved)
        write(sequence, [2] * 300)
        assert read(sequence) == [1] * 100 + [2] * 300
        assert len(set(sequence._pages)) == len(sequence._pages)
        arena = sequence.arena
        assert [arena.address(page) for page in sequence._pages] == [
            int(arena._pages[page].ctypes.data) for page in sequence._pages
        ]
        assert sequence.page_table[:13].tolist() == [arena.address(page) for page in sequence._pages]
    assert instruction > 200
