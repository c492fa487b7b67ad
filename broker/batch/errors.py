"""What can be wrong with a batch. All are `PrismError`; each text is one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prism_core.errors import InvalidRequest, PrismError

__all__ = ["BadFile", "BadLine", "Busy", "FilesFailed", "HeldElsewhere", "Interrupted", "LeaseLost", "Problem"]


MAX_CHARS = 500


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with an input file."""

    line: int | None
    """From 1; None for the file as a whole."""
    code: str
    message: str
    param: str | None = None

    def __post_init__(self) -> None:
        """What came from the file is shown, so it is made text that can be."""
        for name in ("code", "message", "param"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, value[:MAX_CHARS].encode(errors="replace").decode())

    def __str__(self) -> str:
        return self.message if self.line is None else f"line {self.line}: {self.message}"


class BadLine(InvalidRequest):
    """A line that is no request; its number is known to whoever reads the file."""

    def __init__(self, message: str, code: str = "invalid_line", param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param

    def at(self, line: int) -> Problem:
        return Problem(line, self.code, str(self), self.param)


class BadFile(InvalidRequest):
    """An input file of which nothing is run. `problems` holds the first ones, `total` counts all."""

    def __init__(self, problems: Sequence[Problem], total: int | None = None) -> None:
        self.problems = list(problems)
        self.total = len(self.problems) if total is None else total
        more = f" (and {self.total - 1} more)" if self.total > 1 else ""
        super().__init__(f"{self.problems[0]}{more}")


class Busy(PrismError):
    """Another process has the batch's files open for writing."""


class FilesFailed(PrismError):
    """A file of the batch cannot be read or written, or is not what it should be."""


class HeldElsewhere(PrismError):
    """A runner on another machine holds the batch's lease."""


class LeaseLost(PrismError):
    """Another runner has taken the batch: this one must write nothing more."""


class Interrupted(PrismError):
    """The runner was told to stop before the batch was over; it can be resumed."""
