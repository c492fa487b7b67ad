"""A worker on another machine whose network is cut: its turn goes elsewhere, and it is fenced when it comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.test_pool_with_toy import bare
from tests.partition import Cable
from tests.pool import FAST, Pool, wait_for
from workers.config import WorkerConfig
from workers.supervisor import Supervisor

SLOW = "toy?step_s=0.004"


@contextmanager
def elsewhere(url: str) -> Iterator[Supervisor]:
    """A supervisor with one worker, as on another machine: it knows the broker by its address only."""
    supervisor = Supervisor(WorkerConfig(model=SLOW, redis_url=url), 1, pool=FAST, opener="tests.toy:open_toy")
    watcher = threading.Thread(target=supervisor.run, name="elsewhere")
    watcher.start()
    try:
        yield supervisor
    finally:
        supervisor.stop()
        supervisor.stop()
        watcher.join(60)


def test_a_turn_leaves_a_worker_that_is_cut_off_and_nothing_late_gets_into_its_log(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    with Pool(tmp_path, 1, model=SLOW, pool=FAST) as pool:
        cable = Cable(pool.broker.socket)
        with elsewhere(cable.url) as supervisor:
            wait_for(lambda: len(pool.workers()) == 2, "the worker elsewhere", 60)
            # One turn for each worker; the one that runs elsewhere is the one that counts.
            names = ["left", "right"]
            requests = {name: pool.submit(prompt=name, max_tokens=1200) for name in names}
            for request in requests.values():
                pool.follow(request, lambda story: len(story.ids) >= 20)
            (far,) = [name for name in names if pool.worker_of(requests[name]) in supervisor.names]
            worker = pool.worker_of(requests[far])
            cable.cut()
            cut_at = time.monotonic()
            story = pool.follow(requests[far], lambda story: bool(story.moves))
            print(f"moved {time.monotonic() - cut_at:.1f} s after the cut, with a lease of {FAST['lease_ms']} ms")
            assert worker not in pool.workers()
            story = pool.follow(requests[far])
            ended = pool.redis.xlen(f"prism:r:{requests[far]}:log")
            cable.mend()
            wait_for(lambda: worker not in supervisor.names, "the fenced worker to leave", 30)
            wait_for(lambda: len(pool.workers()) == 2, "a new incarnation elsewhere", 60)
            assert story.ids == bare(far, 1200)
            assert story.moves == ["worker_lost"]
            assert pool.redis.xlen(f"prism:r:{requests[far]}:log") == ended
            assert int(pool.redis.hget("prism:stats", "fenced_writes") or 0) > 0
        cable.close()
