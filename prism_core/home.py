"""Where Prism keeps what it can make again: models, packed weights, compiled kernels, the embedded broker."""

from __future__ import annotations

import os
from pathlib import Path


def prism_home() -> Path:
    """`$PRISM_HOME`, or `~/.cache/prism`; not created here."""
    return Path(os.environ.get("PRISM_HOME") or "~/.cache/prism").expanduser()
