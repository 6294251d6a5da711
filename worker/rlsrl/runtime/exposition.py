"""A process's metrics over HTTP, as Prometheus text, and what else it has to show."""

from __future__ import annotations

import hmac
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import TracebackType
from typing import Any, ClassVar, Self

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

Page = Callable[[], tuple[str, bytes]]
"""Makes a page: content type and body. Called from the server's thread; TimeoutError if it cannot be had now."""

HEALTH_PAGE = "/healthz"
"""Whether the process lives."""
READY_PAGE = "/readyz"
"""Whether it does its work."""
_REQUEST_SECONDS = 5
"""How long one client may take to send its request or read its answer; another waits meanwhile."""


def healthy() -> tuple[str, bytes]:
    """The page of a process that is well."""
    return "text/plain; charset=utf-8", b"ok\n"


class MetricsServer:
    """Answers ``GET /metrics`` and further pages on ``host`` and ``port`` until closed (port 0: any free one;
    ``address`` tells). ``guarded`` pages only go to those who show the experiment's token (RFC 6750).

    Its one thread waits for requests, woken by them and by ``close``.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        host: str,
        port: int,
        token: str,
        pages: Mapping[str, Page] | None = None,
        guarded: Mapping[str, Page] | None = None,
    ) -> None:
        """Bind and serve; pages are by path, for example ``/status``.

        Raises:
            OSError: the address is taken or not ours.
        """
        bound = {"registry": registry, "token": token, "pages": dict(pages or {}), "guarded": dict(guarded or {})}
        handler = type("_BoundHandler", (_Handler,), bound)
        self._server = HTTPServer((host, port), handler)
        # The thread selects before each request; a client that hangs up in between must not block it.
        self._server.timeout = 0
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="metrics-server", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port it listens on."""
        host, port = self._server.socket.getsockname()[:2]
        return host, port

    def close(self) -> None:
        """Stop answering and free the address; waits for the request at hand. Idempotent."""
        self._wake_sender.close()
        self._thread.join(2 * _REQUEST_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        with self._server, self._wake_receiver, selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            selector.register(self._wake_receiver, selectors.EVENT_READ)
            while all(key.fileobj is not self._wake_receiver for key, _ in selector.select()):
                self._server.handle_request()


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_SECONDS
    registry: ClassVar[CollectorRegistry]
    token: ClassVar[str]
    pages: ClassVar[Mapping[str, Page]]
    guarded: ClassVar[Mapping[str, Page]]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            self._answer(content_type, encode(self.registry))
        elif path in self.pages:
            self._show(self.pages[path])
        elif path in self.guarded and hmac.compare_digest(
            self.headers.get("Authorization", "").encode(), f"Bearer {self.token}".encode()
        ):
            self._show(self.guarded[path])
        elif path in self.guarded:
            self.send_error(401, "the experiment's token is needed: Authorization: Bearer TOKEN")
        else:
            self.send_error(404, f"here are {', '.join(['/metrics', *self.pages, *self.guarded])}")

    def _show(self, page: Page) -> None:
        try:
            content_type, body = page()
        except TimeoutError:
            self.send_error(503, "the process does not answer itself")
        else:
            self._answer(content_type, body)

    def _answer(self, content_type: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Say nothing: a scrape is no event."""
