"""Serves a process's metrics over HTTP, as Prometheus text, and further pages.

Any client in the network can connect, and a kubelet restarts a process that does not answer its probes. So clients that
are slow, silent or numerous must not delay the answers to others.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from types import TracebackType
from typing import Self
from urllib.parse import parse_qsl

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from rlsrl.rpc.settings import AddressTaken

PageHandler = Callable[[], tuple[str, bytes]]
"""Returns content type and body of a page. A thread of the server calls it. TimeoutError: the page is not ready."""
Query = Mapping[str, str]
"""What follows the path in a request: values by name. Of a repeated name, the last value."""
GuardedPageHandler = Callable[[Query], tuple[str, bytes]]
"""As ``PageHandler``, for one query. ValueError: the query is invalid; LookupError: it names nothing that exists;
OSError: the disk failed. Their texts are part of the answer."""

HEALTH_PAGE = "/healthz"
"""The path of the liveness probe."""
READY_PAGE = "/readyz"
"""The path of the readiness probe."""
REQUEST_SECONDS = 5.0
"""Seconds for one client, from its connection to the end of the answer."""
MAX_CONNECTIONS = 256
"""Connections at a time. A further one closes the oldest, because a normal request takes milliseconds."""
MAX_REQUEST_BYTES = 16 * 1024
"""Limit of a request's line and headers; requests have no body."""
_BACKLOG = 1024
"""Connections that the kernel queues until the server accepts them."""
_CLOSE_SECONDS = 10.0
"""Seconds that ``close`` waits for running requests."""
_TEXT = "text/plain; charset=utf-8"


def healthy() -> tuple[str, bytes]:
    """Return the page of a healthy process."""
    return _TEXT, b"ok\n"


