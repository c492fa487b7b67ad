"""The process of one worker: `python -m workers.main`, started by a supervisor, which sends its orders on stdin.

Invariant: the process dies with its supervisor, and everything it needs to know comes as one JSON object from it. The
opener is named by code that starts workers in process (tests, other engines), never by a user's string.
Exit codes: 0 drained, 1 unexpected, 2 the configuration or model cannot work (do not try again), 70 the Runtime broke,
75 reaped by the pool.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import redis

from broker import log as logs
from broker.config import PoolConfig
from broker.connect import connect
from broker.errors import BrokerUnavailable, BrokerUnsuitable
from broker.store import WorkerStore
from prism_core.errors import DecoderError, InvalidRequest, ModelError
from prism_core.runtime import Generation, Runtime
from workers.budget import plan
from workers.config import WorkerConfig
from workers.worker import TurnWorker, incarnation, lease_for

EXIT_UNUSABLE = 2
MAX_REPORT_BYTES = 2000  # less than a pipe holds, so that nobody need be reading
DEFAULT_OPENER = "prism_core.model:open_model"
PR_SET_PDEATHSIG = 1
AWAY_S = 0.5
PROGRESS_S = 3.0  # a first start packs weights and compiles for some ten seconds; a later one is done before this
SWITCH_S = 0.0005  # a decoder step that ends must not wait 5 ms for a thread that parses a reply

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What a supervisor tells a new worker process."""

    config: WorkerConfig
    name: str
    parent: int
    label: str = ""
    opener: str = DEFAULT_OPENER
    """`module:function`, called as `open_model`."""
    prepare: str = ""
    """`module:function`, called with the store before the first verb; for tests that kill a worker at a script call."""
    pool: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `PoolConfig` that differ from its defaults."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Orders:
        value = json.loads(text)
        value["config"] = WorkerConfig(**value["config"])
        return cls(**value)


def main() -> int:
    """Reads the orders, opens the model, works. Returns the exit code; a reason for 2 goes to standard output."""
    orders = Orders.from_json(sys.stdin.readline())
    die_with(orders.parent)
    logs.set_up()
    sys.setswitchinterval(SWITCH_S)
    report = take_stdout()
    try:
        return run(orders)
    except (InvalidRequest, ModelError, BrokerUnsuitable) as error:
        log.error("worker cannot start", extra={"worker": orders.name, "error": str(error)})
        os.write(report, " ".join(str(error).split()).encode()[:MAX_REPORT_BYTES])
        return EXIT_UNUSABLE


def take_stdout() -> int:
    """The descriptor of standard output, for the report alone; what libraries print goes nowhere and blocks nobody."""
    report = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return report


def run(orders: Orders) -> int:
    """Opens the model first, so that a worker is a member of the pool only once it can answer at once."""
    config = orders.config
    model = resolve(orders.opener)(
        config.model, threads=config.threads, context_tokens=config.context_tokens, memory_budget=config.memory_bytes
    )
    model.chat.warm()
    decoder = model.decoder(reporting(orders.name))
    memory = plan(model, decoder, memory_bytes=config.memory_bytes, saved_prefixes=config.saved_prefixes)
    runtime = Runtime(decoder, memory.limits, retention="lru", checkpoint_ceiling=64)
    warm(runtime, config.model)
    pool = PoolConfig(**orders.pool)
    client, rq_client = reach(config.redis_url), reach(config.redis_url)
    store = WorkerStore(client, lease_for(orders.name or incarnation(), model, memory, orders.label), pool)
    if orders.prepare:
        resolve(orders.prepare)(store)
    worker = TurnWorker(store=store, rq_client=rq_client, model=model, runtime=runtime, plan=memory, config=config)
    return worker.work()


def reporting(name: str) -> Callable[[str, float], None]:
    """Says in the log what a slow start is doing, and how much of that is done, every few seconds."""
    due = time.monotonic() + PROGRESS_S

    def report(what: str, share: float) -> None:
        nonlocal due
        now = time.monotonic()
        if now >= due:
            due = now + PROGRESS_S
            log.info(what, extra={"worker": name, "done": f"{share:.0%}"})

    return report


def warm(runtime: Runtime, name: str) -> None:
    """Compiles and touches everything once. Raises `ModelError` where not even one token can be made."""
    try:
        runtime.generate([0, 0], Generation(max_tokens=1))
    except DecoderError as error:
        raise ModelError(f"{name}: cannot make a first token: {error}") from error
    runtime.reset()


def reach(url: str) -> redis.Redis:
    """A client of the broker, however long it takes to come: the model is loaded already, so waiting is cheaper than
    starting again. A server that is unfit still ends the process."""
    while True:
        try:
            return connect(url).redis
        except BrokerUnavailable as error:
            log.warning("no broker yet", extra={"error": str(error)})
            time.sleep(AWAY_S)


def resolve(name: str) -> Callable[..., Any]:
    """The function `module:function`, from orders only."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def die_with(parent: int) -> None:
    """Ends this process when its parent ends, however that happens: by the kernel on Linux, else by the lease alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
