"""The `prism` command. Data goes to standard output, everything else to standard error."""

from __future__ import annotations

from ops.cli.app import main

__all__ = ["main"]
