"""The web page at `/`: three files, nothing from elsewhere."""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from broker.gateway.errors import ApiError

__all__ = ["ROUTES"]

_TYPES = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}
_NAMES = ("index.html", "app.js", "sse.js", "style.css")
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def _index(request: Request) -> Response:
    return _file("index.html")


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _NAMES:
        raise ApiError(404, f"There is no {name[:60]!r} here.", code="not_found")
    return _file(name)


def _file(name: str) -> Response:
    data = files("broker.gateway").joinpath("static", name).read_bytes()
    return Response(data, media_type=_TYPES[name.rpartition(".")[2]], headers=_HEADERS)


ROUTES = (
    Route("/", _index, methods=["GET"]),
    Route("/static/{name}", _static, methods=["GET"]),
)
