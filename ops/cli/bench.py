"""`prism bench`: measure the engine beside a peer, and the pool beside the bare Runtime."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Annotated

import typer

from ops.cli import options
from ops.cli.output import print_json, progress, say
from ops.models import resolve

if TYPE_CHECKING:
    from ops.bench.pool import Figure

app = typer.Typer(help="Measure the engine and the pool.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def engine(
    model: Annotated[str, typer.Argument(help="A path or a pulled name.")],
    peer: Annotated[str | None, typer.Option(help="Compare with `llama.cpp` (the extra `bench`).")] = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Rounds of the whole set of measures.")] = 5,
    short: Annotated[bool, typer.Option("--short", help="Few tokens, for a peer that is very slow.")] = False,
    threads: options.Threads = 1,
    as_json: options.Json = False,
) -> None:
    """Tokens per second of prefill and decode, with a peer in turn on the same file."""
    from ops.bench.engine import bench_engine

    check_peer(peer)
    with progress() as report:
        found = bench_engine(resolve(model), threads=threads, rounds=rounds, peer=peer, short=short, report=report)
    if as_json:
        print_json(found.as_json())
    else:
        print(found.as_markdown())


@app.command()
def sharing(
    model: Annotated[str, typer.Argument(help="A path or a pulled name.")],
    peer: Annotated[str | None, typer.Option(help="Compare with `llama.cpp` (the extra `bench`).")] = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Rounds of each question.")] = 3,
    workers: Annotated[int, typer.Option(min=1, max=16, help="Workers, and slots of the peer.")] = 2,
    threads: options.Threads = 2,
    as_json: options.Json = False,
) -> None:
    """What two processes, a busy neighbour and a queue make of the speed, with a peer in turn."""
    from ops.bench.sharing import bench_sharing

    check_peer(peer)
    with progress() as report:
        found = bench_sharing(
            resolve(model), threads=threads, workers=workers, rounds=rounds, peer=peer, report=report
        )  # fmt: skip
    if as_json:
        print_json(found.as_json())
    else:
        print(found.as_markdown())


def check_peer(peer: str | None) -> None:
    if peer not in (None, "llama.cpp"):
        raise typer.BadParameter(f"peer must be llama.cpp, got {peer!r}")


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
    report_figures(figures, as_json)


@app.command()
def promises(
    model: Annotated[str, typer.Argument(help="A path or a pulled name.")],
    volume: Annotated[str, typer.Option(help="A tiny model for the storm, where the number of events counts.")],
    kills: Annotated[int, typer.Option(min=1, help="Workers killed or stalled in the storm.")] = 300,
    minutes: Annotated[float, typer.Option(min=0.1, help="End the storm after this long.")] = 60.0,
    rounds: Annotated[int, typer.Option(min=3, max=1000, help="Rounds of the timed measures.")] = 20,
    seed: options.Seed = None,
    as_json: options.Json = False,
) -> None:
    """P1 to P17, each tried on a real pool, in one table."""
    from ops.bench.promises import bench_promises

    seed = secrets.randbits(31) if seed is None else seed
    say(f"seed {seed}")
    figures = bench_promises(
        resolve(model), volume=resolve(volume), kills=kills, minutes=minutes, rounds=rounds, seed=seed, say=say
    )
    report_figures(figures, as_json)


def report_figures(figures: list[Figure], as_json: bool) -> None:
    if as_json:
        print_json([vars(figure) | {"holds": figure.holds} for figure in figures])
    else:
        print("| promise | what | measured | promised | |", "| --- | --- | --- | --- | --- |", sep="\n")
        print(*(figure.line() for figure in figures), sep="\n")
    if not all(figure.holds for figure in figures):
        raise typer.Exit(1)
