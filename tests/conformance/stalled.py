"""A disk that stalls in fsync, for one server: its fsync thread is held still, everything else goes on.

Linux only: the thread is stopped with ptrace, which a process may use on its own children.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from tests.brokers import PrivateBroker
from tests.pool import wait_for

SEIZE, INTERRUPT = 0x4206, 0x4207
WALL = 0x40000000


class StalledDisk:
    """The disk under `broker` stalls from now on, until `kill_broker`. Use it on one thread: ptrace is bound to it."""

    def __init__(self, broker: PrivateBroker) -> None:
        """OSError if this system does not allow it."""
        assert broker.process is not None
        self._broker = broker
        tasks = Path(f"/proc/{broker.process.pid}/task")
        found = [int(task.name) for task in tasks.iterdir() if (task / "comm").read_text().strip() in NAMES]
        if not found:
            raise OSError("this server names its fsync thread otherwise")
        self._thread = found[0]
        for request in (SEIZE, INTERRUPT):
            if _ptrace(ctypes.c_long(request), ctypes.c_long(self._thread), None, None) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        os.waitpid(self._thread, WALL)

    def wait_for_fsync(self) -> None:
        """Until an fsync has begun, which now never ends: for 2 s the server writes nothing to its file."""
        with self._broker.client() as client:

            def begun() -> bool:
                client.incr("stalled-disk")
                return client.info("persistence")["aof_pending_bio_fsync"] > 0

            wait_for(begun, "an fsync to begin", 10)

    def kill_broker(self) -> None:
        """SIGKILL. What the server had not handed to the system is lost."""
        process = self._broker.process
        assert process is not None
        process.kill()
        os.waitpid(self._thread, WALL)
        process.wait()


NAMES = ("bio_aof", "bio_aof_fsync")
_ptrace = ctypes.CDLL(None, use_errno=True).ptrace
