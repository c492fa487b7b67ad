"""What `prism doctor` looks at. Each check is one function, returns one finding, and never raises."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ops.models import local_models, resolve
from prism_core.errors import PrismError
from prism_core.home import prism_home

FREE_BYTES = 2 << 30
SLOW_FLUSH_MS = 5.0

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Check:
    """One finding; `state` is good, warning or bad, and `fix` says what to do unless it is good."""

    name: str
    state: str
    finding: str
    fix: str = ""


def diagnose(redis_url: str | None, compile_model: str | None, report: Progress) -> list[Check]:
    """Every check, in the order in which things must work."""
    checks = [_python(), _cpu(), _home(), _models()]
    report("asking the broker", 0, 0)
    checks += _broker(redis_url)
    if compile_model is not None:
        report(f"compiling for {compile_model}", 0, 0)
        checks.append(_compile(compile_model))
    return checks


def _python() -> Check:
    found = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    return Check("python", "good", found)


def _cpu() -> Check:
    from prism_core.kernels.target import target

    found = target()
    features = [name for name, value in vars(found).items() if value is True] or ["no vector extension"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = f"{cores} usable core(s), kernels for {found.arch} with {', '.join(features)}"
    if found.arch == "x86_64" and not found.avx2:
        return Check("cpu", "warning", text, "use a CPU with AVX2: without it the kernels are several times slower")
    return Check("cpu", "good", text)


def _home() -> Check:
    home = prism_home()
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=home):
            pass
        free = shutil.disk_usage(home).free
    except OSError as error:
        return Check("home", "bad", f"{home}: {error.strerror}", "set PRISM_HOME to a folder that you can write to")
    text = f"{home}, {free / 1e9:.1f} GB free"
    if free < FREE_BYTES:
        return Check("home", "warning", text, f"free some space: {FREE_BYTES >> 30} GB at least")
    return Check("home", "good", text)


def _models() -> Check:
    here = [model.name for model in local_models()]
    if not here:
        return Check("models", "warning", "none has been pulled", "prism models pull smollm2-135m")
    return Check("models", "good", ", ".join(here))


def _broker(redis_url: str | None) -> Iterator[Check]:
    from broker.admin import Admin
    from broker.connect import connect

    try:
        connection = connect(redis_url)
    except PrismError as error:
        yield Check("broker", "bad", str(error), "start the server, or correct --redis-url / PRISM_REDIS_URL")
        return
    try:
        began = time.perf_counter()
        for _ in range(20):
            connection.redis.ping()
        round_trip_ms = (time.perf_counter() - began) * 50
        text = f"{connection.url}, round trip {round_trip_ms:.2f} ms"
        if round_trip_ms > SLOW_FLUSH_MS:
            yield Check("broker", "warning", text, "put the broker nearer to the workers")
        else:
            yield Check("broker", "good", text)
        for warning in connection.warnings:
            yield Check("broker", "warning", warning, "see the deployment guide for the settings of a broker")
        snapshot = Admin(connection.redis).snapshot()
        alive = [worker for worker in snapshot.workers if worker.state in ("idle", "busy")]
        text = f"{len(alive)} live worker(s), {snapshot.open_requests} open request(s)"
        if not alive:
            yield Check(
                "pool", "warning", text, "prism worker MODEL" + (f" --redis-url {redis_url}" if redis_url else "")
            )
        else:
            yield Check("pool", "good", text)
        url = connection.embedded.url if connection.embedded else connection.url
        yield Check("rq", "good", f"RQ_KEY_PREFIX=prism:rq rq info --url {url}")
    finally:
        connection.close()


def _compile(model: str) -> Check:
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