class MetricsServer:
    """Answers ``GET /metrics`` and further pages on ``host`` and ``port`` until ``close``.

    Port 0 takes any free port; ``address`` has it. ``guarded`` pages need the experiment's token (RFC 6750). One thread
    runs the event loop. Other threads build the pages, so that a slow page delays no other request.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        host: str,
        port: int,
        token: str,
        viewing_token: str = "",
        pages: Mapping[str, PageHandler] | None = None,
        guarded: Mapping[str, GuardedPageHandler] | None = None,
        on_refused: Callable[[str], None] = lambda kind: None,  # noqa: ARG005 - by default nothing is counted
        request_seconds: float = REQUEST_SECONDS,
    ) -> None:
        """Bind and serve. ``pages`` and ``guarded`` are by path, for example ``/status``.

        ``viewing_token`` opens the guarded pages, as ``token`` does; empty: there is no such token.

        The server's thread calls ``on_refused`` for each refused request with the reason: ``token``, ``malformed``,
        ``slow`` or ``crowded``. One client has ``request_seconds``, from its connection to the end of the answer.

        Raises:
            AddressTaken: the address is in use; for port 0: no port is free.
            OSError: it is not an address of this host.
        """
        self._registry = registry
        self._authorizations = [f"Bearer {each}".encode() for each in (token, viewing_token) if each]
        self._pages = dict(pages or {})
        self._guarded = dict(guarded or {})
        self._on_refused = on_refused
        self._request_seconds = request_seconds
        self._clients: dict[asyncio.Task[None], None] = {}
        """The open connections, oldest first."""
        self._listener = _listen(host, port)
        self._address: tuple[str, int] = self._listener.getsockname()[:2]
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="metrics-server", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """The host and port where it listens."""
        return self._address

    def close(self) -> None:
        """Stop serving and free the address. Waits for running requests. Idempotent."""
        with contextlib.suppress(RuntimeError):  # The loop is closed already.
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(_CLOSE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        """Serve until ``close``."""
        # asyncio accepts up to `backlog` connections at once. With more, the newest would close connections whose
        # requests have not been read yet. The kernel queues the others.
        accepted = MAX_CONNECTIONS // 4
        async with await asyncio.start_server(
            self._serve_client, sock=self._listener, limit=MAX_REQUEST_BYTES, backlog=accepted
        ):
            self._listener.listen(_BACKLOG)
            await self._closing.wait()

    async def _serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the one request of a connection, and close the connection."""
        task = asyncio.current_task()
        assert task is not None, "asyncio serves each connection in a task"
        if len(self._clients) >= MAX_CONNECTIONS:
            oldest = next(iter(self._clients))
            del self._clients[oldest]
            oldest.cancel()
            self._on_refused("crowded")
        self._clients[task] = None
        is_answered = False
        try:
            async with asyncio.timeout(self._request_seconds):
                writer.write(await self._answer(reader))
                await writer.drain()
                is_answered = True
                writer.write_eof()
                # Closing with unread bytes resets the connection, and the client may lose the answer.
                while await reader.read(MAX_REQUEST_BYTES):
                    pass
        except TimeoutError:
            if not is_answered:
                self._on_refused("slow")
        except OSError:
            return  # The client closed the connection.
        except asyncio.CancelledError:
            return  # A newer connection replaced this one, or the server closes.
        finally:
            self._clients.pop(task, None)
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            request = await reader.readuntil(b"\r\n\r\n")
            path, query, headers = _parse(request)
        except asyncio.IncompleteReadError:
            return b""
        except (asyncio.LimitOverrunError, ValueError):
            self._on_refused("malformed")
            return _error(HTTPStatus.BAD_REQUEST, "the request is invalid: send GET, a path and headers, over HTTP/1.1")
        if path == "/metrics":
            encode, content_type = choose_encoder(headers.get("accept", b"").decode("latin-1"))
            return _response(HTTPStatus.OK, content_type, encode(self._registry))
        if path in self._pages:
            return await _render(self._pages[path])
        if path not in self._guarded:
            known = ", ".join(["/metrics", *self._pages, *self._guarded])
            return _error(HTTPStatus.NOT_FOUND, f"the path is unknown; the pages are {known}")
        shown = headers.get("authorization", b"")
        if not any(hmac.compare_digest(shown, each) for each in self._authorizations):
            self._on_refused("token")
            return _error(
                HTTPStatus.UNAUTHORIZED,
                "the token is missing or wrong: send the header 'Authorization: Bearer TOKEN'",
            )
        return await _render(partial(self._guarded[path], query))


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        if port:
            raise AddressTaken(f"cannot listen on {host}:{port}: another process does") from error
        raise AddressTaken(
            f"{host} has no free port for the metrics page: end programs that hold ports, or widen the range "
            "(sysctl net.ipv4.ip_local_port_range)"
        ) from error


def _parse(request: bytes) -> tuple[str, Query, dict[str, bytes]]:
    """Return path, query and headers of a complete GET request.

    Raises:
        ValueError: the request is not HTTP, or its method is not GET.
    """
    line, *lines = request[:-4].split(b"\r\n")
    method, path, protocol = line.decode("ascii").split(" ")
    if method != "GET" or not protocol.startswith("HTTP/1."):
        raise ValueError(line)
    headers = {}
    for header in lines:
        name, colon, value = header.partition(b":")
        if not colon:
            raise ValueError(header)
        headers[name.decode("ascii").lower()] = value.strip()
    path, _, query = path.partition("?")
    return path, dict(parse_qsl(query)), headers


async def _render(page: PageHandler) -> bytes:
    try:
        content_type, body = await asyncio.to_thread(page)
    except TimeoutError:
        return _error(HTTPStatus.SERVICE_UNAVAILABLE, "the process is not ready to answer; try again")
    except LookupError as error:
        return _error(HTTPStatus.NOT_FOUND, str(error))
    except ValueError as error:
        return _error(HTTPStatus.BAD_REQUEST, str(error))
    except OSError as error:
        return _error(HTTPStatus.SERVICE_UNAVAILABLE, f"the page cannot be read: {error}")
    return _response(HTTPStatus.OK, content_type, body)


def _error(status: HTTPStatus, text: str) -> bytes:
    return _response(status, _TEXT, f"{text}\n".encode())


def _response(status: HTTPStatus, content_type: str, body: bytes) -> bytes:
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
