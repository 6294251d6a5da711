"""A process's metrics over HTTP, as Prometheus text."""

from __future__ import annotations

import selectors
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import TracebackType
from typing import Any, ClassVar, Self

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

_REQUEST_SECONDS = 5
"""How long one client may take to send its request or read its answer; another waits meanwhile."""


class MetricsServer:
    """Answers ``GET /metrics`` on ``host`` and ``port`` (0: any free one; ``address`` tells) until closed.

    Its one thread waits for requests, woken by them and by ``close``.
    """

    def __init__(self, registry: CollectorRegistry, *, host: str, port: int) -> None:
        """Bind and serve.

        Raises:
            OSError: the address is taken or not ours.
        """
        handler = type("_BoundHandler", (_Handler,), {"registry": registry})
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

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "only /metrics is here")
            return
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        body = encode(self.registry)
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Say nothing: a scrape is no event."""
