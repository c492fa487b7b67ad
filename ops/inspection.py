"""`prism models inspect`: a file's facts, whether it runs here, and why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prism_core.errors import ModelError
from prism_core.gguf import describe, open_gguf


def inspect_model(path: Path) -> dict[str, Any]:
    """The container's facts, then what the model layer adds; `runs` is false with `why_not` for a file we refuse.

    Only a file that runs is read to its end, for its identity: what is refused may claim any size.
    """
    with open_gguf(path, inspect=True) as file:
        report = describe(file)
    obstacles = report.pop("obstacles", [])
    try:
        import prism_core

        with prism_core.open_model(path) as model:
            facts = model.describe()
    except ModelError as error:
        return report | {"runs": False, "why_not": str(error), "obstacles": obstacles}
    report |= {key: value for key, value in facts.items() if key not in report or report[key] is None}
    return report | {"runs": True}
