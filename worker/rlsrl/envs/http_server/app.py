"""The server behind ``rlsrl serve-environment``: sessions of one environment as an HTTP interface with a page about it.

FastAPI checks the messages and describes them; uvicorn serves. Steps and resets, which environments make all the time,
are answered before FastAPI. Handlers only start jobs of sessions and await them, so the event loop never waits for an
environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from rlsrl.envs.http.protocol import (
    PREFIX,
    SESSIONS,
    SPACES,
    STATE,
    ErrorKind,
    ErrorReply,
    ResetReply,
    ResetRequest,
    ServerState,
    SessionReply,
    SessionRequest,
    Spaces,
    StepReply,
    StepRequest,
)
from rlsrl.envs.http_server.page import HEADERS, interface_page
from rlsrl.envs.http_server.sessions import SessionError, Sessions
from rlsrl.runtime.errors import ConfigurationError

_STATUS: dict[ErrorKind, int] = {
    "environment": 500,
    "configuration": 422,
    "unknown_session": 404,
    "wrong_key": 409,
    "invalid": 422,
    "unauthorized": 401,
    "full": 503,
}
_ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorReply} for status in sorted(set(_STATUS.values()))}
_Call = tuple[type[BaseModel], Callable[[str, Any], Awaitable[Response]]]
"""The model of the body, and the endpoint, which takes the session's name and the body."""
_CLOSE_SECONDS = 5.0
"""How long the end of the server waits for environments inside a call."""
_KEEP_ALIVE_SECONDS = 600
"""Idle connections stay open: a client waits for the trainer between two rollouts."""


def environment_app(sessions: Sessions, *, token: str = "") -> ASGIApp:
    """Return the application. With a token, each request needs it as ``Authorization: Bearer TOKEN``."""

    async def authorize(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise SessionError("unauthorized", "the request has no valid token (Authorization: Bearer ...)")

    app = FastAPI(
        title=f"rlsrl: {sessions.source}",
        version=PREFIX.removeprefix("/v"),
        description="Each session is one environment. Its resets and steps have the keys 1, 2, 3, ... in their order.",
        docs_url=None,  # FastAPI's own pages load their scripts from elsewhere
        redoc_url=None,
        lifespan=_lifespan(sessions),
        dependencies=[Depends(authorize)],
        responses=_ERRORS,
        exception_handlers={SessionError: _answer_error, RequestValidationError: _answer_invalid},
    )
    calls = _add_calls(app, sessions)
    _add_descriptions(app, sessions)
    _add_sessions(app, sessions)
    app.add_route("/docs", lambda _: HTMLResponse(interface_page(app.openapi()), headers=HEADERS))
    return _DirectCalls(app, calls, authorize)


def _lifespan(sessions: Sessions) -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        expiry = asyncio.create_task(_expire(sessions))
        try:
            yield
        finally:
            expiry.cancel()
            if ends := [asyncio.wrap_future(ended) for ended in sessions.close_all()]:
                await asyncio.wait(ends, timeout=_CLOSE_SECONDS)

    return lifespan


async def _answer_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, SessionError), "registered for it"
    return _failure(error)


async def _answer_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), "registered for it"
    return _failure(_invalid(error.errors()))


def _add_calls(app: FastAPI, sessions: Sessions) -> dict[str, _Call]:
    """Add the calls of environments, and return them by name."""

    @app.post(f"{SESSIONS}/{{session}}/reset", response_model=ResetReply)
    async def reset(session: str, body: ResetRequest) -> Response:
        """Reset the environment."""
        return _json(await _of(sessions.reset(session, body.key, body.seed, body.options)))

    @app.post(f"{SESSIONS}/{{session}}/step", response_model=StepReply)
    async def step(session: str, body: StepRequest) -> Response:
        """Step the environment. A repeated key returns the recorded answer and does not step."""
        return _json(await _of(sessions.step(session, body.key, body.action)))

    return {"reset": (ResetRequest, reset), "step": (StepRequest, step)}


