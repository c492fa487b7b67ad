"""`prism bench engine`: our engine and a peer, in turn, on the same file in the same run.

A shared machine changes its speed from minute to minute, so a number means little beside one of another run; the ratio
of two neighbours means much. Each round measures every side once, in an order that alternates; ratios are taken
within a round, and their median and range over the rounds are what is reported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from prism_core.errors import PrismError

PLAYER = Path(__file__).with_name("player.py")
ROOT = Path(__file__).parents[2]

MEASURES: dict[str, dict[str, Any]] = {
    "prefill 512": {"do": "prefill", "tokens": 512},
    "decode 128": {"do": "decode", "tokens": 128, "depth": 0},
    "decode 128 at 1000": {"do": "decode", "tokens": 128, "depth": 1000},
}
SHORT_MEASURES: dict[str, dict[str, Any]] = {
    "prefill 32": {"do": "prefill", "tokens": 32},
    "decode 8": {"do": "decode", "tokens": 8, "depth": 0},
}
"""For a peer that needs a second for a token."""


@dataclass
class Measure:
    """Tokens per second of each side, a list over rounds, for one kind of work."""

    name: str
    prism: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        return [ours / theirs for ours, theirs in zip(self.prism, self.peer, strict=False)]


@dataclass
class Report:
    """Everything that one run of the bench found."""

    model: str
    bytes: int
    threads: int
    rounds: int
    bandwidth_gb_s: list[float]
    measures: list[Measure]
    ready_seconds: dict[str, float]
    peak_bytes: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"ratios": {measure.name: measure.ratios for measure in self.measures}}

    def as_markdown(self) -> str:
        """A table for a README."""
        lines = [
            f"{Path(self.model).name}, {self.bytes / 1e6:.0f} MB, {self.threads} thread(s), {self.rounds} rounds; "
            f"read bandwidth {median(self.bandwidth_gb_s):.1f} GB/s; ready after "
            + ", ".join(f"{side} {seconds:.2f} s" for side, seconds in self.ready_seconds.items())
            + "; peak memory "
            + ", ".join(f"{side} {peak / 1e6:.0f} MB" for side, peak in self.peak_bytes.items()),
            "",
            "| work | prism tok/s | peer tok/s | ratio (range) | GB/s of weights | share of bandwidth |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        return "\n".join(lines + [self._row(measure) for measure in self.measures])

    def _row(self, measure: Measure) -> str:
        ours = median(measure.prism)
        peer = ratio = "-"
        if measure.peer:
            peer = f"{median(measure.peer):.1f}"
            ratio = f"{median(measure.ratios):.2f} ({min(measure.ratios):.2f}-{max(measure.ratios):.2f})"
        rate = share = "-"
        if measure.name.startswith("decode"):
            gigabytes = ours * self.bytes / 1e9
            rate, share = f"{gigabytes:.1f}", f"{100 * gigabytes / median(self.bandwidth_gb_s):.0f} %"
        return f"| {measure.name} | {ours:.1f} | {peer} | {ratio} | {rate} | {share} |"


class Player:
    """A measuring process; it idles, blocked on its standard input, while another one plays."""

    def __init__(self, side: str, model: Path, threads: int) -> None:
        python = (os.environ.get("PRISM_PEER_PYTHON") or sys.executable) if side != "prism" else sys.executable
        command = [python, str(PLAYER), side, str(model), str(threads)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self._side = side
        # A file, not a pipe: a side that logs much would block on a pipe that nobody reads.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the player
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment
        )
        self.ready_seconds = float(self.answer()["ready_seconds"])

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        self.tell(order)
        return self.answer()

    def tell(self, order: dict[str, Any]) -> None:
        """Begin an order without waiting; `answer` waits."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return dict(json.loads(line))
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        reason = lines[-1] if lines else f"exit code {self._process.returncode}"
        if "llama_cpp" in reason:
            reason += "; install the extra `bench`, or name an interpreter that has it in PRISM_PEER_PYTHON"
        raise PrismError(f"the bench's {self._side} side stopped: {reason}")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def bench_engine(
    model: Path,
    *,
    threads: int,
    rounds: int,
    peer: str | None,
    short: bool = False,
    report: Callable[[str, int, int], None],
) -> Report:
    """Measure `model`; `peer` is a side of `player.py` or None. Raises `PrismError` when a side cannot run."""
    from ops.bench.stream import read_bandwidth

    players: dict[str, Player] = {}
    try:
        for side in ("prism", peer):
            if side is not None:
                report(f"loading into {side}", 0, 0)
                players[side] = Player(side, model, threads)
        orders = SHORT_MEASURES if short else MEASURES
        measures = [Measure(name) for name in orders]
        bandwidth = []
        for number in range(rounds):
            bandwidth.append(read_bandwidth(threads))
            order = list(players.items())[:: -1 if number % 2 else 1]
            for measure in measures:
                report(measure.name, number, rounds)
                for side, player in order:
                    speed = player.ask(orders[measure.name])["tokens_per_second"]
                    (measure.prism if side == "prism" else measure.peer).append(speed)
        return Report(
            model=str(model),
            bytes=model.stat().st_size,
            threads=threads,
            rounds=rounds,
            bandwidth_gb_s=bandwidth,
            measures=measures,
            ready_seconds={side: player.ready_seconds for side, player in players.items()},
            peak_bytes={side: int(player.ask({"do": "memory"})["peak_bytes"]) for side, player in players.items()},
        )
    finally:
        for player in players.values():
            player.close()
