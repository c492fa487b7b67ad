"""A network between a worker and its broker that a test can cut: bytes stop both ways, connections stay open."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path


class Cable:
    """Listens on a TCP port and carries bytes to and from a Unix socket, unless it is cut."""

    def __init__(self, server: Path) -> None:
        self._server = server
        self._whole = threading.Event()
        self._whole.set()
        self._closed = False
        self._ends: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """From now on nothing arrives anywhere; neither side is told."""
        self._whole.clear()

    def mend(self) -> None:
        """What was held back arrives, late."""
        self._whole.set()

    def close(self) -> None:
        self._closed = True
        self._whole.set()
        for end in (self._listener, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            far.connect(str(self._server))
            self._ends |= {near, far}
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._whole.wait()
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
