"""Commands that run the pool: `serve`, `worker`, `top`, `drain`."""

from __future__ import annotations

import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ops.cli import options
from ops.cli.output import WIDE, human_bytes, print_json, print_table, progress, say
from ops.models import local_models, resolve

if TYPE_CHECKING:
    from broker.admin import WorkerInfo
    from workers.supervisor import Supervisor

Workers = Annotated[int, typer.Option("-w", "--workers", min=1, max=256, help="Worker processes.")]
TOP_SECONDS = 2.0


def label_of(path: Path) -> str:
    """What clients may call the model: its pulled name, else the file's name."""
    for local in local_models():
        if local.path == path:
            return local.name
    return path.name.removesuffix(".gguf")


def check_model(path: Path, context: int | None, threads: int, memory_budget: int | None) -> None:
    """Opens the model once, so that a mistake is one clear line here instead of N lines of dying workers.

    A budget is what one worker may use; a worker keeps prefixes as well, and may still find it too small.
    """
    import prism_core

    with progress() as report:
        report(f"checking {path.name}", 0, 0)
        prism_core.open_model(path, threads=threads, context_tokens=context, memory_budget=memory_budget).close()


def worker(
    model: Annotated[str, typer.Argument(help="A path or a pulled name.")],
    redis_url: options.RedisUrl = None,
    workers: Workers = 1,
    threads: options.Threads = 1,
    context: options.Context = None,
    memory_budget: options.MemoryBudget = None,
    grace: options.Grace = 30.0,
) -> None:
    """Join a pool with N workers; SIGTERM drains them, a second one stops them at once."""
    from broker import log

    path = resolve(model)
    check_model(path, context, threads, memory_budget)
    with options.kept_broker(redis_url) as broker:
        settings = {"threads": threads, "context_tokens": context, "memory_bytes": memory_budget, "grace_s": grace}
        supervisor = supervise(path, broker.url, workers, settings)
        log.set_up()
        say(f"{workers} worker(s) of {label_of(path)} on {broker.shown}")
        supervisor.run_with_signals()


def serve(
    model: Annotated[str, typer.Argument(help="A path or a pulled name.")],
    redis_url: options.RedisUrl = None,
    workers: Workers = 1,
    threads: options.Threads = 1,
    host: options.Host = "127.0.0.1",
    port: options.Port = 8000,
    context: options.Context = None,
    memory_budget: options.MemoryBudget = None,
    grace: options.Grace = 30.0,
    rate_limit: options.RateLimit = 0.0,
) -> None:
    """A whole pool on this machine: broker, N workers and the OpenAI-compatible gateway."""
    from broker import log
    from ops.cli.gateway import GatewayThread, build

    path = resolve(model)
    check_model(path, context, threads, memory_budget)
    with options.kept_broker(redis_url) as broker:
        server = build(host, port, broker.url, rate_limit=rate_limit)
        settings = {"threads": threads, "context_tokens": context, "memory_bytes": memory_budget, "grace_s": grace}
        supervisor = supervise(path, broker.url, workers, settings)
        log.set_up()
        door = GatewayThread(server, on_end=supervisor.stop)
        door.start()
        try:
            say(f"http://{host}:{port}/v1 with {workers} worker(s) of {label_of(path)}; broker {broker.shown}")
            supervisor.run_with_signals()
        finally:
            door.stop()


def supervise(path: Path, url: str, workers: int, settings: dict[str, Any]) -> Supervisor:
    """A supervisor of N workers of the model at `path`; `settings` are fields of `WorkerConfig`."""
    from workers.config import WorkerConfig
    from workers.supervisor import Supervisor

    config = WorkerConfig(model=str(path), redis_url=url, **settings)
    return Supervisor(config, workers, label=label_of(path))


def top(
    redis_url: options.RedisUrl = None,
    once: Annotated[bool, typer.Option("--once", help="Print the state once and leave.")] = False,
    as_json: options.Json = False,
) -> None:
    """The pool live: workers, queue depths, tokens per second, prefix reuse, takeovers, wanted workers."""
    from rich.live import Live

    from broker.admin import Admin
    from broker.connect import connect
    from ops.cli.top import rates, render

    connection = connect(redis_url)
    admin = Admin(connection.redis)
    try:
        before = admin.snapshot()
        if once or as_json:
            if as_json:
                print_json(asdict(before) | {"wanted_workers": before.wanted_workers()})
            else:
                from rich.console import Console

                width = None if sys.stdout.isatty() else WIDE
                Console(width=width, highlight=False).print(render(before, rates(None, before)))
            return
        with Live(render(before, rates(None, before)), refresh_per_second=4, screen=False) as live:
            while True:
                time.sleep(TOP_SECONDS)
                now = admin.snapshot()
                live.update(render(now, rates(before, now)))
                before = now
    finally:
        connection.close()


def drain(
    name: Annotated[str, typer.Argument(help="Name of the worker, as `prism top` shows it.")],
    redis_url: options.RedisUrl = None,
    as_json: options.Json = False,
) -> None:
    """Let a worker finish what it runs and take no more."""
    from broker.admin import Admin
    from broker.connect import connect

    connection = connect(redis_url)
    try:
        moved = Admin(connection.redis).drain(name)
    finally:
        connection.close()
    say(f"worker {name} drains; {moved} waiting turn(s) went elsewhere")
    if as_json:
        print_json({"worker": name, "moved": moved})


def workers_table(
    redis_url: options.RedisUrl = None,
    here: Annotated[
        bool, typer.Option("--here", help="Only this host's workers; exit code 1 if none of them is alive.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """The pool's workers."""
    from broker.client import Client

    with Client(redis_url) as client:
        found = client.workers()
    if here:
        found = [worker for worker in found if worker.lease and worker.lease.host == socket.gethostname()]
    _print_workers(found, as_json)
    if here and not found:
        raise typer.Exit(1)


def _print_workers(found: list[WorkerInfo], as_json: bool) -> None:
    if as_json:
        print_json([asdict(worker) for worker in found])
        return
    rows = [
        (w.name, w.state, w.lease.name if w.lease else "", w.lease.pid if w.lease else "", len(w.running), w.queued)
        + ((human_bytes(w.lease.memory_bytes),) if w.lease else ("",))
        for w in found
    ]
    print_table(("worker", "state", "model", "pid", "running", "queued", "memory"), rows)
