"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from ops.cli.output import parse_size, say

if TYPE_CHECKING:
    from broker.connect import Connection

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
Host = Annotated[str, typer.Option(help="Address of the HTTP gateway; one that others reach needs PRISM_API_KEYS.")]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Port of the HTTP gateway.")]
RateLimit = Annotated[
    float, typer.Option("--rate-limit", min=0.0, help="Generations that one API key may start per minute; 0: any.")
]
Grace = Annotated[
    float, typer.Option(min=0.0, max=86_400, help="Seconds that a running turn gets to end when its worker drains.")
]


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


@dataclass(frozen=True)
class Broker:
    """Where the broker is, for child processes and for people."""

    url: str
    """With its password, if it has one: never to be printed."""
    shown: str


@contextmanager
def connected(redis_url: str | None) -> Iterator[Connection]:
    """The broker, reached and checked; closed at the end of the block."""
    from broker.connect import connect

    connection = connect(redis_url)
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def kept_broker(redis_url: str | None) -> Iterator[Broker]:
    """The broker for child processes, with this process's share in an embedded one held meanwhile; warns aloud."""
    from broker.connect import shown

    with connected(redis_url) as connection:
        for warning in connection.warnings:
            say(f"warning: {warning}")
        url = connection.embedded.url if connection.embedded is not None else str(redis_url)
        yield Broker(url, shown(url))
