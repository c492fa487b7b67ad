"""The guardian of an embedded broker: a small detached process that owns one server and outlives whoever started it.

    python -E -S guardian.py FOLDER SOCKET SERVER IDLE_S

Kept: at most one server runs in FOLDER, because a server inherits the lock on `server.lock` and holds it for exactly as
long as it lives; at most one guardian, which holds `guardian.lock`. While any process holds `users.lock` (shared), a
dead server is started again; after IDLE_S without one, the server is stopped and the guardian ends. A server that has
lost its guardian to a SIGKILL is adopted by the next one. When FOLDER is removed, the server is killed. Imports only
the standard library, so that it starts in milliseconds. Not promised: anything about a server that is alive but does
not answer. It is left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import select
import signal
import socket as sockets
import subprocess
import sys
import time
from types import FrameType

__all__ = ["CONFIG_LINES", "Guardian", "ask", "configuration", "lock_file"]

TICK_S = 0.25
START_S = 30.0
BACK_OFF_S = (0.0, 0.1, 0.3, 1.0, 3.0)
LOG_BYTES = 4 << 20

CONFIG_LINES = (
    "port 0",
    "unixsocketperm 700",
    "daemonize no",
    "databases 1",
    "appendonly yes",
    "appendfsync everysec",
    'save ""',
    "maxmemory-policy noeviction",
    "client-output-buffer-limit pubsub 64mb 16mb 60",
)


def configuration(folder: str, socket: str) -> str:
    """The server's configuration file: local, durable, and never evicting."""
    paths = [f'dir "{folder}"', f'unixsocket "{socket}"', f'logfile "{os.path.join(folder, "server.log")}"']
    return "\n".join([*CONFIG_LINES, *paths, ""])


def lock_file(path: str, kind: int, *, wait_s: float = 0.0) -> int | None:
    """An open descriptor that holds the flock `kind` on `path`, or None if others held it for all of `wait_s`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                return None
            time.sleep(0.01)


def ask(socket: str, *words: str, timeout_s: float = 1.0) -> str:
    """First line (or string) of the server's answer to one command; OSError if there is none."""
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as stream:
        stream.settimeout(timeout_s)
        stream.connect(socket)
        parts = [f"${len(word.encode())}\r\n{word}\r\n" for word in words]
        stream.sendall(f"*{len(words)}\r\n{''.join(parts)}".encode())
        answer = stream.makefile("rb")
        line = answer.readline().decode(errors="replace").strip()
        if line.startswith("$") and line != "$-1":
            return answer.read(int(line[1:])).decode(errors="replace")
        if not line:
            raise ConnectionError("the server closed the connection")
        return line


class Guardian:
    """Owner of the server in one folder. `run` returns when it is no longer needed."""

    def __init__(self, folder: str, socket: str, server: str, idle_s: float) -> None:
        self.folder, self.socket, self.server, self.idle_s = folder, socket, server, idle_s
        self.child: subprocess.Popen[bytes] | None = None
        self.stopping = False
        self._starts = 0

    def run(self) -> int:
        try:
            return self._guard()
        except FileNotFoundError:
            # The folder was removed: nobody can find this server any more, so it must not outlive its data.
            self._abandon()
            return 0

    def _guard(self) -> int:
        mine = lock_file(self._path("guardian.lock"), fcntl.LOCK_EX, wait_s=3.0)
        if mine is None:
            return 0
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        alone = lock_file(self._path("users.lock"), fcntl.LOCK_EX)
        if alone is not None:
            # We came late: whoever wanted a server has one by now, or is gone.
            os.close(alone)
            if not self._alive():
                return 0
        last_used = time.monotonic()
        while not self.stopping:
            if not self._alive():
                self._start()
            self._wait()
            alone = lock_file(self._path("users.lock"), fcntl.LOCK_EX)
            now = time.monotonic()
            if alone is None:
                last_used = now
                continue
            # A short visitor may have come and gone between two looks: it leaves its time on the file.
            since_visit = time.time() - os.stat(self._path("users.lock")).st_mtime
            if now - last_used >= self.idle_s and since_visit >= self.idle_s:
                # Nobody can come in while this lock is held: what starts next finds the socket gone and begins anew.
                self._stop()
                os.close(mine)
                return 0
            os.close(alone)
        self._stop()
        return 0

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True

    def _alive(self) -> bool:
        """A server holds its lock: our child, or one that an earlier guardian left."""
        if self.child is not None and self.child.poll() is not None:
            self.child = None
        held = lock_file(self._path("server.lock"), fcntl.LOCK_EX)
        if held is None:
            return True
        os.close(held)
        return False

    def _wait(self) -> None:
        """One tick, cut short by the end of our child."""
        if self.child is None:
            time.sleep(TICK_S)
        elif not _ends_within(self.child, TICK_S):
            self._starts = 0

    def _start(self) -> None:
        time.sleep(BACK_OFF_S[min(self._starts, len(BACK_OFF_S) - 1)])
        self._starts += 1
        lock = lock_file(self._path("server.lock"), fcntl.LOCK_EX)
        if lock is None:
            return
        log, config = self._path("server.log"), self._path("server.conf")
        if os.path.exists(log) and os.path.getsize(log) > LOG_BYTES:
            os.replace(log, log + ".1")
        with open(config, "w") as file:
            file.write(configuration(self.folder, self.socket))
        with open(log, "ab") as output:
            self.child = subprocess.Popen(
                [self.server, config],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.folder,
                start_new_session=True,
                pass_fds=(lock,),
            )
        os.close(lock)
        self._greet()

    def _greet(self) -> None:
        """Wait until the server answers and give its data their boot id, which lasts as long as they do."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.child is not None and self.child.poll() is None:
            try:
                if ask(self.socket, "SET", "prism:boot", secrets.token_hex(13), "NX") in ("+OK", "$-1"):
                    return
            except OSError:
                pass
            time.sleep(0.002)

    def _stop(self) -> None:
        with contextlib.suppress(OSError):
            ask(self.socket, "SHUTDOWN")
        deadline = time.monotonic() + 10.0
        while self._alive() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _abandon(self) -> None:
        with contextlib.suppress(OSError):
            ask(self.socket, "SHUTDOWN", "NOSAVE")
        if self.child is not None:
            self.child.kill()
            self.child.wait()


def _ends_within(child: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether a child has ended after at most so long. Where the kernel tells, nobody need ask 20 times a second."""
    handle = None
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(child.pid) if sys.platform == "linux" else None
    if handle is not None:
        try:
            select.select([handle], [], [], seconds)
        finally:
            os.close(handle)
        seconds = 0.0
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def main(arguments: list[str]) -> int:
    folder, socket, server, idle_s = arguments
    # The starter waits for this process only; its child belongs to nobody, so it leaves no zombie and gets no signals.
    if os.fork():
        os._exit(0)
    os.setsid()
    return Guardian(folder, socket, server, float(idle_s)).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
