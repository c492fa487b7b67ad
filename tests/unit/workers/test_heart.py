"""Beats: a loop that moves keeps its lease, one that hangs loses it, and a forgotten worker is told."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from broker.reap import reap
from prism_core.kernels.jit import kernel
from tests.brokers import PrivateBroker
from tests.pool import wait_for
from tests.unit.workers.rig import Rig
from workers.cancellation import Halt, Progress, TurnCancellation
from workers.heart import Heart


@pytest.fixture
def rig(broker: PrivateBroker) -> Rig:
    return Rig(broker, lease_ms=400, beat_ms=100)


def heart_of(rig: Rig, progress: Progress, **options) -> Heart:
    return Heart(rig.store, progress, rig.store.join(), **options)


def test_a_lease_is_renewed_while_the_loop_makes_progress_and_lapses_when_it_hangs(rig: Rig):
    now = [0.0]
    progress = Progress(clock=lambda: now[0])
    heart = heart_of(rig, progress)
    heart.start()
    try:
        beats = [rig.redis.hget("prism:w:w1:stat", "beat")]
        for _ in range(5):
            beats.append(wait_for(lambda: _other(rig, beats[-1]), "a beat"))
        now[0] = 10.0  # the loop's last stamp is ten seconds old
        wait_for(lambda: not rig.redis.exists("prism:w:w1"), "the lease to lapse")
        progress.stamp()
        wait_for(lambda: rig.redis.exists("prism:w:w1"), "the lease to be renewed")
    finally:
        heart.stop()
    assert not heart.lost


def _other(rig: Rig, before: bytes | None) -> bytes | None:
    beat = rig.redis.hget("prism:w:w1:stat", "beat")
    return beat if beat != before else None


@kernel("boolean(int64[::1], int64)")
def spin_until_told(flags, tries):
    """Whether somebody set flags[0] while this ran."""
    for step in range(tries):
        flags[1] = step
        if flags[0] != 0:
            return True
    return False


def test_a_beat_thread_is_not_held_up_by_a_kernel():
    """A kernel that kept the interpreter to itself would let a healthy worker's lease lapse. All kernels are made by
    the same decorator as this one."""
    flags = np.zeros(2, np.int64)
    inside = threading.Event()

    def beat() -> None:
        inside.wait(20)
        while flags[1] == 0:  # the kernel has begun
            pass
        flags[0] = 1

    thread = threading.Thread(target=beat)
    thread.start()
    spin_until_told(flags.copy(), 1)  # compiled
    inside.set()
    told = spin_until_told(flags, 1 << 34)
    thread.join()
    assert told


def test_a_reaped_worker_is_told_so(rig: Rig):
    heart = heart_of(rig, Progress())
    reap(rig.scripts.run, "w1", known_gone=True)
    heart.beat()
    assert heart.lost


def test_a_broker_that_lost_its_data_is_recognised(rig: Rig):
    heart = heart_of(rig, Progress())
    rig.broker.flush()
    heart.beat()
    assert heart.lost
    rig.store.join()
    again = Heart(rig.store, Progress(), "another boot")
    again.beat()
    assert again.lost


def test_a_drain_asked_for_elsewhere_is_seen_and_one_asked_for_here_is_told(rig: Rig):
    heart = heart_of(rig, Progress())
    rig.store.drain()
    heart.beat()
    assert heart.draining
    rig.broker.flush()
    own = heart_of(rig, Progress())
    own.drain()
    own.start()
    wait_for(lambda: rig.redis.sismember("prism:draining", "w1"), "the drain")
    own.stop()


def test_a_broker_outage_stops_no_beat_thread(rig: Rig):
    heart = heart_of(rig, Progress(clock=lambda: 0.0))
    heart.start()
    rig.broker.kill()
    rig.broker.start()
    before = rig.redis.hget("prism:w:w1:stat", "beat")
    wait_for(lambda: _other(rig, before), "a beat after the outage")
    heart.stop()


def test_the_first_reason_to_stop_stays_except_that_fenced_always_wins():
    cancellation = TurnCancellation(Progress())
    assert not cancellation.is_cancelled
    cancellation.stop(Halt.CANCELLED, "a")
    cancellation.stop(Halt.DRAINED, "b")
    assert (cancellation.halt, cancellation.detail) == (Halt.CANCELLED, "a")
    cancellation.stop(Halt.FENCED, "c")
    cancellation.stop(Halt.CANCELLED, "d")
    assert (cancellation.halt, cancellation.detail) == (Halt.FENCED, "c")


def test_every_check_stamps_the_progress():
    now = [0.0]
    progress = Progress(clock=lambda: now[0])
    cancellation = TurnCancellation(progress)
    now[0] = 5.0
    assert progress.age_s() == 5.0
    assert not cancellation.is_cancelled
    assert progress.age_s() == 0.0
