"""Kill points: a worker kills itself at its k-th script call, before sending it or after the broker has done it.

Every call of the protocol is a moment at which a process can die, and each has two sides. `arm` wraps a worker's store,
so that the countdown in the broker, set by `aim`, ends the process; a sweep over k meets every point of a scenario. It
reaches a worker only through `Orders.prepare`, which only code that starts workers can set.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import redis

from broker.store import WorkerStore

COUNTED = ("take", "append", "finish", "settle", "give_back", "leave")
"""Verbs that move a turn; beats, polls and takes that find nothing come at no fixed time and are not counted."""
SIDES = ("before", "after")
PREPARE = "ops.bench.killpoints:arm"


def aim(client: redis.Redis, side: str, k: int) -> None:
    """The k-th counted call of any armed worker from now on is its last."""
    client.delete(*(f"kill:{name}" for name in SIDES))
    client.set(f"kill:{side}", k)


def has_fired(client: redis.Redis) -> bool:
    """Whether the countdown has ended a worker."""
    return not any(client.exists(f"kill:{name}") for name in SIDES)


def arm(store: WorkerStore) -> None:
    """Makes this process mortal. For `Orders.prepare`."""
    for name in COUNTED:
        setattr(store, name, _mortal(store.redis, name, getattr(store, name)))


def _mortal(client: redis.Redis, name: str, verb: Callable[..., Any]) -> Callable[..., Any]:
    def mortal(*arguments: Any, **options: Any) -> Any:
        if name != "take":
            _count_down(client, "before")
        answer = verb(*arguments, **options)
        if name != "take" or answer is not None:
            _count_down(client, "after")
        return answer

    return mortal


_COUNT_DOWN = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
if redis.call('DECR', KEYS[1]) > 0 then return 0 end
redis.call('DEL', KEYS[1])
return 1
"""


def _count_down(client: redis.Redis, side: str) -> None:
    if client.eval(_COUNT_DOWN, 1, f"kill:{side}"):
        os.kill(os.getpid(), signal.SIGKILL)
