"""The bare Runtime inside a worker's process, for P10: what the pool costs a token, and nothing else.

Two processes that run the same kernels on the same weights differ by a hundredth in speed, by where the system put
their memory and code: as much as the promise leaves. So the worker's own process runs the bare side as well, on a
second decoder of its model and a thread of its own, between two turns. What a worker's other threads cost while it is
idle (a beat a second, mostly) is therefore in both figures; nobody reads the tokens of the turns that are measured.
`open_model` and `serve` are for `Orders.opener` and `Orders.prepare`, which only code that starts workers can set.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import redis

from broker.store import WorkerStore
from prism_core.runtime import Generation, Limits, Prefill, Runtime, Timings
from workers.config import WorkerConfig
from workers.main import resolve

OPENER, PREPARE = "ops.bench.beside:open_model", "ops.bench.beside:serve"
REAL_OPENER = "PRISM_BENCH_OPENER"
"""Environment variable of the worker: what `open_model` opens with."""
ORDERS, REPLIES = "bench:bare:orders", "bench:bare:replies"
WAIT_S = 120

_models: list[Any] = []


def open_model(*arguments: Any, **options: Any) -> Any:
    """The worker's model, remembered for `serve`."""
    model = resolve(os.environ[REAL_OPENER])(*arguments, **options)
    _models.append(model)
    return model


def serve(store: WorkerStore) -> None:
    """Runs what `bare_step` asks for, on a thread that ends with the process."""
    model = _models[0]
    runtime = Runtime(model.decoder(), Limits(model.context_tokens, 8, 1 << 30))
    arguments = (store.redis, runtime, model.tokenizer.stop_tokens)
    threading.Thread(target=_serve, args=arguments, name="bare", daemon=True).start()


def _serve(client: redis.Redis, runtime: Runtime, stop_tokens: Sequence[int]) -> None:
    while True:
        order: Any = client.blpop([ORDERS], 1)
        if order is not None:
            client.rpush(REPLIES, _step_s(runtime, stop_tokens, **json.loads(order[1])))


def _step_s(runtime: Runtime, stop_tokens: Sequence[int], prompt: list[int], tokens: int) -> float:
    timings, made = Timings(), list[int]()
    prefill = Prefill(WorkerConfig.prefill_block_tokens)
    runtime.generate(prompt, Generation(tokens, stop_tokens), prefill=prefill, emit=made.append, timings=timings)
    return (timings.decode_evaluation + timings.sampling + timings.callback) / max(1, len(made))


def bare_step(client: redis.Redis, prompt: list[int], tokens: int) -> float:
    """Seconds per greedy token on the bare Runtime of the pool's one worker, which must be idle.

    The same phases as the `decode_us`, `sampling_us` and `emit_us` of a turn. Raises `TimeoutError`.
    """
    client.rpush(ORDERS, json.dumps({"prompt": prompt, "tokens": tokens}))
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        reply: Any = client.blpop([REPLIES], 1)
        if reply is not None:
            return float(reply[1])
    raise TimeoutError(f"no figure of the bare Runtime came within {WAIT_S} s")
