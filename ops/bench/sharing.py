"""`prism bench sharing`: what becomes of the speed when cores are shared, ours and a peer's in turn.

Three questions, all of them ratios within one round:

- together: two processes of one thread decode at once; their tokens a second over those of one alone.
- busy neighbour: a process of several threads decodes while another one spins; the part of its speed that it keeps.
- throughput: as many workers behind the queue as there are slots in the peer's batch; requests of 64 prompt tokens and
  as many new ones, from submit to the last end. The peer is driven by its C interface, with its slots in one batch as
  its server does it but without any server's work; ours includes the broker, the log and the clients.

Not promised: that the peer's own server reaches the figure that its interface does.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ops.bench.engine import Player
from ops.bench.player import SEED

DECODE = {"do": "decode", "tokens": 64, "depth": 0}
PROMPT_TOKENS, NEW_TOKENS, WAVES = 64, 64, 4


@dataclass
class Line:
    """One question: a list over rounds for each side, in the unit that `what` names."""

    what: str
    wanted: str
    prism: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)

    def row(self) -> str:
        """A row of a Markdown table."""
        ours, theirs = (
            f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})" if values else "-"
            for values in (self.prism, self.peer)
        )
        return f"| {self.what} | {ours} | {theirs} | {self.wanted} |"


@dataclass
class Sharing:
    """Everything that one run found."""

    model: str
    threads: int
    workers: int
    rounds: int
    lines: list[Line]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def as_markdown(self) -> str:
        head = f"{Path(self.model).name}, {self.rounds} rounds, medians and range"
        table = ["| question | prism | peer | asked |", "| --- | --- | --- | --- |"]
        return "\n".join([head, "", *table, *(line.row() for line in self.lines)])


@contextmanager
def busy_process() -> Iterator[int]:
    """A process that spins at normal priority; its id."""
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield spinning.pid
    finally:
        spinning.kill()
        spinning.wait()


def bench_sharing(
    model: Path,
    *,
    threads: int,
    workers: int,
    rounds: int,
    peer: str | None,
    report: Callable[[str, int, int], None],
) -> Sharing:
    """Measure `model`; `peer` is a side of `player.py` or None. Raises `PrismError` when a side cannot run."""
    together = Line("two processes of one thread over one alone", ">= 1.6")
    neighbour = Line(f"{threads} threads beside a busy process, speed kept", ">= 0.5")
    throughput = Line(f"{workers} workers, or slots in a batch: new tokens/s", "-")
    sides = ["prism", *([peer] if peer else [])]
    for number in range(rounds):
        for side in sides[:: -1 if number % 2 else 1]:
            report(f"{together.what}, {side}", number, rounds)
            _values(together, side).append(_together(side, model))
            report(f"{neighbour.what}, {side}", number, rounds)
            _values(neighbour, side).append(_beside_busy(side, model, threads))
    report(throughput.what, 0, 0)
    _throughput(throughput, model, workers, rounds, peer)
    return Sharing(str(model), threads, workers, rounds, [together, neighbour, throughput])


def _values(line: Line, side: str) -> list[float]:
    return line.prism if side == "prism" else line.peer


def _together(side: str, model: Path) -> float:
    with ExitStack() as stack:
        players = [Player(side, model, 1) for _ in range(2)]
        for player in players:
            stack.callback(player.close)
        alone = [player.ask(DECODE)["tokens_per_second"] for player in players]
        for player in players:
            player.tell(DECODE)
        both = [player.answer()["tokens_per_second"] for player in players]
    return float(sum(both) / median(alone))


def _beside_busy(side: str, model: Path, threads: int) -> float:
    with ExitStack() as stack:
        player = Player(side, model, threads)
        stack.callback(player.close)
        before = player.ask(DECODE)["tokens_per_second"]
        with busy_process():
            beside = player.ask(DECODE)["tokens_per_second"]
        after = player.ask(DECODE)["tokens_per_second"]
    return float(beside / median((before, after)))


def _throughput(line: Line, model: Path, workers: int, rounds: int, peer: str | None) -> None:
    """Ours and the peer's in turn; every prompt is new, so that nothing is reused."""
    from ops.bench.pool import pool_of
    from workers.main import DEFAULT_OPENER

    rng = np.random.default_rng(SEED)
    with ExitStack() as stack:
        bench, _ = stack.enter_context(pool_of(model, DEFAULT_OPENER, None, workers=workers))
        player = None
        if peer is not None:
            player = Player(peer, model, workers)
            stack.callback(player.close)
        for _ in range(rounds):
            prompts = rng.integers(0, bench.model.vocab_size, (WAVES * workers, PROMPT_TOKENS)).tolist()
            began = time.perf_counter()
            requests = [
                bench.client.submit(token_ids=prompt, max_tokens=NEW_TOKENS, temperature=0) for prompt in prompts
            ]
            # A stop token ends ours early: what counts is what was made.
            made = sum(request.result(timeout=600).usage["completion_tokens"] for request in requests)
            line.prism.append(made / (time.perf_counter() - began))
            if player is not None:
                order = {"do": "slots", "prompts": prompts, "tokens": NEW_TOKENS, "slots": workers}
                line.peer.append(len(prompts) * NEW_TOKENS / player.ask(order)["seconds"])
