"""Serves a process's metrics over HTTP, as Prometheus text, and further pages.

Anybody who reaches the port may ask, and kubelets restart a process that does not answer them: so whoever is slow, says
nothing or comes by the thousand must not keep others from an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

PageHandler = Callable[[], tuple[str, bytes]]
"""Returns content type and body of a page. The server's thread calls it. TimeoutError: the page is not ready."""

HEALTH_PAGE = "/healthz"
"""Whether the process lives."""
READY_PAGE = "/readyz"
"""Whether the process is ready to work."""
REQUEST_SECONDS = 5.0
"""Seconds that one client may take, from its connection to the end of its answer."""
MAX_CONNECTIONS = 256
"""Clients at a time. One more closes the oldest connection: an honest client needs only an instant."""
MAX_REQUEST_BYTES = 16 * 1024
"""Limit of a request's line and headers; requests have no body."""
_WAITING = 1024
"""Connections that the kernel queues until they are accepted."""
_CLOSE_SECONDS = 10.0
"""Seconds that a running request may take when the server closes."""
_TEXT = "text/plain; charset=utf-8"


def healthy() -> tuple[str, bytes]:
    """Return the page of a healthy process."""
    return _TEXT, b"ok\n"


class MetricsServer:
    """Answers ``GET /metrics`` and further pages on ``host`` and ``port`` until closed (port 0: any free one;
    ``address`` tells). ``guarded`` pages only go to those who show the experiment's token (RFC 6750).

    Its one thread runs an event loop; pages are made in others, so that one that takes long keeps nobody waiting.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        host: str,
        port: int,
        token: str,
        pages: Mapping[str, PageHandler] | None = None,
        guarded: Mapping[str, PageHandler] | None = None,
        on_refused: Callable[[str], None] = lambda kind: None,  # noqa: ARG005 - whoever counts
    ) -> None:
        """Bind and serve; pages are by path, for example ``/status``.

        ``on_refused`` is called from the server's thread for requests that are refused: ``token``, ``malformed``,
        ``slow`` or ``crowded``.

        Raises:
            OSError: the address is taken or not ours.
        """
        self._registry = registry
        self._authorization = f"Bearer {token}".encode()
        self._pages = dict(pages or {})
        self._guarded = dict(guarded or {})
        self._on_refused = on_refused
        self._clients: dict[asyncio.Task[None], None] = {}
        """In the order of their connections."""
        self._listener = socket.create_server((host, port))
        self._address: tuple[str, int] = self._listener.getsockname()[:2]
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="metrics-server", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port it listens on."""
        return self._address

    def close(self) -> None:
        """Stop serving and free the address. Waits for the running request. Idempotent."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
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
        """Wait for clients. A client and ``close`` wake it."""
        # So many are taken on at a turn, fewer than would cut each other off before they could ask; others wait.
        turn = MAX_CONNECTIONS // 4
        async with await asyncio.start_server(self._meet, sock=self._listener, limit=MAX_REQUEST_BYTES, backlog=turn):
            self._listener.listen(_WAITING)
            await self._closing.wait()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client, from its connection to its end."""
        task = asyncio.current_task()
        assert task is not None, "streams are served by tasks"
        if len(self._clients) >= MAX_CONNECTIONS:
            oldest = next(iter(self._clients))
            del self._clients[oldest]
            oldest.cancel()
            self._on_refused("crowded")
        self._clients[task] = None
        is_answered = False
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                writer.write(await self._answer(reader))
                await writer.drain()
                is_answered = True
                writer.write_eof()
                while await reader.read(MAX_REQUEST_BYTES):  # closing with unread bytes would take the answer back
                    pass
        except TimeoutError:
            if not is_answered:
                self._on_refused("slow")
        except OSError:
            return  # it has gone
        except asyncio.CancelledError:
            return  # it made room for another, or the server closes
        finally:
            self._clients.pop(task, None)
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            request = await reader.readuntil(b"\r\n\r\n")
            path, headers = _parse(request)
        except asyncio.IncompleteReadError:
            return b""
        except (asyncio.LimitOverrunError, ValueError):
            self._on_refused("malformed")
            return _error(HTTPStatus.BAD_REQUEST, "GET, a path and some headers are what is understood here")
        if path == "/metrics":
            encode, content_type = choose_encoder(headers.get("accept", b"").decode("latin-1"))
            return _response(HTTPStatus.OK, content_type, encode(self._registry))
        if path in self._pages:
            return await _shown(self._pages[path])
        if path not in self._guarded:
            return _error(HTTPStatus.NOT_FOUND, f"here are {', '.join(['/metrics', *self._pages, *self._guarded])}")
        if not hmac.compare_digest(headers.get("authorization", b""), self._authorization):
            self._on_refused("token")
            return _error(HTTPStatus.UNAUTHORIZED, "the experiment's token is needed: Authorization: Bearer TOKEN")
        return await _shown(self._guarded[path])


def _parse(request: bytes) -> tuple[str, dict[str, bytes]]:
    """Return path and headers of a complete request.

    Raises:
        ValueError: it is none, or not one for a page.
    """
    line, *lines = request[:-4].split(b"\r\n")
    method, path, protocol = line.decode("ascii").split(" ")
    if method != "GET" or not protocol.startswith("HTTP/1."):
        raise ValueError(line)
    headers = {}
    for each in lines:
        name, colon, value = each.partition(b":")
        if not colon:
            raise ValueError(each)
        headers[name.decode("ascii").lower()] = value.strip()
    return path.partition("?")[0], headers


async def _shown(page: PageHandler) -> bytes:
    try:
        content_type, body = await asyncio.to_thread(page)
    except TimeoutError:
        return _error(HTTPStatus.SERVICE_UNAVAILABLE, "the process does not answer itself")
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
