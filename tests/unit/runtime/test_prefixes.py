"""Which prefix a request starts from, what is saved, and what makes room: sections 5 and 8."""

from __future__ import annotations

import gc
import warnings
import weakref

import numpy as np
import pytest

from prism_core import (
    SNAPSHOT_OVERHEAD_BYTES,
    BudgetExceeded,
    DeadlineExceeded,
    DecoderError,
    Generation,
    Limits,
    Runtime,
)

from .fixture import ONE, VOCAB, Bench, FixtureDecoder, raising


def bench_with(checkpoint_bytes: int = 16_384, checkpoints: int = 4, **options) -> Bench:
    return Bench(Limits(32, checkpoints, checkpoint_bytes), **options)


def saved(bench: Bench) -> list[list[int]]:
    """The saved prefixes from oldest to youngest: no public name shows them, but a test of age must see them."""
    return [snapshot.tokens.tolist() for snapshot in bench.runtime._conversation.committed.prefixes._saved]


def test_the_overhead_is_80_bytes():
    assert SNAPSHOT_OVERHEAD_BYTES == 80


def test_a_budget_of_79_refuses_the_first_request():
    bench = bench_with(79)
    with pytest.raises(BudgetExceeded, match="a snapshot needs 80 bytes, but checkpoint_bytes is 79"):
        bench.ask([1])
    assert bench.trace.operations == []
    assert not bench.runtime.is_faulted


def test_a_budget_of_80_admits_one_request_and_refuses_every_later_one_until_reset():
    bench = bench_with(80)
    bench.ask([1])
    assert (bench.runtime.tokens, bench.runtime.checkpoint_count) == ([1, 1], 0)
    bench.trace.clear()
    for prompt in ([2, 3], [1, 1], [1, 1, 2]):
        with pytest.raises(BudgetExceeded, match="a snapshot needs 128 bytes, but checkpoint_bytes is 80"):
            bench.ask(prompt)
    assert bench.trace.operations == []
    assert bench.decoder.state == [1, 1]
    assert bench.sampler.asked == 1
    bench.runtime.reset()
    bench.ask([2, 3])
    assert bench.runtime.tokens == [2, 3, 5]


def test_a_budget_of_128_admits_two_requests():
    bench = bench_with(128)
    bench.ask([1])
    bench.ask([2, 3])
    with pytest.raises(BudgetExceeded, match="a snapshot needs 136 bytes, but checkpoint_bytes is 128"):
        bench.ask([2, 3, 5])
    assert bench.runtime.tokens == [2, 3, 5]


@pytest.mark.parametrize("size", [127, 128, 207])
def test_below_208_bytes_nothing_is_saved(size):
    bench = bench_with(size)
    bench.ask([1])
    assert bench.runtime.checkpoint_count == 0


@pytest.mark.parametrize(
    ("size", "after"),
    [
        (208, []),
        (255, []),
        (256, [[1, 1]]),  # the rollback fits beside it; the new snapshot never can, and is refused without evicting
        (263, [[1, 1]]),
        (264, [[2, 3, 5]]),
        (300, [[2, 3, 5]]),
        (391, [[2, 3, 5]]),
        (392, [[1, 1], [2, 3, 5]]),
        (1000, [[1, 1], [2, 3, 5]]),
    ],
)
def test_the_oldest_makes_room_by_bytes(size, after):
    bench = bench_with(size)
    bench.ask([1])
    assert saved(bench) == [[1, 1]]
    bench.ask([2, 3])
    assert saved(bench) == after


def test_the_oldest_makes_room_by_count():
    bench = bench_with(checkpoints=2)
    for prompt in ([1], [2], [3]):
        bench.ask(prompt)
    assert saved(bench) == [[2, 2], [3, 3]]
    assert bench.runtime.checkpoint_count == 2


def test_without_checkpoints_no_snapshot_but_the_rollback_is_taken():
    bench = bench_with(checkpoints=0)
    bench.ask([1])
    assert bench.trace.operations == ["C", "R", "E1", "P", "E1", "emit1"]
    assert bench.runtime.checkpoint_count == 0
    bench.trace.clear()
    assert bench.ask([1, 1]).reused_tokens == 2


