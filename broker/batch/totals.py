"""Counts of a batch: lines, tokens, and how fast they come.

Kept: `Totals` counts recorded lines only, so it can be made again from the output at any time. `Speed` looks at a
window of the last seconds, so that an estimate follows the pool as it is now.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Progress", "Speed", "Totals", "facts_of"]

WINDOW_S = 30.0


@dataclass
class Totals:
    """Recorded lines and their tokens."""

    lines: int
    done: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def left(self) -> int:
        return self.lines - self.done - self.failed

    def add(self, ok: bool, usage: dict[str, Any]) -> None:
        """Counts one line; `usage` as in its answer."""
        if ok:
            self.done += 1
        else:
            self.failed += 1
        self.prompt_tokens += _count(usage, "prompt_tokens")
        self.completion_tokens += _count(usage, "completion_tokens")
        self.cached_tokens += _count(usage.get("prompt_tokens_details"), "cached_tokens")
        self.reasoning_tokens += _count(usage.get("completion_tokens_details"), "reasoning_tokens")

    def usage(self) -> dict[str, Any]:
        """In the form of OpenAI's batch object."""
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(frozen=True)
class Progress:
    """A batch now."""

    totals: Totals
    running: int
    """Lines submitted and not recorded."""
    tokens: int
    """Tokens generated, those of running lines included."""
    tokens_per_s: float
    lines_per_s: float
    eta_s: float | None
    """Seconds until the last line, as things go; None before anything is known."""
    waiting_for: str = ""
    """What holds the batch up, such as the broker."""

    def facts(self) -> dict[str, str | int]:
        """What the pool is told of it."""
        return {
            **facts_of(self.totals),
            "running": self.running,
            "tokens_per_s": f"{self.tokens_per_s:.1f}",
            "lines_per_s": f"{self.lines_per_s:.3f}",
            "eta_s": "" if self.eta_s is None else round(self.eta_s),
            "waiting_for": self.waiting_for,
        }


@dataclass
class Speed:
    """Rates over the last seconds."""

    clock: Callable[[], float] = time.monotonic
    window_s: float = WINDOW_S
    _seen: deque[tuple[float, int, int]] = field(default_factory=deque)

    def look(self, lines: int, tokens: int) -> tuple[float, float]:
        """Lines and tokens per second, from counts that only grow (or are taken back when a try is repeated)."""
        now = self.clock()
        self._seen.append((now, lines, tokens))
        while len(self._seen) > 2 and now - self._seen[1][0] >= self.window_s:
            self._seen.popleft()
        since, first_lines, first_tokens = self._seen[0]
        seconds = now - since
        if seconds <= 0:
            return 0.0, 0.0
        return max(0, lines - first_lines) / seconds, max(0, tokens - first_tokens) / seconds


def facts_of(totals: Totals) -> dict[str, str | int]:
    """What the pool keeps of a batch's counts."""
    names = ("done", "failed", "prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens")
    return {"total": totals.lines, **{name: getattr(totals, name) for name in names}}


def _count(usage: Any, name: str) -> int:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
