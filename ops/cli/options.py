"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from ops.cli.output import parse_size

Json = Annotated[bool, typer.Option("--json", help="Print JSON, a line for each event.")]
RedisUrl = Annotated[
    str | None,
    typer.Option("--redis-url", envvar="PRISM_REDIS_URL", help="The broker; without one, the embedded broker."),
]
MaxTokens = Annotated[int, typer.Option("-n", "--max-tokens", min=1, help="Tokens to generate at most.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")]
TopK = Annotated[int, typer.Option(min=0, help="Candidates kept; 0 keeps all.")]
TopP = Annotated[float, typer.Option(min=0.0, max=1.0, help="Probability mass kept.")]
MinP = Annotated[float, typer.Option(min=0.0, max=1.0, help="Floor relative to the likeliest token.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="A text that ends the answer; may be repeated.")]
Raw = Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the model's chat template.")]
Threads = Annotated[int, typer.Option("-t", "--threads", min=1, max=64, help="Compute threads of each worker.")]


def _size(text: str | int) -> int:
    try:
        return parse_size(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


Context = Annotated[
    int | None,
    typer.Option("-c", "--context", parser=_size, metavar="SIZE", help="Context in tokens, such as 4k."),
]
MemoryBudget = Annotated[
    int | None,
    typer.Option("--memory-budget", parser=_size, metavar="SIZE", help="Most memory a worker may use, such as 2G."),
]
