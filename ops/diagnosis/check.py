"""One finding of the doctor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """`state` is good, warning or bad; `fix` says what to do, and is empty only if it is good."""

    name: str
    state: str
    finding: str
    fix: str = ""
