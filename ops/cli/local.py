"""`prism run`: one answer from a model in this process, without a broker."""

from __future__ import annotations

import secrets
import sys
import time
from dataclasses import asdict
from typing import Annotated

import typer

from ops.cli import options
from ops.cli.output import print_json, progress, say
from ops.models import resolve


def run(
    model: Annotated[str, typer.Argument(help="A path or a pulled name.")],
    prompt: Annotated[str, typer.Argument(help="What to answer; '-' reads it from standard input.")],
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 20,
    top_p: options.TopP = 0.95,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    raw: options.Raw = False,
    threads: options.Threads = 1,
    context: options.Context = None,
    as_json: options.Json = False,
) -> None:
    """Answer one prompt in this process, token by token."""
    import prism_core

    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise prism_core.InvalidRequest("the prompt is empty")
    path = resolve(model)
    began = time.monotonic()
    with progress() as report:
        report(f"loading {path.name}", 0, 0)
        loaded = prism_core.open_model(path, threads=threads, context_tokens=context)
        decoder = loaded.decoder(lambda what, share: report(what, round(100 * share), 100))
    ready = time.monotonic()
    prompt_ids = loaded.tokenizer.encode(text) if raw else loaded.chat.encode([{"role": "user", "content": text}])
    seed = secrets.randbits(63) if seed is None else seed
    sampler = (
        prism_core.TemperatureSampler(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        if temperature > 0
        else None
    )
    stream = loaded.tokenizer.stream()
    ids: list[int] = []
    pieces: list[str] = []
    first = 0.0

    def show(piece: str) -> None:
        pieces.append(piece)
        if not as_json:
            print(piece, end="", flush=True)

    def emit(token: int) -> None:
        nonlocal first
        first = first or time.monotonic()
        ids.append(token)
        show(stream.push(token))

    runtime = prism_core.Runtime(decoder, prism_core.Limits(loaded.context_tokens, 0, 8 << 30))
    completion = runtime.generate(
        prompt_ids,
        prism_core.Generation(max_tokens, loaded.tokenizer.stop_tokens),
        prefill=prism_core.Prefill(128),
        sampler=sampler,
        emit=emit,
    )
    show(stream.finish())
    done = time.monotonic()
    usage = {
        **asdict(completion),
        "finish": completion.finish.value,
        "load_seconds": round(ready - began, 3),
        "first_token_seconds": round((first or done) - ready, 3),
        "tokens_per_second": round(max(len(ids) - 1, 0) / (done - first), 2) if first and done > first else None,
        "seed": seed if sampler else None,
    }
    if as_json:
        print_json({"text": "".join(pieces), "token_ids": ids, "usage": usage})
        return
    print()
    say(
        f"{completion.prompt_tokens} prompt + {completion.generated_tokens} new tokens, first after "
        f"{usage['first_token_seconds']} s, then {usage['tokens_per_second']} tokens/s ({completion.finish.value})"
    )
