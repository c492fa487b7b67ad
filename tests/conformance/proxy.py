"""Proxies between a client and a server that lose replies (the command is done, the client never hears of it), or hand
them on badly."""

from __future__ import annotations

import collections
import contextlib
import random
import socket
import threading
from pathlib import Path


class LossyProxy:
    """Listens on a Unix socket and forwards to another one; loses the reply of chosen script calls.

    Script calls (EVALSHA and EVAL) are counted from 1 over all connections. When the call numbered in `lose` has been
    answered by the server, the answer is thrown away and the client's connection closed. Each number is lost once.
    """

    def __init__(self, listen: Path, server: Path) -> None:
        self.calls = 0
        self.lose: set[int] = set()
        self.lost = 0
        self.names: list[bytes] = []
        self._server = server
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(listen))
        self._listener.listen(64)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        self.url = f"unix://{listen}"

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for stream in self._open:
                with contextlib.suppress(OSError):
                    stream.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """One connection: command by command, reply by reply (pub/sub connections do not come through here)."""
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with client, server:
            with self._lock:
                self._open |= {client, server}
            with contextlib.suppress(OSError, EOFError):
                server.connect(str(self._server))
                from_client, from_server = client.makefile("rb"), server.makefile("rb")
                while True:
                    command = read_value(from_client)
                    lose = self._count(command)
                    server.sendall(command)
                    reply = read_value(from_server)
                    if lose and not reply.startswith(b"-NOSCRIPT"):
                        self.lost += 1
                        return
                    self._give(client, reply)
            with self._lock:
                self._open -= {client, server}

    def _give(self, client: socket.socket, reply: bytes) -> None:
        """Hands a reply on; EOFError ends the connection."""
        client.sendall(reply)

    def _count(self, command: bytes) -> bool:
        name = command.split(b"\r\n", 3)[2].upper()
        if name not in (b"EVALSHA", b"EVAL"):
            return False
        with self._lock:
            self.calls += 1
            if self.calls in self.lose:
                self.lose.discard(self.calls)
                return True
        return False


class AbsentProxy(LossyProxy):
    """From command `leave_at` on, counted from 1, loses the replies of `commands` commands of any kind."""

    def __init__(self, listen: Path, server: Path) -> None:
        super().__init__(listen, server)
        self._due = self._left = 0

    def leave_at(self, command: int, *, commands: int) -> None:
        with self._lock:
            self._due, self._left = command, commands

    @property
    def back(self) -> bool:
        """Whether it was away and is not any more."""
        return self._due <= 0 and self._left == 0

    def _count(self, command: bytes) -> bool:
        with self._lock:
            self._due -= 1
            away = self._due <= 0 and self._left > 0
            self._left -= away
        return away


class RudeProxy(LossyProxy):
    """While `rude`, hands replies on in pieces, in part, not at all, or when the next command is there already."""

    def __init__(self, listen: Path, server: Path, dice: random.Random) -> None:
        super().__init__(listen, server)
        self.rude = False
        self.manners: collections.Counter[str] = collections.Counter()
        self._dice = dice

    def _give(self, client: socket.socket, reply: bytes) -> None:
        how = self._dice.choices(("whole", "pieces", "half", "none", "late"), (12, 2, 1, 1, 1))[0] if self.rude else ""
        self.manners[how] += 1
        at = self._dice.randrange(len(reply))
        if how == "pieces":
            client.sendall(reply[:at])
            client.sendall(reply[at:])
        elif how == "half":
            client.sendall(reply[:at])
            raise EOFError
        elif how == "none":
            raise EOFError
        else:
            if how == "late":
                client.recv(1, socket.MSG_PEEK)  # another command, or the end
            client.sendall(reply)


def read_value(stream: socket.SocketIO) -> bytes:  # type: ignore[valid-type]
    """The bytes of one RESP2 value, nested ones included; EOFError at the end."""
    line = stream.readline()  # type: ignore[attr-defined]
    if not line:
        raise EOFError
    kind, size = line[:1], line[1:-2]
    if kind == b"$" and int(size) >= 0:
        return bytes(line + stream.read(int(size) + 2))  # type: ignore[attr-defined]
    if kind == b"*":
        return bytes(line + b"".join(read_value(stream) for _ in range(max(0, int(size)))))
    return bytes(line)
