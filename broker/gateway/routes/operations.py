"""What operators and their tools ask: health, version, metrics, and the pool at a glance.

`/livez`: the process runs. `/readyz`: it reaches its broker and is not being stopped, so it may be sent requests.
`/health`: the same, and a worker is there to answer them.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from broker.admin import Snapshot
from broker.gateway.gateway import Gateway, gateway_of
from broker.gateway.metrics import CONTENT_TYPE
from prism_core.errors import PrismError

__all__ = ["OPEN_PATHS", "ROUTES"]

OPEN_PATHS = ("/livez", "/readyz", "/health", "/version")
"""Paths that need no key: they tell nothing of anybody's requests."""


async def _livez(request: Request) -> JSONResponse:
    return JSONResponse({"status": "ok"})


async def _readyz(request: Request) -> JSONResponse:
    problem = await _problem(gateway_of(request))
    return JSONResponse({"status": problem or "ok"}, status_code=503 if problem else 200)


async def _health(request: Request) -> JSONResponse:
    gateway = gateway_of(request)
    problem = await _problem(gateway)
    workers = 0
    if problem is None:
        workers = sum(model.workers for model in await gateway.pool.served())
        problem = None if workers else "no worker"
    return JSONResponse({"status": problem or "ok", "workers": workers}, status_code=503 if problem else 200)


async def _problem(gateway: Gateway) -> str | None:
    if gateway.stopping:
        return "stopping"
    try:
        await gateway.pool.ping()
    except PrismError:
        return "broker unavailable"
    return None


async def _version(request: Request) -> JSONResponse:
    try:
        found = version("prism-pool")
    except PackageNotFoundError:
        found = "unknown"
    return JSONResponse({"version": found})


async def _metrics(request: Request) -> Response:
    gateway = gateway_of(request)
    snapshot: Snapshot | None
    try:
        snapshot = await gateway.pool.snapshot()
    except PrismError:
        snapshot = None
    return Response(gateway.metrics.render(snapshot), media_type=CONTENT_TYPE)


async def _pool(request: Request) -> JSONResponse:
    gateway = gateway_of(request)
    return JSONResponse({**_shown(await gateway.pool.snapshot()), "streams": gateway.metrics.open_streams})


def _shown(snapshot: Snapshot) -> dict[str, Any]:
    """Counts and names of workers; nothing of any request."""
    return {
        "now_ms": snapshot.now_ms,
        "workers": [
            {
                "name": worker.name,
                "state": worker.state,
                "model": (worker.lease.name or worker.lease.model) if worker.lease else "",
                "running": len(worker.running),
                "queued": worker.queued,
                "tokens": int(worker.stats.get("tokens", 0)),
            }
            for worker in snapshot.workers
        ],
        "queued": {name: getattr(snapshot.queued, name) for name in ("interactive", "background", "batch")},
        "running": snapshot.running,
        "boxed": snapshot.boxed,
        "parked": sum(snapshot.parked.values()),
        "oldest_wait_ms": snapshot.oldest_wait_ms,
        "generation_tokens": snapshot.counters.get("generation_tokens", 0),
        "takeovers": snapshot.counters.get("moved.worker_lost", 0),
        "moves": sum(value for name, value in snapshot.counters.items() if name.startswith("moved.")),
        "ended": {name[6:]: value for name, value in snapshot.counters.items() if name.startswith("ended.")},
    }


ROUTES = (
    Route("/livez", _livez, methods=["GET"]),
    Route("/readyz", _readyz, methods=["GET"]),
    Route("/health", _health, methods=["GET"]),
    Route("/version", _version, methods=["GET"]),
    Route("/metrics", _metrics, methods=["GET"]),
    Route("/pool", _pool, methods=["GET"]),
)
