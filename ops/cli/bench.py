"""`prism bench`: measure the engine beside a peer, and the pool beside the bare Runtime."""

from __future__ import annotations

from typing import Annotated

import typer

from ops.cli import options
from ops.cli.output import print_json, progress
from ops.models import resolve

app = typer.Typer(help="Measure the engine and the pool.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def engine(
    model: Annotated[str, typer.Argument(help="A path or a pulled name.")],
    peer: Annotated[str | None, typer.Option(help="Compare with `llama.cpp` (the extra `bench`).")] = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Rounds of the whole set of measures.")] = 5,
    threads: options.Threads = 1,
    as_json: options.Json = False,
) -> None:
    """Tokens per second of prefill and decode, with a peer in turn on the same file."""
    from ops.bench.engine import bench_engine

    if peer not in (None, "llama.cpp"):
        raise typer.BadParameter(f"peer must be llama.cpp, got {peer!r}")
    with progress() as report:
        found = bench_engine(resolve(model), threads=threads, rounds=rounds, peer=peer, report=report)
    if as_json:
        print_json(found.as_json())
    else:
        print(found.as_markdown())


@app.command()
def pool(
    model: Annotated[str, typer.Argument(help="A path or a pulled name.")],
    rounds: Annotated[int, typer.Option(min=3, max=1000, help="Rounds of the short measures.")] = 20,
    kills: Annotated[int, typer.Option(min=1, max=1000, help="Workers killed for the takeover gap.")] = 10,
    stalls: Annotated[int, typer.Option(min=0, max=1000, help="Workers stalled; each takes a whole lease.")] = 3,
    as_json: options.Json = False,
) -> None:
    """The promises that have a time: first token, flush, cancel, takeover, and decode beside the bare Runtime."""
    from ops.bench.pool import bench_pool

    path = resolve(model)
    with progress() as report:
        figures = bench_pool(path, rounds=rounds, kills=kills, stalls=stalls, say=lambda what: report(what, 0, 0))
    if as_json:
        print_json([vars(figure) | {"holds": figure.holds} for figure in figures])
    else:
        print("| promise | what | measured | promised | |", "| --- | --- | --- | --- | --- |", sep="\n")
        print(*(figure.line() for figure in figures), sep="\n")
    if not all(figure.holds for figure in figures):
        raise typer.Exit(1)
