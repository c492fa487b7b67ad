"""What `prism doctor` looks at: the machine, the broker, the pool. Each check gives one finding and never raises.

A check is a function of facts (`clock(skew_s, round_trip_s)`), so that every finding can be met in a test; the
functions that collect the facts stand beside them.
"""

from __future__ import annotations

from collections.abc import Callable

from ops.diagnosis import broker, machine
from ops.diagnosis.check import Check

__all__ = ["Check", "diagnose"]

Progress = Callable[[str, int, int], None]


def diagnose(redis_url: str | None, compile_model: str | None, report: Progress) -> list[Check]:
    """Every check, in the order in which things must work."""
    checks = machine.checks()
    report("asking the broker", 0, 0)
    checks += broker.checks(redis_url)
    if compile_model is not None:
        report(f"compiling for {compile_model}", 0, 0)
        checks.append(machine.compiled(compile_model))
    return checks
