"""Where Prism keeps what it can make again: models, packed weights, compiled kernels, the embedded broker."""

from __future__ import annotations

import os
from pathlib import Path

from prism_core.errors import InvalidRequest


def prism_home() -> Path:
    """`$PRISM_HOME`, or `~/.cache/prism`; not created here.

    Raises InvalidRequest where there is neither: a process without HOME whose user the system does not know.
    """
    named = os.environ.get("PRISM_HOME") or "~/.cache/prism"
    try:
        return Path(named).expanduser()
    except RuntimeError as error:
        raise InvalidRequest(f"{named!r} has no home directory to stand for ~: set PRISM_HOME to a folder") from error
