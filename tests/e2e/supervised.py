"""A supervisor in a process of its own, for tests that kill it: `python -m tests.e2e.supervised URL WORKERS MODEL`."""

from __future__ import annotations

import sys

from broker.log import set_up
from workers.config import WorkerConfig
from workers.supervisor import Supervisor

if __name__ == "__main__":
    url, workers, model = sys.argv[1:]
    set_up()
    Supervisor(
        WorkerConfig(model=model, redis_url=url, grace_s=20.0), int(workers), opener="tests.toy:open_toy"
    ).run_with_signals()
