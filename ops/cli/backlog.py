"""`prism backlog`: how many workers the backlog needs, as one number for scripts and autoscalers.

The same number as the gateway's gauge `prism_wanted_workers`: one worker for each running turn and one for each waiting
turn (or for each N of them). Turns behind the active one of their conversation do not count: no worker could run them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ops.cli import options
from ops.cli.output import print_json
from prism_core.errors import InvalidRequest

if TYPE_CHECKING:
    from broker.admin import Snapshot


def backlog(
    redis_url: options.RedisUrl = None,
    waiting_per_worker: Annotated[
        int, typer.Option(min=1, max=100_000, help="Waiting turns that one worker may have before it.")
    ] = 1,
    least: Annotated[int, typer.Option("--min", min=0, help="Say at least this many.")] = 0,
    most: Annotated[int | None, typer.Option("--max", min=0, help="Say at most this many.")] = None,
    as_json: options.Json = False,
) -> None:
    """Print how many workers the backlog needs."""
    from broker.admin import Admin

    if most is not None and most < least:
        raise InvalidRequest(f"--max is {most}, which is less than --min, {least}")
    with options.connected(redis_url) as connection:
        snapshot = Admin(connection.redis).snapshot()
    wanted = max(least, snapshot.wanted_workers(waiting_per_worker))
    wanted = wanted if most is None else min(most, wanted)
    if as_json:
        print_json(facts(snapshot, wanted))
    else:
        print(wanted)


def facts(snapshot: Snapshot, wanted: int) -> dict[str, Any]:
    """What the number was made of."""
    alive = [worker for worker in snapshot.workers if worker.state in ("idle", "busy")]
    return {
        "wanted_workers": wanted,
        "live_workers": len(alive),
        "running": snapshot.running,
        "waiting": snapshot.queued.total,
        "boxed": snapshot.boxed,
        "parked": sum(snapshot.parked.values()),
        "oldest_wait_ms": snapshot.oldest_wait_ms,
        "oldest_background_or_batch_wait_ms": snapshot.behind_ms,
    }
