"""How much memory a process may use here: the machine's, or its container's where that is less.

Not promised: that so much is free now. `memory_bytes` is what a model is held against when nobody states a
budget, so that a file which declares enormous states is refused with a sum rather than ended by the system in the
middle of a request.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Of version 2 and of version 1."""


def require_room(nbytes: int) -> None:
    """Raise MemoryError where the system would refuse so much memory now.

    For what is about to call a library that ends the process, and raises nothing, when memory is refused to it.
    """
    try:
        mmap.mmap(-1, nbytes).close()
    except (OSError, OverflowError) as error:
        raise MemoryError(f"the system refuses {nbytes:,} bytes of memory") from error


def memory_bytes(limits: tuple[Path, ...] = CGROUP_LIMITS) -> int | None:
    """Physical memory in bytes, or the control group's limit if that is smaller; None where neither is known."""
    known: list[int] = []
    with suppress(AttributeError, OSError, ValueError):
        known.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in limits:
        with suppress(OSError, ValueError):  # no such group, or "max"
            known.append(int(path.read_text()))
    return min((count for count in known if count > 0), default=None)
