"""Supervision: children that die with their parent, crash loops, clean stops, and workers that the pool forgot."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from broker.keys import conversation_key
from tests.brokers import PrivateBroker
from tests.e2e.test_pool_with_toy import bare
from tests.pool import FAST, ROOT, Pool, wait_for
from workers.config import WorkerConfig
from workers.supervisor import Supervisor, WorkersFailed

SLOW = "toy?step_s=0.004"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[PrivateBroker]:
    made = PrivateBroker(tmp_path)
    made.start()
    yield made
    made.stop()


def supervised(broker: PrivateBroker, workers: int = 1) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.e2e.supervised", broker.url, str(workers), SLOW]
    return subprocess.Popen(command, cwd=ROOT, env=environment)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_workers_of_a_killed_supervisor_die_and_another_host_takes_their_turns_over(tmp_path: Path):
    with Pool(tmp_path, 1, model=SLOW, pool=FAST) as pool:
        first = pool.submit(prompt="mine", max_tokens=1000)  # longer than the other worker takes to come
        pool.follow(first, lambda story: len(story.ids) >= 5)
        other = supervised(pool.broker)
        try:
            wait_for(lambda: len(pool.workers()) == 2, "the other supervisor's worker", 60)
            second = pool.submit(prompt="theirs", max_tokens=300)
            pool.follow(second, lambda story: len(story.ids) >= 5)
            worker = pool.worker_of(second)
            pid = pool.pid_of(worker)
            assert pid not in pool.supervisor.pids
        finally:
            other.kill()
            other.wait()
        wait_for(lambda: not alive(pid), "the orphan to die", 10)
        assert pool.follow(second).ids == bare("theirs", 300)
        assert worker not in pool.workers()
        assert pool.follow(first).ids == bare("mine", 1000)


def test_a_sigterm_drains_and_a_second_one_stops_at_once(broker: PrivateBroker):
    pool = Pool.__new__(Pool)
    pool.broker, pool.redis, pool.settings = broker, broker.client(), {}
    process = supervised(broker)
    wait_for(lambda: pool.workers(), "a worker", 60)
    request = pool.submit(prompt="long", max_tokens=4000)
    pool.follow(request, lambda story: len(story.ids) >= 5)
    (worker,) = pool.workers()
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: pool.redis.sismember("prism:draining", worker), "the drain", 10)
    assert process.poll() is None
    pool.follow(request, lambda story: len(story.ids) >= 20)
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) == 0
    story = pool.follow(request, lambda story: bool(story.moves))
    assert story.moves == ["drain"]
    assert pool.record(request)["state"] == b"queued"
    assert not pool.workers()


def test_two_stops_in_a_row_end_a_busy_worker_at_once(tmp_path: Path):
    with Pool(tmp_path, 1, model=SLOW) as pool:
        request = pool.submit(prompt="long", max_tokens=4000)
        pool.follow(request, lambda story: len(story.ids) >= 5)
        pool.supervisor.stop()
        pool.supervisor.stop()
        story = pool.follow(request, lambda story: bool(story.moves))
        assert story.moves == ["drain"], "handed back by the worker, not taken from one that had to be killed"


def test_a_stop_may_interrupt_another_one_anywhere(broker: PrivateBroker):
    """As signal handlers do: at no point may the inner one wait for what the outer one holds."""
    supervisor = Supervisor(WorkerConfig(model="x", redis_url=broker.url), 1)

    def interrupted_at(moment: int) -> int:
        """How many moments there were."""
        supervisor._stop = supervisor._stop_now = False
        seen = 0

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal seen
            frame.f_trace_opcodes = True
            seen += event == "opcode"
            if seen == moment:
                sys.settrace(None)
                supervisor.stop()
                return None
            return trace

        sys.settrace(trace)
        try:
            supervisor.stop()
        finally:
            sys.settrace(None)
        return seen

    def everywhere() -> None:
        moments.append(interrupted_at(-1))
        for moment in range(1, moments[0] + 1):
            interrupted_at(moment)
            told.append(supervisor._stop)

    moments: list[int] = []
    told: list[bool] = []
    thread = threading.Thread(target=everywhere, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), f"it hangs when interrupted at moment {len(told) + 1}"
    assert moments[0] > 10
    assert told == [True] * moments[0]


def test_a_model_that_cannot_be_opened_ends_the_supervisor_with_one_clear_error(broker: PrivateBroker, tmp_path: Path):
    config = WorkerConfig(model=str(tmp_path / "missing.gguf"), redis_url=broker.url)
    with pytest.raises(WorkersFailed, match=r"missing\.gguf"):
        Supervisor(config, 2, environment={"PYTHONPATH": str(ROOT)}).run()


def test_a_worker_that_crashes_at_once_is_started_again_with_growing_pauses(broker: PrivateBroker):
    now = [0.0]
    config = WorkerConfig(model="x", redis_url=broker.url)
    supervisor = Supervisor(
        config, 1, opener="tests.toy:no_such_opener", environment={"PYTHONPATH": str(ROOT)}, clock=lambda: now[0]
    )
    starts: list[float] = []
    seen: set[str] = set()
    deadline = time.monotonic() + 60
    while len(starts) < 5 and time.monotonic() < deadline:
        supervisor._step()
        for name in supervisor.names:
            if name not in seen:
                seen.add(name)
                starts.append(now[0])
        if not supervisor.names:
            now[0] += 0.25
    supervisor._kill_all()
    pauses = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert pauses[0] < 0.5, "a first crash is mostly a kill: no pause"
    assert pauses[1:] == sorted(pauses[1:])
    assert pauses[-1] >= 4 * pauses[1] > 0


def test_a_reaped_worker_exits_and_a_new_incarnation_joins(tmp_path: Path):
    with Pool(tmp_path, 1, model=SLOW) as pool:
        (worker,) = pool.workers()
        (pid,) = pool.supervisor.pids
        pool.redis.srem("prism:ws", worker)
        pool.redis.delete(f"prism:w:{worker}")
        wait_for(lambda: pid not in pool.supervisor.pids, "the old process to exit")
        wait_for(lambda: pool.workers() and pool.workers() != [worker], "the new one to join")
        assert pool.follow(pool.submit(prompt="again", max_tokens=5)).ids == bare("again", 5)


def test_a_broker_that_comes_back_empty_is_recognised_by_running_workers(tmp_path: Path):
    with Pool(tmp_path, 1, model=SLOW) as pool:
        request = pool.submit(prompt="lost", max_tokens=2000)
        pool.follow(request, lambda story: len(story.ids) >= 5)
        (worker,) = pool.workers()
        pool.broker.flush()
        wait_for(lambda: pool.workers() and pool.workers() != [worker], "a new incarnation")
        assert not pool.redis.exists(f"prism:r:{request}:log"), "nothing of the old world is written into the new one"
        assert pool.follow(pool.submit(prompt="new", max_tokens=5)).ids == bare("new", 5)


def test_an_interactive_turn_preempts_a_batch_line_which_goes_on_afterwards(tmp_path: Path):
    with Pool(tmp_path, 1, model=SLOW) as pool:
        line = pool.submit(prompt="line", max_tokens=400, priority="batch")
        pool.follow(line, lambda story: len(story.ids) >= 20)
        turn = pool.submit(prompt="turn", max_tokens=10)
        quick = pool.follow(turn)
        assert quick.ids == bare("turn", 10)
        story = pool.follow(line)
        assert story.ids == bare("line", 400)
        assert story.moves == ["preempted"]
        assert pool.record(line)["attempt"] == b"1"
        assert float(pool.record(turn)["ended"]) < float(pool.record(line)["ended"])


def test_commands_of_rq_reach_a_worker(tmp_path: Path):
    with Pool(tmp_path, 1, model=SLOW) as pool:
        (worker,) = pool.workers()
        channel = f"prism:rq:pubsub:{worker}"
        request = pool.submit(prompt="stop me", max_tokens=3000)
        pool.follow(request, lambda story: len(story.ids) >= 5)
        pool.redis.publish(channel, json.dumps({"command": "stop-job", "job_id": request}))
        story = pool.follow(request)
        assert story.end is not None
        assert (story.state, story.end["reason"]) == ("cancelled", "stopped through rq")
        pool.redis.publish(channel, '{"command": "shutdown"}')
        wait_for(lambda: not pool.supervisor.pids, "the worker to leave")


def test_a_turn_that_kills_every_worker_is_given_up_and_harms_no_other(tmp_path: Path):
    """A poison turn: three takes without a token, then it fails; the turn behind it runs."""
    with Pool(tmp_path, 2, model="toy?step_s=0.002&token_s=0.005", pool=FAST) as pool:
        poison = pool.submit(prompt="p" * 2000, max_tokens=5, conversation="p")
        behind = pool.submit(prompt="fine", max_tokens=5, conversation="p")
        stop = threading.Event()

        def strike() -> None:
            struck = ""
            while not stop.is_set():
                record = pool.record(poison)
                worker = record.get("worker", b"").decode()
                if record.get("state") == b"running" and worker != struck:
                    struck = worker
                    pool.kill(worker)
                stop.wait(0.01)

        striker = threading.Thread(target=strike)
        striker.start()
        try:
            story = pool.follow(poison)
        finally:
            stop.set()
            striker.join()
        assert (story.state, story.end and story.end["reason"]) == ("failed", "worker_lost")
        assert pool.follow(behind).state == "done"
        assert pool.redis.llen(f"prism:c:{conversation_key('local', 'p')}:hist") == 1


def test_a_first_message_of_a_conversation_can_be_replaced_through_the_pool(tmp_path: Path):
    with Pool(tmp_path, 1, model="toy") as pool:
        ask: Callable[[str], list[dict[str, str]]] = lambda text: [{"role": "user", "content": text}]  # noqa: E731
        pool.follow(pool.submit(messages=ask("one"), conversation="r", max_tokens=5))
        story = pool.follow(pool.submit(messages=ask("other"), conversation="r", max_tokens=5, history="replace"))
        assert story.ids == bare(ask("other"), 5)
        assert pool.redis.llen(f"prism:c:{conversation_key('local', 'r')}:hist") == 1


def test_a_loop_that_hangs_loses_its_turn_and_its_process_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("workers.supervisor.HUNG_S", 0.5)
    hang = tmp_path / "hang"
    with Pool(tmp_path, 2, model=f"{SLOW}&hang={hang}", pool=FAST) as pool:
        request = pool.submit(prompt="hang", max_tokens=200)
        pool.follow(request, lambda story: len(story.ids) >= 10)
        worker = pool.worker_of(request)
        pid = pool.pid_of(worker)
        hang.touch()
        began = time.monotonic()
        story = pool.follow(request)
        print(f"a hung loop was noticed and its turn moved within {time.monotonic() - began:.1f} s")
        assert story.ids == bare("hang", 200)
        assert story.moves == ["worker_lost"]
        wait_for(lambda: not alive(pid), "the hung process to be ended", 15)
        wait_for(lambda: len(pool.workers()) == 2, "a new worker", 60)
