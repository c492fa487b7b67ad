"""Renders chat templates in a child process that can be stopped.

Invariant: `render` returns or raises within WALL_SECONDS and a start of the child, whatever the template does, and the
calling process neither runs the template's code nor holds its intermediate strings. One child serves one process; it is
started on first use (or by `warm`), and again after it had to be killed.
Not promised: more than one rendering at a time; callers in several threads wait for each other.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any, Final

from prism_core.errors import InvalidRequest, PrismError

CPU_SECONDS: Final = 1.5
MEMORY_BYTES: Final = 512 * 1024 * 1024
MAX_OUTPUT_CHARS: Final = 4 * 1024 * 1024
START_SECONDS: Final = 60.0
WALL_SECONDS: Final = 10.0  # the limit of CPU time comes first, unless the machine is overloaded
MAX_REPLY_BYTES: Final = 128 * 1024 * 1024
_CHUNK: Final = 1 << 20
_PASSED_ON: Final = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_TIME", "TZ")


class _ChildGone(Exception):
    """The child has closed its pipe."""


class Renderer:
    """The template process of this process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._ready = False

    def warm(self) -> None:
        """Starts the child without waiting for it, so that the first rendering finds it ready."""
        with self._lock:
            self._start()

    def render(
        self, source: str, variables: Mapping[str, Any], overrides: Sequence[Mapping[str, Any]], now: float
    ) -> list[str | InvalidRequest]:
        """For each override a rendering with `variables` and it, or the error that this rendering met.

        InvalidRequest if the variables are no JSON, or the template ran out of its time or memory.
        """
        try:
            body = json.dumps({"source": source, "variables": variables, "overrides": overrides, "now": now}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"messages and template variables must be JSON values: {error}") from None
        with self._lock:
            self._start()
            try:
                replies = self._exchange(body)
            except BaseException:
                self._stop()  # mid-frame, nothing can follow
                raise
            if any(reply.get("error") == "memory" for reply in replies):
                self._stop()  # what is left of its heap cannot be trusted with another request
        return [reply["text"] if "text" in reply else _refusal(reply) for reply in replies]

    def close(self) -> None:
        """Ends the child; the next `render` starts another."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        if self._child is not None and self._owner == os.getpid() and self._child.poll() is None:
            return
        if self._owner == os.getpid():
            self._stop()
        # isolated: neither the environment nor the current folder chooses what is imported, no secret in the
        # environment is passed on, and the terminal's signals go past it
        script = str(Path(__file__).with_name("sandbox.py"))
        limits = [str(CPU_SECONDS), str(MEMORY_BYTES), str(MAX_OUTPUT_CHARS)]
        self._child = subprocess.Popen(
            [sys.executable, "-IB", script, *limits, *_folders_of("jinja2", "markupsafe")],
            env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
        self._owner = os.getpid()
        self._ready = False
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is None or self._owner != os.getpid():
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()

    def _exchange(self, body: bytes) -> list[dict[str, str]]:
        child = self._child
        assert child is not None
        try:
            if not self._ready:
                self._receive(time.monotonic() + START_SECONDS)
                self._ready = True
        except (_ChildGone, TimeoutError):
            raise PrismError(f"the template process did not start: {sys.executable} ended or hung") from None
        try:
            deadline = time.monotonic() + WALL_SECONDS
            self._send(struct.pack("<I", len(body)) + body, deadline)
            replies: list[dict[str, str]] = self._receive(deadline)
            return replies
        except TimeoutError:
            raise InvalidRequest(f"the model's chat template ran for more than {WALL_SECONDS:g} s") from None
        except _ChildGone:
            if self._ended(child) == -signal.SIGPROF:
                raise InvalidRequest(
                    f"the model's chat template used more than {CPU_SECONDS:g} s of processor time"
                ) from None
            raise InvalidRequest("the model's chat template crashed the process it ran in") from None

    @staticmethod
    def _ended(child: subprocess.Popen[bytes]) -> int | None:
        """Its exit code; None if it closed its pipe and lives on, until `_stop`."""
        try:
            return child.wait(timeout=WALL_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def _send(self, data: bytes, deadline: float) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        view = memoryview(data)
        while view:
            self._wait(self._child.stdin.fileno(), selectors.EVENT_WRITE, deadline)
            try:
                view = view[os.write(self._child.stdin.fileno(), view[:_CHUNK]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise _ChildGone from None

    def _receive(self, deadline: float) -> Any:
        size = struct.unpack("<I", self._take(4, deadline))[0]
        if size > MAX_REPLY_BYTES:  # the child waits for a reader, and is ended by whoever gets this
            raise InvalidRequest(
                f"the renderings of the chat take {size} bytes together; {MAX_REPLY_BYTES} are accepted"
            )
        return json.loads(self._take(size, deadline))

    def _take(self, count: int, deadline: float) -> bytes:
        assert self._child is not None
        assert self._child.stdout is not None
        parts: list[bytes] = []
        while count:
            self._wait(self._child.stdout.fileno(), selectors.EVENT_READ, deadline)
            try:
                part = os.read(self._child.stdout.fileno(), min(count, _CHUNK))
            except BlockingIOError:
                continue
            if not part:
                raise _ChildGone
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    @staticmethod
    def _wait(fd: int, event: int, deadline: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(fd, event)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError


def _folders_of(*packages: str) -> list[str]:
    """Where the packages that the script needs are found by this process."""
    specs = [find_spec(package) for package in packages]
    return sorted({str(Path(spec.origin).parents[1]) for spec in specs if spec is not None and spec.origin})


def _refusal(reply: Mapping[str, str]) -> InvalidRequest:
    kind, message = reply.get("error"), reply.get("message", "")
    if kind == "refused":
        return InvalidRequest(f"the model's chat template refuses these messages: {message}")
    if kind == "length":
        return InvalidRequest(f"the rendered chat is longer than {MAX_OUTPUT_CHARS} characters")
    if kind == "memory":
        return InvalidRequest(f"the model's chat template needed more than {MEMORY_BYTES >> 20} MiB of memory")
    if kind == "syntax":
        return InvalidRequest(f"the model's chat template has a syntax error in {message}")
    return InvalidRequest(f"the model's chat template failed: {message}")


_RENDERER = Renderer()
atexit.register(_RENDERER.close)


def shared_renderer() -> Renderer:
    """The one renderer of this process."""
    return _RENDERER
