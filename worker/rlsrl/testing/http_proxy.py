"""An HTTP proxy that causes faults on demand: it delays, drops or answers requests, or drops or cuts their answers."""

from __future__ import annotations

import itertools
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from typing_extensions import override

from rlsrl.testing.closing import ClosedAtExit

_UPSTREAM_SECONDS = 60.0
_WITHOUT_LENGTH = ("transfer-encoding", "connection", "content-length")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request that arrived at the proxy."""

    number: int
    """Number of the request, from 0."""
    method: str
    path: str
    """The path, with its query."""
    body: bytes
    status: int = 0
    """Of the server's answer; 0 before it."""


@dataclass(frozen=True, kw_only=True)
class ProxyAnswer:
    """An answer of the proxy itself, as gateways give one while their server is away."""

    status: int
    body: bytes = b""
    content_type: str = "text/html"


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore lost connections, which the tests cause."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class FaultyProxy(ClosedAtExit):
    """A proxy in front of one server, by default on the loopback interface. Each request has its own thread.

    An answer without a length, such as a Kubernetes watch, is forwarded line by line as it arrives.
    """

    def __init__(self, upstream: str, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        """``upstream`` is the server's URL. Listen at ``address``; port 0: any free port."""
        self.before: Callable[[Request], bool | ProxyAnswer] = lambda _: True
        """Called with each request before it is forwarded. It may wait. True forwards the request; False closes the
        connection; an answer is sent instead."""
        self.after: Callable[[Request], bool | ProxyAnswer] = lambda _: True
        """Called with each request after the server's answer. True forwards the answer; False closes the connection;
        another answer is sent instead."""
        self.line: Callable[[Request, bytes], bytes | None] = lambda _, line: line
        """Called with each line of an answer without a length. It may wait. It returns the line to send; None ends."""
        self.requests: list[Request] = []
        """The requests that have arrived."""
        self._numbers = itertools.count()
        self._streams: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._host, self._port = urlsplit(upstream).hostname or "", urlsplit(upstream).port or 80
        self._server = _Server(address, self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="faulty-proxy")
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """The proxy's URL."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def reset(self) -> None:
        """Cause no more faults, and number requests from 0 again."""
        self.before = self.after = lambda _: True
        self.requests = []
        self._numbers = itertools.count()

    def cut(self) -> None:
        """End all answers that are being forwarded line by line."""
        with self._lock:
            while self._streams:
                with suppress(OSError):
                    self._streams.pop().shutdown(socket.SHUT_RDWR)

    @override
    def close(self) -> None:
        """Accept no more requests."""
        self.cut()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                request = Request(number=next(proxy._numbers), method=self.command, path=self.path, body=body)
                proxy.requests.append(request)
                if not _goes_on(self, proxy.before(request)):
                    return
                with proxy._forwarded(self, body) as (upstream, response):
                    request = replace(request, status=response.status)
                    if response.length is None and self.command != "HEAD":
                        self._forward_lines(request, upstream, response)
                        return
                    answer = response.read()
                if not _goes_on(self, proxy.after(request)):
                    return
                length = response.getheader("Content-Length") if self.command == "HEAD" else str(len(answer))
                self._begin(response, "Content-Length", length or "0")
                self.wfile.write(answer)

            def _begin(self, response: HTTPResponse, *length: str) -> None:
                self.send_response_only(response.status)
                for name, value in response.getheaders():
                    if name.lower() not in _WITHOUT_LENGTH:
                        self.send_header(name, value)
                self.send_header(*length)
                self.end_headers()

            def _forward_lines(self, request: Request, upstream: socket.socket, response: HTTPResponse) -> None:
                is_last, self.close_connection = self.close_connection, True
                if not _goes_on(self, proxy.after(request)):
                    return
                self._begin(response, "Transfer-Encoding", "chunked")
                # An answer that is cut ends without the last chunk: the client sees a broken connection.
                with proxy._streaming(upstream), suppress(OSError, HTTPException):
                    upstream.settimeout(None)
                    while read := response.readline():
                        if (line := proxy.line(request, read)) is None:
                            return
                        if line:
                            self.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
                    if proxy._is_streaming(upstream):
                        self.wfile.write(b"0\r\n\r\n")
                        self.close_connection = is_last  # clients send the next request on this connection at once

            do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = do_HEAD = handle_any  # noqa: N815 - http.server's names

            @override
            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing: tests read ``requests``."""

        return Handler

    @contextmanager
    def _streaming(self, upstream: socket.socket) -> Iterator[None]:
        with self._lock:
            self._streams.add(upstream)
        try:
            yield
        finally:
            with self._lock:
                self._streams.discard(upstream)

    def _is_streaming(self, upstream: socket.socket) -> bool:
        with self._lock:
            return upstream in self._streams

    @contextmanager
    def _forwarded(self, handler: BaseHTTPRequestHandler, body: bytes) -> Iterator[tuple[socket.socket, HTTPResponse]]:
        """Forward the request unchanged, signature included; yield the socket and the server's answer."""
        upstream = HTTPConnection(self._host, self._port, timeout=_UPSTREAM_SECONDS)
        try:
            upstream.putrequest(handler.command, handler.path, skip_host=True, skip_accept_encoding=True)
            for name, value in handler.headers.items():
                upstream.putheader(name, value)
            upstream.endheaders(body)
            end = upstream.sock
            yield end, upstream.getresponse()
        finally:
            upstream.close()


def _goes_on(handler: BaseHTTPRequestHandler, verdict: bool | ProxyAnswer) -> bool:
    """Return whether the request goes on. If it does not, answer it, or close its connection."""
    if isinstance(verdict, ProxyAnswer):
        handler.send_response_only(verdict.status)
        handler.send_header("Content-Type", verdict.content_type)
        handler.send_header("Content-Length", str(len(verdict.body)))
        handler.end_headers()
        handler.wfile.write(verdict.body)
        return False
    handler.close_connection |= not verdict
    return verdict
