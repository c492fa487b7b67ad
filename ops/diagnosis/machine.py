"""This machine: Python, processor, memory of the home folder, models, limits, environment."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from broker.keys import RQ
from ops.diagnosis.check import Check
from ops.models import local_models, resolve
from prism_core.errors import PrismError
from prism_core.home import prism_home

FREE_BYTES = 2 << 30
LEAST_FILES = 1024
"""Sockets of a gateway with some 300 streams, with room to spare."""
MOST_FILES = 1 << 20
"""Beyond it, programs that walk over all descriptors before they start another take seconds for it."""
GOOD_FILES = 65_536


def checks() -> list[Check]:
    """All of this machine that needs no broker."""
    return [
        _python(),
        _cpu(),
        _home(),
        _models(),
        open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        environment(os.environ),
    ]


def usable_cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """Cores that this process may use at once: its affinity, or the quota of its container if that is less."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        quota, period = cpu_max.read_text().split()
        return min(cores, int(quota) / int(period))
    except (OSError, ValueError):  # no such limit, or "max"
        return cores


def open_files(soft: int, hard: int) -> Check:
    """The limit of open files: too low starves a gateway, a huge one makes starting programs slow."""
    text = f"{_limit(soft)} allowed, {_limit(hard)} at most"
    if soft == resource.RLIM_INFINITY or soft > MOST_FILES:
        return Check("files", "warning", text, f"set a limit that can be walked over: ulimit -n {GOOD_FILES}")
    if soft < LEAST_FILES:
        return Check("files", "warning", text, f"ulimit -n {GOOD_FILES} (systemd: LimitNOFILE={GOOD_FILES})")
    return Check("files", "good", text)


def environment(variables: Mapping[str, str]) -> Check:
    """Variables that would keep a worker from starting."""
    prefix = variables.get("RQ_KEY_PREFIX")
    if prefix is not None and prefix != RQ:
        return Check(
            "environment", "bad", f"RQ_KEY_PREFIX is {prefix!r}, and workers need {RQ!r}", "unset RQ_KEY_PREFIX"
        )
    ours = sorted(name for name in variables if name.startswith("PRISM_"))
    return Check("environment", "good", ", ".join(ours) + " set" if ours else "no PRISM_ variable is set")


def home(folder: Path, free_bytes: int) -> Check:
    """Room for models, compiled kernels and the embedded broker's log."""
    text = f"{folder}, {free_bytes / 1e9:.1f} GB free"
    if free_bytes < FREE_BYTES:
        return Check("home", "warning", text, f"free some space: {FREE_BYTES >> 30} GB at least")
    return Check("home", "good", text)


def compiled(model: str) -> Check:
    """Fills the caches (compiled kernels, packed weights) by one token of `model`."""
    import prism_core

    began = time.monotonic()
    try:
        with prism_core.open_model(resolve(model)) as opened:
            decoder = opened.decoder()
            runtime = prism_core.Runtime(decoder, prism_core.Limits(opened.context_tokens, 0, 8 << 30))
            runtime.generate([0, 0], prism_core.Generation(2))
    except PrismError as error:
        return Check("compile", "bad", str(error), "use a model that prism models inspect says runs")
    return Check("compile", "good", f"caches for {model} are filled ({time.monotonic() - began:.1f} s)")


def _python() -> Check:
    found = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    return Check("python", "good", found)


def _cpu() -> Check:
    from prism_core.kernels.target import target

    found = target()
    features = [name for name, value in vars(found).items() if value is True] or ["no vector extension"]
    text = f"{usable_cores():g} usable core(s), kernels for {found.arch} with {', '.join(features)}"
    if found.arch == "x86_64" and not found.avx2:
        return Check("cpu", "warning", text, "use a CPU with AVX2: without it the kernels are several times slower")
    return Check("cpu", "good", text)


def _home() -> Check:
    folder = prism_home()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
        return home(folder, shutil.disk_usage(folder).free)
    except OSError as error:
        return Check("home", "bad", f"{folder}: {error.strerror}", "set PRISM_HOME to a folder that you can write to")


def _models() -> Check:
    here = [model.name for model in local_models()]
    if not here:
        return Check("models", "warning", "none has been pulled", "prism models pull smollm2-135m")
    return Check("models", "good", ", ".join(here))


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