def test_several_are_evicted_at_once_if_need_be():
    bench = bench_with(4 * 200)
    for prompt in ([1], [2], [3], [4]):
        bench.ask(prompt)
    assert len(saved(bench)) == 4
    bench.ask([1, 2, 3, 4, 5, 6, 7] * 4)  # 29 tokens: 4 * (29 + 8) + 116 + 80 = 344, beside a rollback of 128
    assert saved(bench) == [[3, 3], [4, 4], [1, 2, 3, 4, 5, 6, 7] * 4 + [0]]


def test_evictions_of_a_failed_request_stay():
    bench = bench_with(300)
    bench.ask([1])
    bench.trace.clear()
    bench.trace.instead[7] = raising(KeyboardInterrupt())  # in the optional snapshot, once it has made room
    with pytest.raises(KeyboardInterrupt):
        bench.ask([2, 3])
    assert saved(bench) == []
    assert bench.runtime.tokens == bench.decoder.state == [1, 1]


def test_evictions_of_a_failed_optional_snapshot_stay_and_the_request_succeeds():
    bench = bench_with(300)
    bench.ask([1])
    bench.trace.clear()
    bench.trace.instead[7] = raising(MemoryError())
    bench.ask([2, 3])
    assert saved(bench) == []
    assert bench.runtime.tokens == [2, 3, 5]


def test_a_prompt_equal_to_the_history_needs_no_operation_before_the_first_draw():
    bench = Bench()
    bench.ask([1])
    bench.trace.clear()
    assert bench.ask([1, 1]).reused_tokens == 2
    assert bench.trace.operations == ["C", "P", "E2", "emit2", "C"]


def test_the_live_state_wins_even_over_a_longer_saved_prefix():
    bench = Bench()
    bench.ask([1], Generation(3))  # saves 1 1 2 4
    bench.ask([2, 3])
    bench.ask([1], Generation(1, (1,)))  # live: 1
    assert bench.runtime.tokens == [1]
    bench.trace.clear()
    assert bench.ask([1, 1, 2, 4, 5]).reused_tokens == 1
    assert "S" not in bench.trace.operations


def test_live_state_is_never_cut_to_a_shorter_common_prefix():
    bench = bench_with(checkpoints=0)
    bench.ask([1, 2, 3])
    bench.trace.clear()
    assert bench.ask([1, 2, 4]).reused_tokens == 0
    assert bench.trace.operations[:2] == ["C", "R"]
    bench.trace.clear()
    assert bench.ask([1, 2]).reused_tokens == 0


def test_the_longest_saved_prefix_that_is_wholly_a_prefix_is_restored():
    bench = bench_with(checkpoints=8)
    bench.ask([1])
    bench.ask([1], Generation(3))
    bench.ask([7, 7])
    assert saved(bench) == [[1, 1], [1, 1, 2, 4], [7, 7, 6]]
    assert bench.ask([1, 1, 2, 4, 6]).reused_tokens == 4
    bench.ask([7])
    assert bench.ask([1, 1, 2, 5]).reused_tokens == 2
    bench.ask([7])
    assert bench.ask([1, 2]).reused_tokens == 0


def test_a_saved_prefix_equal_to_the_prompt_serves_it_with_its_logits():
    bench = Bench()
    bench.ask([1])
    bench.ask([7])
    bench.trace.clear()
    assert bench.ask([1, 1]).reused_tokens == 2
    assert bench.trace.operations == ["C", "S", "P", "E2", "emit2", "C"]
    assert bench.runtime.tokens == [1, 1, 2]


