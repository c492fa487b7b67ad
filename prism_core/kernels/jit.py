"""The decorators of all kernels, and the cache that keeps their compiled code.

    device             a helper that is compiled into its callers (no signature, never cached by itself)
    kernel(signature)  a function that Python calls; the GIL is released inside
    entry(signature)   a function that other kernels call through its `address`

Compilation is lazy: it happens on the first call, or at the first reading of `address`.

Compiled code is kept in `$PRISM_HOME/numba/<digest>`, where the digest covers the text of every kernel source, the
versions of Python, Numba and LLVM, and the processor name and features that code is compiled for. So a change in any
kernel file, or another processor, can never meet stale code, and the entries of one folder are interchangeable: many
processes may fill it at once, each file is written whole or not at all. A file that cannot be read or fails its
checksum is compiled again; a folder that cannot be written costs the time to compile, never an error.

Not promised: that two processes never compile the same kernel twice. A lock makes the second wait for the first for
`LOCK_WAIT_S`, then it compiles for itself.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
from numba.core import sigutils
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target
from numba.core.serialize import dumps
from numba.core.typing.ctypes_utils import to_ctypes

from prism_core.home import prism_home

LOCK_WAIT_S = 60.0
KEEP_DAYS = 30
"""A folder of kernels that no process has used for this long is removed when another is begun."""

_OPTIONS: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy"}
_INLINED: dict[str, Any] = {**_OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

compiled: list[tuple[str, float]] = []
"""(name, seconds) of every kernel that this process compiled rather than loaded, in order."""


@functools.cache
def processor() -> tuple[str, str]:
    """(name, feature string) of the processor that Numba compiles for: the host's, unless NUMBA_CPU_* say otherwise."""
    _, name, features = cpu_target.target_context.codegen().magic_tuple()
    return str(name), str(features)


@functools.cache
def cache_folder() -> Path:
    """Where compiled kernels are kept; see the module's text. Not created here."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for source in sorted(folder.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    versions = (sys.version_info[:3], numba.__version__, llvm.llvm_version_info, processor(), numba.config.OPT)
    digest.update(repr(versions).encode())
    return prism_home() / "numba" / digest.hexdigest()[:24]


@functools.cache
def _text(file: str) -> bytes:
    """A source file outside this folder, such as a test's: its kernels are kept apart by what it says."""
    path = Path(file)
    return b"" if path.parent == Path(__file__).parent or not path.is_file() else path.read_bytes()


class _Stored:
    """The compiled form of one function on disk, in the shape that Numba's dispatchers expect of a cache."""

    def __init__(self, name: str, signature: str, function: Callable[..., Any]) -> None:
        digest = hashlib.sha256(signature.encode() + b"\0" + _text(function.__code__.co_filename))
        self._file = f"{name}-{digest.hexdigest()[:16]}.nbc"
        self.hit = False

    @property
    def path(self) -> Path:
        return cache_folder() / self._file

    @property
    def cache_path(self) -> str:
        return str(cache_folder())

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        target_context.refresh()
        try:
            content = self.path.read_bytes()
            digest, payload = content[:32], content[32:]
            if hashlib.sha256(payload).digest() != digest:
                return None
            result = CompileResult._rebuild(target_context, *pickle.loads(payload))
        except Exception:  # whatever is wrong with a cached file, compiling again is right
            return None
        self.hit = True
        return result

    def save_overload(self, signature: Any, result: Any) -> None:
        payload = dumps(result._reduce())
        with suppress(OSError):
            _write_whole(self.path, hashlib.sha256(payload).digest() + payload)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Hold this function's lock, if a file system has locks; waits at most `LOCK_WAIT_S` for another process."""
        if os.path.exists(self.path):  # unlike Path.exists, this says no where looking is refused
            yield
            return
        lock = _lock(self.path.with_suffix(".lock"))
        try:
            yield
        finally:
            if lock is not None:
                os.close(lock)


