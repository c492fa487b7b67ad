"""Which line is fed next, so that each worker has a few, and lines that begin alike meet the same worker.

A lane is what one worker is kept busy with: it works through portions of a family, of which only `window` lines are in
the pool at a time. All lines of a portion bear its group, so the pool sends them to one worker; there is one lane more
than workers, so that a worker that becomes idle finds a whole group that nobody has. Portions get smaller towards the
end, so that the workers end together. Kept: each line that waits is given out once. It does no input or output.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator

from broker.batch.plan import Plan
from broker.batch.prefix import ALONE

__all__ = ["Lanes"]

PORTION = 16
"""Most lines of one group."""


class Lanes:
    """The lines of `plan` that are not finished, in the plan's order."""

    def __init__(self, plan: Plan, is_open: Callable[[int], bool], left: int, window: int) -> None:
        """is_open: whether a line has still to be run. left: how many have. window: lines in the pool for each lane."""
        self._plan = plan
        self._waiting = (index for index in plan.order if is_open(index))
        self._peeked: int | None = None
        self._left = left
        self._window = window
        self._workers = 1
        self._lanes: list[_Lane] = []
        self._lane_of: dict[int, _Lane] = {}

    def serve(self, workers: int) -> None:
        """The pool has this many workers now."""
        self._workers = max(1, workers)

    @property
    def capacity(self) -> int:
        """Lines that may be in the pool at once."""
        return self._window * (self._workers + 1)

    def next(self) -> tuple[int, str] | None:
        """(index, group) of a line to submit now; the group is empty for a line without kin. None: wait."""
        if len(self._lane_of) >= self.capacity:
            return None
        lane = min(self._ready(), key=lambda lane: lane.running, default=None)
        if lane is None:
            return None
        index = lane.lines.popleft()
        lane.running += 1
        self._lane_of[index] = lane
        return index, lane.group

    def ended(self, index: int) -> None:
        """The line, if it was given out here, is not in the pool any more."""
        lane = self._lane_of.pop(index, None)
        if lane is not None:
            lane.running -= 1

    def _ready(self) -> Iterator[_Lane]:
        """Lanes with room and a line to give."""
        wanted = self._workers + 1
        self._lanes = [lane for lane in self._lanes if lane.lines or lane.running]
        for lane in self._lanes:
            if not lane.lines and lane.running < self._window:
                self._fill(lane)
        while len(self._lanes) < wanted:
            lane = _Lane()
            if not self._fill(lane):
                break
            self._lanes.append(lane)
        return (lane for lane in self._lanes if lane.lines and lane.running < self._window)

    def _fill(self, lane: _Lane) -> bool:
        """The next portion: lines of one family, or some that have none."""
        first = self._take()
        if first is None:
            return False
        family = self._plan.families[first]
        lane.lines.append(first)
        lane.group = "" if family == ALONE else f"g{self._plan.batch}-{first + 1}"
        size = min(PORTION, math.ceil(self._left / (2 * self._workers)))
        self._left -= 1
        while len(lane.lines) < size:
            index = self._take()
            if index is None:
                break
            if self._plan.families[index] != family:
                self._peeked = index
                break
            lane.lines.append(index)
            self._left -= 1
        return True

    def _take(self) -> int | None:
        index, self._peeked = self._peeked, None
        return next(self._waiting, None) if index is None else index


class _Lane:
    """One lane's portion."""

    def __init__(self) -> None:
        self.lines: deque[int] = deque()
        self.group = ""
        self.running = 0