def test_of_equal_saved_prefixes_the_youngest_is_restored():
    class Numbered(FixtureDecoder):
        taken = 0

        def checkpoint(self):
            self.taken += 1
            return (*super().checkpoint(), f"#{self.taken}")

        def restore(self, checkpoint):
            self.restored = checkpoint[-1]
            super().restore(checkpoint[:-1])

    decoder = Numbered()
    runtime = Runtime(decoder, Limits(32, 4, 16_384))
    for prompt in ([1], [7], [1], [7]):  # checkpoints 2 and 6 hold 1 1
        runtime.generate(prompt, ONE)
    assert runtime.generate([1, 1], ONE).reused_tokens == 2
    assert decoder.restored == "#6"


def test_reuse_does_not_refresh_a_saved_prefix():
    bench = bench_with(checkpoints=2)
    bench.ask([1])
    bench.ask([2])
    assert bench.ask([1, 1, 3]).reused_tokens == 2
    assert saved(bench) == [[2, 2], [1, 1, 3, 5]]


def test_a_failed_or_expired_prefix_restore_is_an_ordinary_request_error():
    bench = Bench()
    bench.ask([1])
    bench.ask([7])
    error = OSError("gone")
    bench.decoder.restore_errors[(1, 1)] = error
    bench.trace.clear()
    with pytest.raises(OSError, match="gone") as caught:
        bench.ask([1, 1, 2])
    assert caught.value is error
    assert bench.trace.operations == ["C", "S"]
    assert (bench.runtime.tokens, bench.runtime.is_faulted) == ([7, 7], False)
    assert bench.decoder.state == [7, 7]
    bench.decoder.restore_errors.clear()
    bench.trace.clear()
    bench.trace.after[1] = bench.trace.expire
    with pytest.raises(DeadlineExceeded):
        bench.ask([1, 1, 2])
    assert bench.trace.operations == ["C", "S", "S"]
    bench.trace.clear()
    assert bench.ask([1, 1, 2]).reused_tokens == 2


def test_the_saved_prefix_is_prompt_and_answer_whatever_ended_it():
    bench = Bench()
    bench.ask([2, 3], Generation(3, (5,)))
    assert saved(bench) == [[2, 3]]
    bench.ask([1], Generation(2))
    assert saved(bench) == [[2, 3], [1, 1, 2]]


@pytest.mark.parametrize("size", [-1, 1.5, None, "4", True, -(10**20_000)], ids=lambda size: type(size).__name__)
def test_a_checkpoint_size_that_is_no_size_is_the_decoders_error(size):
    bench = Bench()
    bench.decoder.checkpoint_bytes = lambda: size
    with pytest.raises(DecoderError, match=r"the decoder's checkpoint_bytes\(\) is .* but must be an integer of at"):
        bench.ask([1])
    assert bench.trace.operations == []
    assert not bench.runtime.is_faulted


def test_a_checkpoint_size_of_thousands_of_digits_is_refused_like_any_other():
    bench = Bench()
    bench.decoder.checkpoint_bytes = lambda: 10**5000
    told = "a snapshot needs <integer of 16610 bits> bytes, but checkpoint_bytes is 16384"
    with pytest.raises(BudgetExceeded, match=told):
        bench.ask([1])
    bench.decoder.checkpoint_bytes = lambda: -(10**5000)
    with pytest.raises(DecoderError, match="is <integer of 16610 bits>, but must be an integer of at least 0"):
        bench.ask([1])
    decoder = FixtureDecoder()
    decoder.checkpoint_bytes_at = lambda tokens: 10**5000
    with pytest.warns(RuntimeWarning, match="tokens need <integer of 16611 bits>: a long"):
        Runtime(decoder, Limits(32, 4, 10**4999))


def test_an_error_of_checkpoint_bytes_fails_the_mandatory_snapshot_and_not_the_optional_one():
    bench = Bench()
    sizes = iter([0, "x"])
    bench.decoder.checkpoint_bytes = lambda: next(sizes)
    bench.ask([1])
    assert (bench.runtime.tokens, bench.runtime.checkpoint_count) == ([1, 1], 0)
    with pytest.raises(StopIteration):
        bench.ask([1, 1])
    assert bench.runtime.tokens == bench.decoder.state == [1, 1]


