"""OpenAI's batch object: what is stored of it, how it changes, and how it is shown.

Kept: `status` takes OpenAI's values only, moves forward only, and each step has its time. A cancellation lies beside
the record, so that a gateway may write it while the batch's runner writes the record.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from broker.batch.errors import Problem
from broker.batch.totals import Totals

__all__ = ["FINAL", "new_record", "problems_of", "shown", "step"]

Record = dict[str, Any]

FINAL = ("completed", "failed", "cancelled", "expired")

_TIMES = (
    *("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at"),
)
_SHOWN = (
    *("id", "endpoint", "input_file_id", "completion_window", "status", "created_at", "expires_at", *_TIMES),
    *("errors", "metadata", "request_counts", "usage", "model", "output_file_id", "error_file_id"),
)


def new_record(
    name: str,
    *,
    endpoint: str,
    input_file: str,
    window: str,
    expires_at: int,
    files: tuple[str, str],
    metadata: Mapping[str, str] | None,
    keep_s: int | None,
) -> Record:
    """files: ids that the output and the errors will have. keep_s: for how long these are kept."""
    return {
        "id": name,
        "endpoint": endpoint,
        "input_file_id": input_file,
        "completion_window": window,
        "status": "validating",
        "created_at": int(time.time()),
        "expires_at": expires_at,
        "metadata": dict(metadata) if metadata is not None else None,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "files": list(files),
        "keep_s": keep_s,
    }


def step(record: Record, status: str) -> None:
    """The batch has come to `status`; coming again changes nothing."""
    record["status"] = status
    record.setdefault(f"{status}_at", int(time.time()))


def count(record: Record, totals: Totals) -> None:
    """The counts are these now."""
    record["request_counts"] = {"total": totals.lines, "completed": totals.done, "failed": totals.failed}
    record["usage"] = totals.usage()


def problems_of(problems: list[Problem]) -> dict[str, Any]:
    """The `errors` of a batch that failed."""
    data = [
        {"code": problem.code, "line": problem.line, "message": problem.message, "param": problem.param}
        for problem in problems
    ]
    return {"object": "list", "data": data}


def shown(record: Record, cancelled_at: int | None) -> dict[str, Any]:
    """The object for clients. `cancelled_at`: when somebody asked for its cancellation."""
    seen: dict[str, Any] = {"object": "batch", **{name: record.get(name) for name in _SHOWN}}
    if record["status"] not in FINAL:
        if cancelled_at is not None:
            seen |= {"status": "cancelling", "cancelling_at": cancelled_at}
        # Not OpenAI's: what is finished so far can be read under these ids.
        seen["partial_output_file_id"], seen["partial_error_file_id"] = record["files"]
    elif cancelled_at is not None and record["status"] == "cancelled":
        seen["cancelling_at"] = cancelled_at
    return seen
