"""Commands that run the pool: `serve`, `worker`, `top`, `drain`."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ops.cli import options
from ops.cli.output import human_bytes, print_json, print_table, progress, say
from ops.models import local_models, resolve

Workers = Annotated[int, typer.Option("-w", "--workers", min=1, max=256, help="Worker processes.")]
TOP_SECONDS = 2.0


def label_of(model: str, path: Path) -> str:
    """What clients may call the model: its pulled name, else the file's name."""
    for local in local_models():
        if local.path == path:
            return local.name
    return path.name.removesuffix(".gguf")


def check_model(path: Path, context: int | None, threads: int) -> None:
    """Opens the model once, so that a mistake is one clear line here instead of N lines of dying workers."""
    import prism_core

    with progress() as report:
        report(f"checking {path.name}", 0, 0)
        prism_core.open_model(path, threads=threads, context_tokens=context).close()


def worker(
    model: Annotated[str, typer.Argument(help="A path or a pulled name.")],
    redis_url: options.RedisUrl = None,
    workers: Workers = 1,
    threads: options.Threads = 1,
    context: options.Context = None,
    memory_budget: options.MemoryBudget = None,
) -> None:
    """Join a pool with N workers; SIGTERM drains them, a second one stops them at once."""
    from broker import log
    from broker.connect import connect
    from workers.config import WorkerConfig
    from workers.supervisor import Supervisor

    path = resolve(model)
    check_model(path, context, threads)
    with connect_kept(redis_url) as url:
        connect(url).close()
        config = WorkerConfig(
            model=str(path), redis_url=url, threads=threads, context_tokens=context, memory_bytes=memory_budget
        )
        supervisor = Supervisor(config, workers, label=label_of(model, path))
        log.set_up()
        say(f"{workers} worker(s) of {label_of(model, path)} on {url}")
        supervisor.run_with_signals()


class connect_kept:
    """The broker's URL for child processes, with this process's share in an embedded one held meanwhile."""

    def __init__(self, redis_url: str | None) -> None:
        self._given = redis_url

    def __enter__(self) -> str:
        from broker.connect import connect

        self._connection = connect(self._given)
        for warning in self._connection.warnings:
            say(f"warning: {warning}")
        embedded = self._connection.embedded
        return embedded.url if embedded is not None else str(self._given)

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def serve(
    model: Annotated[str, typer.Argument(help="A path or a pulled name.")],
    redis_url: options.RedisUrl = None,
    workers: Workers = 1,
    threads: options.Threads = 1,
    host: Annotated[str, typer.Option(help="Address of the HTTP gateway.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the HTTP gateway.")] = 8000,
    context: options.Context = None,
    memory_budget: options.MemoryBudget = None,
) -> None:
    """A whole pool on this machine: broker, N workers and the OpenAI-compatible gateway."""
    from broker import log
    from broker.gateway.config import GatewayConfig
    from broker.gateway.server import Server
    from workers.config import WorkerConfig
    from workers.supervisor import Supervisor

    path = resolve(model)
    gateway = GatewayConfig(host=host, port=port)
    check_model(path, context, threads)
    with connect_kept(redis_url) as url:
        config = WorkerConfig(
            model=str(path), redis_url=url, threads=threads, context_tokens=context, memory_bytes=memory_budget
        )
        supervisor = Supervisor(config, workers, label=label_of(model, path))
        log.set_up()
        server = Server(gateway, url)
        thread = threading.Thread(target=server.run, name="gateway", daemon=True)
        thread.start()
        say(f"http://{host}:{port}/v1 with {workers} worker(s) of {label_of(model, path)}; broker {url}")
        try:
            supervisor.run_with_signals()
        finally:
            server.stop()
            thread.join(timeout=10)


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

                Console(highlight=False).print(render(before, rates(None, before)))
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


def workers_table(redis_url: options.RedisUrl = None, as_json: options.Json = False) -> None:
    """The pool's workers."""
    from broker.client import Client

    with Client(redis_url) as client:
        found = client.workers()
    if as_json:
        print_json([asdict(worker) for worker in found])
        return
    rows = [
        (w.name, w.state, w.lease.name if w.lease else "", w.lease.pid if w.lease else "", len(w.running), w.queued)
        + ((human_bytes(w.lease.memory_bytes),) if w.lease else ("",))
        for w in found
    ]
    print_table(("worker", "state", "model", "pid", "running", "queued", "memory"), rows)