def test_the_size_of_a_checkpoint_is_asked_for_once_just_before_it_is_taken():
    """So that a decoder may answer for exactly the state that it will be asked to save."""
    bench = Bench()
    size = bench.decoder.checkpoint_bytes

    def noted() -> int:
        bench.trace.operations.append(f"bytes of {len(bench.decoder.state)}")
        return size()

    bench.decoder.checkpoint_bytes = noted
    bench.ask([2, 3, 4], save_at=(1,))
    assert " ".join(bench.trace.operations) == ("bytes of 0 C R I2 bytes of 1 C I3 E4 P E1 emit1 bytes of 4 C")


def test_snapshots_own_their_memory():
    bench = Bench()
    bench.ask([1])
    bench.ask([2, 3])
    one, two = bench.runtime._conversation.committed.prefixes._saved
    assert one.logits.tolist() == [-1, -1, 1, -1, -1, -1, -1, -1]
    assert two.logits.tolist() == [-1, -1, 1, -1, -1, -1, -1, -1]
    assert not np.shares_memory(one.logits, two.logits)
    assert [one.size, two.size] == [128, 136]


class Checkpoint(list):
    """One that can be watched by a weak reference."""


class WatchedDecoder(FixtureDecoder):
    """Counts the checkpoints that somebody still holds."""

    def __init__(self, trace):
        super().__init__(trace)
        self.made: list[weakref.ref] = []

    def checkpoint(self):
        saved = Checkpoint(super().checkpoint())
        self.made.append(weakref.ref(saved))
        return saved

    def restore(self, checkpoint):
        super().restore(tuple(checkpoint))

    @property
    def held(self) -> int:
        return sum(reference() is not None for reference in self.made)


@pytest.mark.parametrize("retention", ["fifo", "lru"])
def test_no_checkpoint_outlives_its_use_even_if_the_error_is_kept(retention):
    """A paged decoder's arena has room for the live context and the budget, and not for forgotten checkpoints."""
    bench = bench_with(600, checkpoints=2, retention=retention)
    decoder = WatchedDecoder(bench.trace)
    bench.runtime = runtime = Runtime(decoder, Limits(32, 2, 600), clock=bench.trace.clock, retention=retention)
    kept = []
    gc.disable()  # reference counts alone must do
    try:
        for prompt in ([1], [2], [1, 1, 3], [1], [1, 1], [5, 6, 7]):
            for at in range(1, 9):
                bench.trace.clear()
                bench.trace.after[at] = bench.trace.expire
                try:
                    bench.ask(prompt, save_at=(1,) if len(prompt) > 1 else ())
                except DeadlineExceeded as error:
                    kept.append(error)
                assert decoder.held == runtime.checkpoint_count
            bench.trace.clear()
            bench.ask(prompt)
            assert decoder.held == runtime.checkpoint_count
    finally:
        gc.enable()
    assert len(kept) > 20


def test_a_decoder_that_tells_its_checkpoint_sizes_is_warned_of_a_budget_below_two_full_contexts():
    decoder = FixtureDecoder()
    decoder.checkpoint_bytes_at = lambda tokens: 4 * tokens
    need = 2 * (4 * (32 + VOCAB) + 4 * 32 + 80)
    with pytest.warns(RuntimeWarning) as caught:
        Runtime(decoder, Limits(32, 4, need - 1))
    (warning,) = caught
    assert str(warning.message) == (
        f"checkpoint_bytes is {need - 1}, but two snapshots of a full context of 32 tokens need {need}: "
        "a long conversation will fail or lose its prefixes"
    )
    assert warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Runtime(decoder, Limits(32, 4, need))
        Runtime(FixtureDecoder(), Limits(32, 4, 1))


def test_a_checkpoint_size_at_full_context_must_be_a_size():
    decoder = FixtureDecoder()
    decoder.checkpoint_bytes_at = lambda tokens: -tokens
    with pytest.raises(DecoderError, match=r"checkpoint_bytes_at\(32\) is -32, but must be an integer of at least 0"):
        Runtime(decoder, Limits(32, 4, 1000))
