"""`prism doctor`: checks that name their fix."""

from __future__ import annotations

from typing import Annotated

import typer

from ops.cli import options
from ops.cli.output import print_json, progress
from ops.diagnosis import Check, diagnose


def doctor(
    redis_url: options.RedisUrl = None,
    compile_model: Annotated[
        str | None, typer.Option("--compile", metavar="MODEL", help="Also fill the caches for this model.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Check Python, CPU, caches, models, broker and pool, and say what to do about each problem."""
    with progress() as report:
        checks = diagnose(redis_url, compile_model, report)
    if as_json:
        print_json([check.__dict__ for check in checks])
    else:
        for check in checks:
            print(_line(check))
    if any(check.state == "bad" for check in checks):
        raise typer.Exit(1)


def _line(check: Check) -> str:
    mark = {"good": "ok  ", "warning": "warn", "bad": "BAD "}[check.state]
    return f"{mark} {check.name}: {check.finding}" + (f"\n     fix: {check.fix}" if check.fix else "")
