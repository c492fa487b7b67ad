"""Commands that use the pool: `submit`, `tail`, `cancel`, `chat`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ops.cli import options
from ops.cli.output import print_json, say
from prism_core.errors import InvalidRequest, PrismError

if TYPE_CHECKING:
    from broker import Client, Request


class RequestEnded(PrismError):
    """A request ended in another state than done."""


@contextmanager
def pool(redis_url: str | None, *, needs_workers: bool = False) -> Iterator[Client]:
    from broker import Client

    with Client(redis_url) as client:
        if needs_workers and not client.workers():
            say("no worker has joined this pool yet; the request waits (start one: prism worker MODEL)")
        yield client


def submit(
    prompt: Annotated[str, typer.Argument(help="What to answer; '-' reads it from standard input.")],
    conversation: Annotated[str | None, typer.Option(help="The conversation that this turn belongs to.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Print the request's id and leave.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Print the answer once it is whole, not as it comes.")] = False,
    model: Annotated[str, typer.Option(help="Name of a model; without one, whatever the pool runs.")] = "",
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 20,
    top_p: options.TopP = 0.95,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    raw: options.Raw = False,
    priority: Annotated[str, typer.Option(help="interactive, background or batch.")] = "interactive",
    deadline: Annotated[float | None, typer.Option(help="Seconds from now, queueing included.")] = None,
    idempotency_key: Annotated[str | None, typer.Option(help="The same key never generates twice.")] = None,
    redis_url: options.RedisUrl = None,
    as_json: options.Json = False,
) -> None:
    """Queue a prompt and follow its answer."""
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise InvalidRequest("the prompt is empty")
    content: dict[str, Any] = {"prompt": text} if raw else {"messages": [{"role": "user", "content": text}]}
    with pool(redis_url, needs_workers=not detach) as client:
        request = client.submit(
            **content,
            conversation=conversation,
            model=model,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            stop=list(stop or ()),
            priority=priority,
            deadline=deadline,
            idempotency_key=idempotency_key,
        )
        if detach:
            print_json({"id": request.id, "replayed": request.replayed}) if as_json else print(request.id)
            return
        if wait:
            result = request.result()
            print_json(asdict(result)) if as_json else print(result.text)
            _judge(request, result.state, result.reason)
            return
        _follow(request, None, as_json)


def tail(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The request.")],
    start: Annotated[str | None, typer.Option("--from", help="Begin after this event (its id or number).")] = None,
    redis_url: options.RedisUrl = None,
    as_json: options.Json = False,
) -> None:
    """Follow a request from its beginning, or from an event on."""
    after: str | int | None = int(start) if start is not None and start.isascii() and start.isdigit() else start
    with pool(redis_url) as client:
        _follow(client.request(request_id), after, as_json)


def cancel(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The request.")],
    reason: Annotated[str, typer.Option(help="Why, for the record.")] = "",
    redis_url: options.RedisUrl = None,
    as_json: options.Json = False,
) -> None:
    """Cancel a request that waits or runs."""
    with pool(redis_url) as client:
        answer = client.cancel(request_id, reason)
    meaning = {
        "cancelled": "was waiting and has ended",
        "cancelling": "runs, and stops at its next step",
        "ended": "had already ended",
    }[answer]
    print_json({"id": request_id, "answer": answer}) if as_json else print(f"{request_id} {meaning}")


def chat(
    conversation: Annotated[str | None, typer.Argument(help="Name of a conversation to go on with.")] = None,
    model: Annotated[str, typer.Option(help="Name of a model; without one, whatever the pool runs.")] = "",
    system: Annotated[str, typer.Option(help="System message of a new conversation.")] = "",
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.7,
    seed: options.Seed = None,
    redis_url: options.RedisUrl = None,
) -> None:
    """Talk to the pool; only the new message is sent, the pool keeps the conversation. Ctrl-C stops an answer."""
    from broker.keys import new_ulid

    name = conversation or f"chat-{new_ulid()}"
    say(f"conversation {name}; an empty line or Ctrl-D ends it")
    with pool(redis_url, needs_workers=True) as client:
        opening = [{"role": "system", "content": system}] if system and not client.transcript(name) else []
        while line := _ask():
            messages = [*opening, {"role": "user", "content": line}]
            request = client.submit(
                messages=messages,
                history="append",
                conversation=name,
                model=model,
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed,
            )
            try:
                _follow(request, None, as_json=False)
                opening = []
            except KeyboardInterrupt:
                request.cancel("interrupted at the keyboard")
                print(flush=True)
                say("stopped; this turn is not part of the conversation")
            except RequestEnded as ended:
                say(str(ended))


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _follow(request: Request, after: str | int | None, as_json: bool) -> None:
    """Print a stream until its end; `RequestEnded` unless that is done."""
    began = time.monotonic()
    first = 0.0
    for event in request.events(after=after):
        if as_json:
            print_json({"id": event.id, "event": event.kind, **event.data})
        elif event.kind == "delta":
            first = first or time.monotonic()
            print(event.text, end="", flush=True)
        elif event.kind == "moved":
            say(f"\n[moved to another worker: {event.data.get('why')}; the answer goes on]")
        if event.kind == "end":
            if not as_json:
                print(flush=True)
            _judge(request, str(event.state), str(event.data.get("reason", "")))
            if not as_json:
                _summary(event.data, began, first)


def _summary(end: Any, began: float, first: float) -> None:
    usage = end.get("usage", {})
    seconds = time.monotonic() - first
    count = int(usage.get("completion_tokens", 0))
    speed = f", then {(count - 1) / seconds:.1f} tokens/s" if first and count > 1 and seconds > 0 else ""
    say(
        f"{usage.get('prompt_tokens', 0)} prompt ({usage.get('reused_tokens', 0)} reused) + {count} new tokens, "
        f"first after {(first or time.monotonic()) - began:.2f} s{speed} ({end.get('reason')})"
    )


def _judge(request: Request, state: str, reason: str) -> None:
    if state != "done":
        raise RequestEnded(f"request {request.id} {state}: {reason}; disown what was printed of it")
