"""The HTTP server of the page. It answers GET alone, from the package and from run folders."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from typing_extensions import override

from rlsrl.ui.views import NotThere, curve, find, log_lines, run_list, run_page

STATIC = Path(__file__).with_name("static")
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""Of every answer: the page loads nothing from elsewhere, and no other page shows it."""
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")


def make_app(runs: Path, *, hosts: tuple[str, ...] = LOCAL_HOSTS) -> Starlette:
    """Return the application that shows the runs in a folder.

    ``hosts`` are the names by which it may be called: another site's name that leads here is refused.
    """
    routes = [
        Route("/", _index),
        Route("/api/runs", _answer(lambda _: run_list(runs))),
        Route("/api/runs/{name}", _answer(lambda request: run_page(_run(runs, request)))),
        Route("/api/runs/{name}/curve", _answer(lambda request: curve(_run(runs, request), _after(request)))),
        Route(
            "/api/runs/{name}/logs/{log}",
            _answer(lambda request: log_lines(_run(runs, request), request.path_params["log"])),
        ),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts)),
            Middleware(BaseHTTPMiddleware, dispatch=_with_headers),
        ],
    )


def serve(runs: Path, *, host: str, port: int, on_start: Callable[[str], None]) -> None:
    """Serve until Ctrl-C. ``on_start`` gets the address.

    Raises:
        OSError: the address cannot be used.
    """
    import socket

    import uvicorn

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:
        bound, number = listener.getsockname()[:2]
        shown = f"[{bound}]" if ":" in bound else bound
        app = make_app(runs, hosts=tuple(dict.fromkeys((*LOCAL_HOSTS, host, shown))))
        on_start(f"http://{shown}:{number}/")
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, workers=1))
        server.run(sockets=[listener])


class SafeJson(JSONResponse):
    """JSON of what damaged files may hold: NaN and infinity become null, half characters stay escaped."""

    @override
    def render(self, content: Any) -> bytes:
        return json.dumps(_finite(content), separators=(",", ":"), allow_nan=False).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


async def _with_headers(request: Request, call_next: RequestResponseEndpoint) -> Response:
    response = await call_next(request)
    response.headers.update(HEADERS)
    return response


def _answer(make: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """Return an endpoint that Starlette calls in a thread: it reads files."""
    return partial(_json, make)


def _json(make: Callable[[Request], Any], request: Request) -> Response:
    try:
        return SafeJson(make(request))
    except NotThere as error:
        raise HTTPException(404, str(error)) from error


def _index(_: Request) -> Response:
    return FileResponse(STATIC / "index.html")


def _run(runs: Path, request: Request) -> Path:
    return find(runs, request.path_params["name"])


def _after(request: Request) -> int:
    try:
        return int(request.query_params.get("after", "0"))
    except ValueError as error:
        raise HTTPException(400, "after is a number of bytes") from error
