"""A broker that is SIGKILLed: nothing is lost, unless its disk stalled in fsync; then the same is told again.

With `appendfsync everysec` a server that waits for an fsync puts off its next write to the file for up to 2 s and goes
on answering. What it answered in that time dies with it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker import Client
from broker.errors import StreamLost
from ops.bench.watch import Story, follow
from tests.brokers import PrivateBroker
from tests.conformance.rig import Rig, begin, check_settled, check_stream, emit, end, must_take
from tests.conformance.stalled import StalledDisk
from tests.pool import FAST, Pool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs ptrace")


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[PrivateBroker]:
    made = PrivateBroker(tmp_path)
    made.start()
    yield made
    made.stop()


def stalled(broker: PrivateBroker) -> StalledDisk:
    try:
        disk = StalledDisk(broker)
    except OSError as error:
        pytest.skip(f"no thread can be held still here: {error}")
    disk.wait_for_fsync()
    return disk


def test_a_killed_server_has_everything_that_it_acknowledged_while_its_disk_answered(broker: PrivateBroker) -> None:
    with broker.client() as client:
        for number in range(2000):
            client.xadd("log", {"d": str(number)})
        broker.kill()
    broker.start()
    with broker.client() as client:
        assert client.xlen("log") == 2000


def test_a_server_killed_while_its_disk_stalls_loses_what_it_had_acknowledged(broker: PrivateBroker) -> None:
    """The limit itself, so that nobody believes it away."""
    disk = stalled(broker)
    with broker.client() as client:
        assert client.xadd("log", {"d": "1"})
        assert client.info("persistence")["aof_buffer_length"] > 0
        disk.kill_broker()
    broker.start()
    with broker.client() as client:
        assert not client.exists("log")


def test_a_turn_whose_end_was_read_and_then_lost_is_given_again_and_told_to_its_end(broker: PrivateBroker) -> None:
    rig = Rig(broker.url)
    worker = rig.worker()
    request = rig.submit().request
    claim = must_take(worker)
    begin(worker, claim)
    emit(worker, claim, [1, 2])
    disk = stalled(broker)
    emit(worker, claim, [3])
    assert end(worker, claim, ids=[1, 2, 3]).status == "ok"
    seen = follow(rig.redis, request)
    assert (seen.state, seen.ids) == ("done", [1, 2, 3])
    disk.kill_broker()
    broker.start()
    assert rig.state(request) == "running"
    again = must_take(worker)  # it believes that it has ended everything
    assert (again.request, again.epoch, again.emitted) == (request, claim.epoch + 1, [1, 2])
    begin(worker, again)
    emit(worker, again, [3])
    assert end(worker, again, ids=[1, 2, 3]).status == "ok"
    told = follow(rig.redis, request)
    assert (told.state, told.ids, told.text) == ("done", seen.ids, seen.text)
    assert seen.went_back(rig.redis)
    check_stream(rig.log(request))
    check_settled(rig)
    rig.close()


def test_a_reader_of_a_log_that_went_back_is_told_so_or_reads_on_without_a_fault(tmp_path: Path) -> None:
    """The worker dies with the broker: another one writes other events under numbers that were read."""
    with Pool(tmp_path, 2, model="toy?step_s=0.02", pool=FAST) as pool, Client(pool.broker.url) as client:
        request = pool.submit(prompt="once", max_tokens=100)
        watcher: Story = pool.follow(request, until=lambda story: len(story.ids) >= 5)
        disk = stalled(pool.broker)
        stream, ids = client.request(request).events(timeout=60), []
        while len(ids) < 20:
            ids += next(stream).token_ids
        worker = pool.worker_of(request)
        pid = pool.pid_of(worker)
        disk.kill_broker()
        os.kill(pid, signal.SIGKILL)
        pool.broker.start()
        lost = ""
        try:
            for event in stream:
                ids += event.token_ids
        except StreamLost as error:
            lost = str(error)
        told = follow(pool.redis, request)
        assert told.state == "done"
        assert told.ids[: len(watcher.ids)] == watcher.ids
        assert ids == told.ids[: len(ids)]
        assert "read it again from the start" in lost if lost else len(ids) == 100