def _add_descriptions(app: FastAPI, sessions: Sessions) -> None:
    """Add the requests for the server's state and spaces."""

    @app.get(STATE)
    async def state() -> ServerState:
        """Return the state of the server. Clients ask for it to learn whether the server is back."""
        return ServerState(
            environment=str(sessions.source), num_sessions=len(sessions), num_steps=sessions.counter.num_steps
        )

    @app.get(SPACES, response_model=Spaces)
    async def spaces() -> Response:
        """Return the spaces of an environment with the server's own arguments. Makes one and closes it."""
        name = ""  # no path of a session has this name
        try:
            found = await _of(sessions.open(name, {}, None))
        finally:
            sessions.close(name)
        return _json({"observation_space": found.observation, "action_space": found.action})


def _add_sessions(app: FastAPI, sessions: Sessions) -> None:
    """Add the requests that begin and end sessions."""

    @app.put(SESSIONS + "/{session}", response_model=SessionReply)
    async def open_session(session: str, body: SessionRequest) -> Response:
        """Make an environment. The client chooses the session's name, such as a UUID. A repeat changes nothing."""
        try:
            found = await _of(sessions.open(session, body.kwargs, body.place))
        except SessionError as error:
            if error.kind != "full":
                sessions.close(session)  # so that its name can be tried again
            raise
        reply = {"observation_space": found.observation, "action_space": found.action}
        return _json({**reply, "idle_seconds": sessions.idle_seconds})

    @app.delete(SESSIONS + "/{session}", status_code=204)
    async def close_session(session: str) -> Response:
        """End the session and close its environment. It is no error if there is no such session."""
        sessions.close(session)
        return Response(status_code=204)


class _DirectCalls:
    """Answers the documented calls that environments make all the time. All else goes on to the application.

    The layers of FastAPI would take two fifths of the server's time for a step.
    """

    def __init__(
        self,
        app: ASGIApp,
        calls: Mapping[str, _Call],
        authorize: Callable[[Request], Awaitable[None]],
    ) -> None:
        """Answer ``calls``, by name: the last part of the path below a session."""
        self._app = app
        self._calls = calls
        self._authorize = authorize
        self._path = re.compile(rf"{SESSIONS}/([^/]+)/({'|'.join(calls)})")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not (found := self._path.fullmatch(scope["path"])):
            await self._app(scope, receive, send)
            return
        with contextlib.suppress(ClientDisconnect):
            response = await self._answer(Request(scope, receive), *found.groups())
            await response(scope, receive, send)

    async def _answer(self, request: Request, session: str, call: str) -> Response:
        model, endpoint = self._calls[call]
        try:
            await self._authorize(request)
            return await endpoint(session, model.model_validate_json(await request.body()))
        except SessionError as error:
            return _failure(error)
        except ValidationError as error:
            return _failure(_invalid({**each, "loc": ("body", *each["loc"])} for each in error.errors()))


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens there. Port 0: any free port.

    Raises:
        ConfigurationError: the address cannot be used.
    """
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        # Connections inherit it. Answers are two writes: without it each waits 40 ms for an acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, OverflowError) as error:
        raise ConfigurationError(f"cannot listen at {host}:{port}: {error}") from error


def serve(app: ASGIApp, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT. Requests in progress get 5 seconds to end."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(_CLOSE_SECONDS),
    )
    uvicorn.Server(config).run(sockets=[listener])


async def _of(future: Future[Any]) -> Any:
    """Await a session's answer. It is shielded: a client that hangs up must not cancel what a repeat will ask for."""
    return await asyncio.shield(asyncio.wrap_future(future))


async def _expire(sessions: Sessions) -> None:
    while True:
        await asyncio.sleep(min(1.0, sessions.idle_seconds / 4))
        sessions.expire()


def _json(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value, allow_nan=False).encode(), status_code=status, media_type="application/json")


def _failure(error: SessionError) -> Response:
    reply = ErrorReply(error=error.kind, message=str(error), type=error.type_name, traceback=error.traceback)
    return _json(reply.model_dump(), _STATUS[error.kind])


def _invalid(faults: Iterable[Mapping[str, Any]]) -> SessionError:
    """Return the error of a body with these faults, as pydantic describes them."""
    return SessionError("invalid", "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in faults))
