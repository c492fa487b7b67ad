"""A headless Chromium, driven by its own protocol over a pipe: no driver, no library."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.pool import wait_for

LAUNCH = (
    "import fcntl, os, sys; ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]];"
    "[os.dup2(end, place) for end, place in zip(ends, (3, 4))]; os.execvp(sys.argv[3], sys.argv[3:])"
)
"""Puts the pipes where the protocol wants them, at 3 and 4, and becomes the browser."""
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_chromium() -> str:
    """The browser's program; an error that says what to install if there is none."""
    for name in NAMES:
        found = shutil.which(name)
        if found:
            return found
    raise RuntimeError("the browser tests need Chromium: install Debian's package 'chromium' (or run without --full)")


class Browser:
    """One browser with one page. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        program = find_chromium()
        read_end, self._write = os.pipe()
        self._read, write_end = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
        command = [program, *options, f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(read_end), str(write_end), *command],
            pass_fds=(read_end, write_end),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_end)
        os.close(write_end)
        self._numbers = itertools.count(1)
        self._buffer = b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, **params: Any) -> Any:
        """One command of the protocol and its answer; events in between are dropped."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if session := getattr(self, "_session", None):
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self) -> Any:
        while b"\0" not in self._buffer:
            part = os.read(self._read, 65536)
            assert part, "the browser has gone"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def reload(self) -> None:
        self.run("window.isOld = true")
        self.call("Page.reload")
        self.wait("!window.isOld && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            # A page that is being replaced has no values: asked again by `wait`.
            raise LookupError(str(result["exceptionDetails"])[:500])
        return result["result"].get("value")

    def wait(self, script: str, timeout_s: float = 30.0) -> Any:
        """The first true value of an expression."""

        def value() -> Any:
            try:
                return self.run(script)
            except (LookupError, AssertionError):
                return None

        return wait_for(value, f"{script} in the browser", timeout_s)

    def text(self, name: str) -> str:
        """What an element shows."""
        return str(self.run(f"document.getElementById({json.dumps(name)}).textContent"))

    def fill(self, name: str, value: str) -> None:
        self.run(f"document.getElementById({json.dumps(name)}).value = {json.dumps(value)}")

    def click(self, name: str) -> None:
        self.run(f"document.getElementById({json.dumps(name)}).click()")

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
