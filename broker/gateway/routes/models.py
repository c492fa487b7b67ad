"""`/v1/models`: what workers of the pool run now."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from broker.gateway.errors import unknown_model
from broker.gateway.gateway import gateway_of
from broker.gateway.pool import Served

__all__ = ["ROUTES"]


async def _all(request: Request) -> JSONResponse:
    served = await gateway_of(request).pool.served()
    return JSONResponse({"object": "list", "data": [_shown(model) for model in served]})


async def _one(request: Request) -> JSONResponse:
    wanted = request.path_params["id"]
    for model in await gateway_of(request).pool.served():
        if wanted in (model.name, model.identity):
            return JSONResponse(_shown(model))
    raise unknown_model(wanted)


def _shown(model: Served) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.since,
        "owned_by": "prism",
        "identity": model.identity,
        "context_tokens": model.context_tokens,
        "workers": model.workers,
    }


ROUTES = (
    Route("/v1/models", _all, methods=["GET"]),
    Route("/v1/models/{id:path}", _one, methods=["GET"]),
)