@functools.cache
def _use_folder() -> None:
    """Mark this process's folder as used today, and remove those that nobody has used for `KEEP_DAYS`."""
    folder = cache_folder()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        oldest = time.time() - KEEP_DAYS * 86400
        for other in folder.parent.iterdir():
            if other != folder and other.stat().st_mtime < oldest:
                shutil.rmtree(other, ignore_errors=True)


def _write_whole(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=path.stem, suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _lock(path: Path) -> int | None:
    """A locked descriptor, or None where there is none to be had in time. It ends with its process."""
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return None
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.02)
                continue
        except OSError:
            pass
        os.close(descriptor)
        return None


_names: set[str] = set()


def _named(function: Callable[..., Any], name: str | None) -> str:
    """Give a function the one name under which its code is kept; functions of a factory must bring their own."""
    if name is None and "<locals>" in function.__qualname__:
        raise ValueError(f"{function.__qualname__}: a kernel made inside a function needs name=, unique in its module")
    if name is not None:
        function.__name__ = function.__qualname__ = name
    full = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"
    if full in _names:
        raise ValueError(f"{full}: two kernels have this name")
    _names.add(full)
    return full


def _timed(name: str, stored: _Stored, build: Callable[[], Any]) -> Any:
    _use_folder()
    with stored.compiling():
        begin = time.perf_counter()
        result = build()
        if not stored.hit:
            compiled.append((name, time.perf_counter() - begin))
    return result


def device(function: Callable[..., Any]) -> Any:
    """A helper that is inlined into the kernels that call it."""
    return numba.njit(forceinline=True, **_INLINED)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """A helper that becomes part of its caller before anything is compiled: for large ones with a single caller."""
    return numba.njit(inline="always", **_INLINED)(function)


def kernel(signature: str, *, name: str | None = None, fastmath: Any = False) -> Callable[[Callable[..., Any]], Any]:
    """A function for Python, compiled for exactly `signature` at its first call. It has `.warm()` to do so earlier."""

    def decorate(function: Callable[..., Any]) -> Any:
        full = _named(function, name)
        stored = _Stored(full, signature, function)
        dispatcher = numba.njit(fastmath=fastmath, **_OPTIONS)(function)
        dispatcher._cache = stored

        def warm(*_arguments: Any, **_keywords: Any) -> Any:
            return _timed(full, stored, lambda: dispatcher.compile(signature))

        dispatcher._compile_for_args = warm
        dispatcher.warm = warm
        return dispatcher

    return decorate


class Entry:
    """A kernel that is called through its address. Calling the object itself goes through ctypes, GIL released."""

    def __init__(self, function: Callable[..., Any], signature: str, name: str, fastmath: Any) -> None:
        self.name = name
        self.signature = signature
        self.function = function
        self._options = {**_OPTIONS, "fastmath": fastmath}
        self._compiled: Any = None
        self._mutex = threading.Lock()

    def _build(self) -> Any:
        if self._compiled is None:
            with self._mutex:
                if self._compiled is None:
                    stored = _Stored(self.name, self.signature, self.function)
                    signature = sigutils.normalize_signature(self.signature)
                    function: Any = CFunc(self.function, signature, locals={}, options=self._options)
                    function._cache = stored
                    _timed(self.name, stored, function.compile)
                    self._compiled = function
        return self._compiled

    def warm(self) -> None:
        """Compile now, or load from the cache."""
        self._build()

    @property
    def address(self) -> int:
        """The address of the compiled function, valid while this object lives."""
        return int(self._build().address)

    @functools.cached_property
    def _ctypes(self) -> Any:
        arguments, result = sigutils.normalize_signature(self.signature)
        prototype = ctypes.CFUNCTYPE(to_ctypes(result), *[to_ctypes(argument) for argument in arguments])
        return prototype(self.address)

    def __call__(self, *arguments: float) -> Any:
        return self._ctypes(*arguments)


def entry(signature: str, *, name: str | None = None, fastmath: Any = False) -> Callable[[Callable[..., Any]], Entry]:
    """A function that is called by address, such as `void(int64, int64)`; it must not raise."""

    def decorate(function: Callable[..., Any]) -> Entry:
        return Entry(function, signature, _named(function, name), fastmath)

    return decorate
