"""The HTTP server of the page. It answers GET alone, from the package and from what keeps the runs."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override

from rlsrl.ui.runs import NotThere, Runs

STATIC = Path(__file__).with_name("static")
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""Of every answer: the page loads nothing from elsewhere, and no other page shows it."""
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
OTHER_HOST = "The page is not served under this host name. `rlsrl ui --name HOST` adds one."


def make_app(runs: Runs, *, hosts: Collection[str] = LOCAL_HOSTS) -> ASGIApp:
    """Return the application that shows the runs. ``hosts`` are the names under which it is served."""
    routes = [
        Route("/", _index),
        Route("/api/runs", _answer(lambda _: runs.rows())),
        Route("/api/runs/{name}", _answer(lambda request: runs.page(**request.path_params))),
        Route("/api/runs/{name}/versions", _answer(lambda request: runs.versions(**request.path_params))),
        Route("/api/runs/{name}/curve", _answer(lambda request: runs.curve(**request.path_params, **_place(request)))),
        Route("/api/runs/{name}/logs/{log}", _answer(lambda request: runs.log(**request.path_params))),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return GuardedApp(Starlette(routes=routes), hosts=hosts)


def serve(
    open_runs: Callable[[], AbstractAsyncContextManager[Runs]],
    *,
    host: str,
    port: int,
    names: Collection[str],
    on_start: Callable[[str], None],
) -> None:
    """Serve until Ctrl-C or SIGTERM. ``on_start`` gets the address.

    Args:
        open_runs: opens what keeps the runs, in the server's event loop.
        host: the address where it listens.
        port: its port; 0: any free one.
        names: further host names under which the page is served, in lower case.

    Raises:
        OSError: the address cannot be used, or ``open_runs`` failed.
    """
    import socket

    import uvicorn

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:
        bound, number = listener.getsockname()[:2]
        hosts = {*LOCAL_HOSTS, host.lower(), bound, *names}
        # 0.0.0.0 and :: are all addresses of the machine: no browser reaches the page under them.
        shown = next(iter(names), bound) if ipaddress.ip_address(bound).is_unspecified else bound
        on_start(f"http://{f'[{shown}]' if ':' in shown else shown}:{number}/")

        async def run() -> None:
            async with open_runs() as runs:
                app = make_app(runs, hosts=hosts)
                config = uvicorn.Config(app, log_level="warning", access_log=False, workers=1)
                await uvicorn.Server(config).serve(sockets=[listener])

        asyncio.run(run())


class GuardedApp:
    """Adds ``HEADERS`` to every answer of an application, and refuses requests that name another host.

    A name of another site may lead to this machine (DNS rebinding): its pages must not read the runs.
    """

    def __init__(self, app: ASGIApp, *, hosts: Collection[str]) -> None:
        """``hosts`` are the allowed names, in lower case. The address of the connection itself is allowed, too."""
        self._app = app
        self._hosts = frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request (ASGI)."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        is_refused = scope["type"] == "http" and not self._is_allowed(scope)
        app = PlainTextResponse(OTHER_HOST, status_code=400) if is_refused else self._app
        await app(scope, receive, send_with_headers)

    def _is_allowed(self, scope: Scope) -> bool:
        try:
            name = urlsplit(f"//{Headers(scope=scope).get('host', '')}").hostname
        except ValueError:
            return False
        return name is not None and (name in self._hosts or name == (scope.get("server") or ("",))[0])


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


def _answer(make: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that answers with what ``make`` returns."""

    async def endpoint(request: Request) -> Response:
        try:
            return SafeJson(await make(request))
        except NotThere as error:
            raise HTTPException(404, str(error)) from error
        except OSError as error:
            raise HTTPException(503, str(error)) from error

    return endpoint


def _index(_: Request) -> Response:
    return FileResponse(STATIC / "index.html")


def _place(request: Request) -> dict[str, Any]:
    """Return the place in a learning curve's file that a request asks for."""
    after = request.query_params.get("after", "0")
    if not (after.isascii() and after.isdigit()):
        raise HTTPException(400, "after is a number of bytes")
    return {"after": int(after), "file_id": request.query_params.get("file", "")}
