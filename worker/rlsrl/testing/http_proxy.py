"""An HTTP proxy that harms requests to order: held up, dropped on the way, or their answers lost."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

_UPSTREAM_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request that arrived at the proxy."""

    number: int
    """Counted from 0."""
    method: str
    path: str
    """With its query."""


def _pass(_: Request) -> bool:
    return True


class FaultyProxy:
    """Stands before one server, on the loopback interface. Each request has a thread of its own."""

    def __init__(self, upstream: str) -> None:
        """``upstream`` is the server's URL."""
        self.before: Callable[[Request], bool] = _pass
        """Called with each request before it is passed on; may wait; False closes the connection instead."""
        self.after: Callable[[Request], bool] = _pass
        """Called with each request once the server has answered; False closes the connection instead of answering."""
        self.requests: list[Request] = []
        """What has arrived."""
        self._numbers = itertools.count()
        self._host, self._port = urlsplit(upstream).hostname or "", urlsplit(upstream).port or 80
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="faulty-proxy")
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """The proxy's URL."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def reset(self) -> None:
        """Harm nothing from now on, and count from 0 again."""
        self.before = self.after = _pass
        self.requests = []
        self._numbers = itertools.count()

    def close(self) -> None:
        """Take no more requests."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                request = Request(number=next(proxy._numbers), method=self.command, path=self.path)
                proxy.requests.append(request)
                if not proxy.before(request):
                    self.close_connection = True
                    return
                status, headers, answer = proxy._forward(self, body)
                if not proxy.after(request):
                    self.close_connection = True
                    return
                self.send_response_only(status)
                for name, value in headers:
                    if name.lower() not in ("transfer-encoding", "connection"):
                        self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any  # noqa: N815 - names that http.server looks for

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its parent's name
                """Nothing: tests read what they want from ``requests``."""

        return Handler

    def _forward(self, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """The server's answer; the request goes on as it came, signature and all."""
        upstream = HTTPConnection(self._host, self._port, timeout=_UPSTREAM_SECONDS)
        try:
            upstream.putrequest(handler.command, handler.path, skip_host=True, skip_accept_encoding=True)
            for name, value in handler.headers.items():
                upstream.putheader(name, value)
            upstream.endheaders(body)
            response = upstream.getresponse()
            answer = response.read()
            headers = [(name, value) for name, value in response.getheaders() if name.lower() != "content-length"]
            length = response.getheader("Content-Length") if handler.command == "HEAD" else str(len(answer))
            return response.status, [*headers, ("Content-Length", length or "0")], answer
        finally:
            upstream.close()
