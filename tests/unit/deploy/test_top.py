"""What `prism top` shows is what the pool says: rates between two looks, leases, reuse, moves, parked turns."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from broker.admin import Depths, Snapshot, WorkerInfo
from broker.store import Lease
from ops.cli.top import COLUMNS, Rates, rates, render

LEASE = Lease(worker="h-1", model="m" * 64 + "+1", host="h", pid=42, name="small", memory_bytes=3 << 30)
STATS = {"beat": "9000", "turns": "5", "tokens": "321", "prompt_tokens": "200", "reused_tokens": "150"}
BUSY = WorkerInfo("h-1", "busy", LEASE, ["01R"], 2, STATS)
LAPSED = WorkerInfo("h-0", "lapsed", None, [], 0, {"beat": "1"})
BEFORE = Snapshot(
    boot="b",
    now_ms=8_000,
    workers=[LAPSED, BUSY],
    open_requests=6,
    running=1,
    queued=Depths(interactive=2, background=1, batch=1),
    boxed=1,
    parked={},
    oldest_wait_ms=2_500,
    counters={"generation_tokens": 100, "submitted": 10, "ended.done": 3, "ended.failed": 1},
    models={},
)
COUNTERS = {"generation_tokens": 300, "submitted": 12, "ended.done": 6, "ended.failed": 2}
NOW = replace(BEFORE, now_ms=10_000, counters=COUNTERS)


def shown(snapshot: Snapshot, speed: Rates) -> str:
    console = Console(width=220, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(snapshot, speed))
    console.file.close()
    return console.export_text()


def test_rates_are_differences_by_the_brokers_clock() -> None:
    assert rates(BEFORE, NOW) == Rates(tokens=100.0, submitted=1.0, ended=2.0)


def test_there_is_no_rate_over_a_restart_of_the_data_or_without_a_first_look() -> None:
    assert rates(None, NOW) == rates(replace(BEFORE, boot="other"), NOW) == rates(NOW, NOW) == Rates(0.0, 0.0, 0.0)
    emptied = replace(NOW, counters={})
    assert rates(BEFORE, emptied) == Rates(0.0, 0.0, 0.0)


def test_a_row_tells_lease_work_and_reuse_of_a_worker() -> None:
    text = shown(NOW, rates(BEFORE, NOW))
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert tuple(lines["worker"]) == COLUMNS
    assert lines["h-1"] == [
        "h-1",
        "busy",
        "1.0",
        "s",
        "small",
        "h",
        "42",
        "5",
        "321",
        "75",
        "%",
        "3.0",
        "GiB",
        "2",
        "01R",
    ]
    assert lines["h-0"][:3] == ["h-0", "lapsed", "none"]


def test_the_head_tells_queues_moves_reuse_parked_turns_and_wanted_workers() -> None:
    counters = {**COUNTERS, "prompt_tokens": 400, "reused_tokens": 100, "moved.worker_lost": 2, "moved.drain": 1}
    text = shown(replace(NOW, counters=counters, parked={"m+1": 4}, models={"m+1": "small"}), rates(BEFORE, NOW))
    for part in (
        "100.0 tokens/s   1.0 submitted/s   2.0 ended/s",
        "open 6   running 1   boxed 1   waiting: 2 interactive, 1 background, 1 batch (oldest 2.5 s)",
        "prefix reuse 25 %   moved: drain 1, worker_lost 2   the backlog wants 5 worker(s)",
        "parked, with no worker to run them: small 4",
    ):
        assert part in text
