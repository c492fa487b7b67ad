"""The picture that `prism top` draws of a pool."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from broker.admin import Snapshot, WorkerInfo
from ops.cli.output import human_bytes

COLUMNS = (
    "worker",
    "state",
    "lease",
    "model",
    "host",
    "pid",
    "turns",
    "tokens",
    "reuse",
    "memory",
    "queued",
    "running",
)


@dataclass(frozen=True)
class Rates:
    """What changed between two snapshots, per second."""

    tokens: float
    submitted: float
    ended: float


def rates(before: Snapshot | None, now: Snapshot) -> Rates:
    if before is None or before.boot != now.boot or now.now_ms <= before.now_ms:
        return Rates(0.0, 0.0, 0.0)
    seconds = (now.now_ms - before.now_ms) / 1000

    def rate(prefix: str) -> float:
        def total(snapshot: Snapshot) -> int:
            return sum(count for name, count in snapshot.counters.items() if name.startswith(prefix))

        return max(0, total(now) - total(before)) / seconds

    return Rates(rate("generation_tokens"), rate("submitted"), rate("ended."))


def render(snapshot: Snapshot, speed: Rates) -> RenderableType:
    counters = snapshot.counters
    prompt, reused = counters.get("prompt_tokens", 0), counters.get("reused_tokens", 0)
    moves = {name.removeprefix("moved."): n for name, n in counters.items() if name.startswith("moved.")}
    queued = snapshot.queued
    lines = [
        f"{speed.tokens:.1f} tokens/s   {speed.submitted:.1f} submitted/s   {speed.ended:.1f} ended/s",
        f"open {snapshot.open_requests}   running {snapshot.running}   boxed {snapshot.boxed}   waiting: "
        f"{queued.interactive} interactive, {queued.background} background, {queued.batch} batch "
        f"(oldest {snapshot.oldest_wait_ms / 1000:.1f} s)",
        f"prefix reuse {100 * reused / prompt if prompt else 0:.0f} %   moved: "
        + (", ".join(f"{why} {n}" for why, n in sorted(moves.items())) or "none")
        + f"   the backlog wants {snapshot.wanted_workers()} worker(s)",
    ]
    if snapshot.parked:
        parked = ", ".join(f"{snapshot.models.get(m) or m[:12] or 'any model'} {n}" for m, n in snapshot.parked.items())
        lines.append(f"parked, with no worker to run them: {parked}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        right = column in ("lease", "pid", "turns", "tokens", "reuse", "memory", "queued")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for worker in snapshot.workers:
        table.add_row(*_row(worker, snapshot.now_ms))
    return Group(Text("\n".join(lines)), Text(""), table)


def _row(worker: WorkerInfo, now_ms: int) -> tuple[str, ...]:
    """One worker: the age of its lease (the time since its last beat), and what it has done so far."""
    lease, stats = worker.lease, worker.stats
    model, host, pid = (lease.name or lease.model[:12], lease.host, str(lease.pid)) if lease else ("", "", "")
    age = f"{max(0, now_ms - int(stats['beat'])) / 1000:.1f} s" if lease and "beat" in stats else "none"
    prompt, reused = int(stats.get("prompt_tokens", 0)), int(stats.get("reused_tokens", 0))
    reuse = f"{100 * reused / prompt:.0f} %" if prompt else ""
    memory = human_bytes(lease.memory_bytes) if lease and lease.memory_bytes else ""
    done = (stats.get("turns", ""), stats.get("tokens", ""))
    running = " ".join(worker.running)
    return (worker.name, worker.state, age, model, host, pid, *done, reuse, memory, str(worker.queued), running)
