"""An address that stays while the server behind it changes, as a load balancer, a DNS name or a moved IP would give."""

from __future__ import annotations

import contextlib
import socket
import threading


class Switch:
    """Forwards connections to `port`; `to` cuts the open ones and sends new ones elsewhere."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def to(self, port: int) -> None:
        with self._lock:
            self._port = port
            cut, self._open = self._open, set()
        for stream in cut:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.to(0)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._port), timeout=5)
                except OSError:
                    near.close()
                    continue
                far.settimeout(None)
                with self._lock:
                    self._open |= {near, far}
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for stream in (source, target):
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._open -= {source, target}
        source.close()
