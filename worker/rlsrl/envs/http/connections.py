"""Connections to one HTTP server, which are kept for further requests.

A request is one write, and llhttp (Node's parser, by httptools) reads the answer. A step over HTTP waits for little but
this code: ``http.client`` takes twice the processor time, and its two writes wake the server twice.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections import deque
from collections.abc import Mapping
from http import HTTPStatus
from http.client import HTTP_PORT, HTTPS_PORT
from typing import NamedTuple
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

_READ_BYTES = 65536


class RequestFailed(Exception):
    """There is no answer. The text says why."""


class Response(NamedTuple):
    """The answer to a request."""

    status: int
    data: bytes


class Connections:
    """Sends requests. Any thread may use it; each request in progress has a connection of its own."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """Connect to nothing yet. ``headers``, of printable ASCII, go with each request to the server at ``url``."""
        parts = urlsplit(url)
        assert parts.hostname is not None, "the spec has checked the URL"
        is_https = parts.scheme == "https"
        self._host, self._path = parts.hostname, parts.path.rstrip("/")
        self._port = parts.port or (HTTPS_PORT if is_https else HTTP_PORT)
        self._tls = ssl.create_default_context() if is_https else None
        lines = {"Host": parts.netloc, **headers}
        self._head = " HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: deque[socket.socket] = deque()

    def request(
        self, method: str, path: str, content: bytes | None, *, connect_seconds: float, seconds: float
    ) -> Response:
        """Return the answer to one request.

        Args:
            method: such as ``POST``.
            path: below the server's URL, quoted.
            content: the body.
            connect_seconds: the longest wait for a connection.
            seconds: the longest wait for the next part of the answer.

        Raises:
            RequestFailed: no connection, no answer in time, or no answer in HTTP.
        """
        body = content or b""
        head = f"{method} {self._path}{path}{self._head}Content-Length: {len(body)}\r\n\r\n"
        try:
            connection = self._kept() or self._open(connect_seconds)
            return self._exchange(connection, head.encode("ascii") + body, seconds)
        except (OSError, HttpParserError) as error:
            raise RequestFailed(str(error) or type(error).__name__) from error
        except HttpParserUpgrade as error:
            raise RequestFailed("the server changes to another protocol") from error

    def _kept(self) -> socket.socket | None:
        """Return a kept connection that the server has not closed meanwhile, or None."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            poll = select.poll()
            poll.register(connection, select.POLLIN)
            if not poll.poll(0):
                return connection
            connection.close()  # between two requests there is nothing to read but the end

    def _open(self, seconds: float) -> socket.socket:
        connection = socket.create_connection((self._host, self._port), timeout=seconds)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_hostname=self._host)
        except BaseException:
            connection.close()
            raise
        return connection

    def _exchange(self, connection: socket.socket, request: bytes, seconds: float) -> Response:
        """Send the request and return the answer. Keep the connection if it can be used again, else close it."""
        answer = _Answer()
        try:
            connection.settimeout(seconds)
            connection.sendall(request)
            while (response := answer.response) is None:
                answer.feed(connection.recv(_READ_BYTES))
        except BaseException:
            connection.close()
            raise
        if answer.keeps_connection:
            self._idle.append(connection)
        else:
            connection.close()
        return response


class _Answer:
    """An answer that is being read. The methods that begin with ``on_`` are the parser's callbacks."""

    def __init__(self) -> None:
        self.response: Response | None = None
        """The answer, once all of it is read."""
        self.keeps_connection = False
        self._parser = HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._has_begun = False
        self._has_length = False
        self._ends_with_connection = False

    def feed(self, data: bytes) -> None:
        """Read the next bytes of the connection. No bytes: the server has closed it.

        Raises:
            HttpParserError: this is not HTTP.
            RequestFailed: there is no whole answer.
        """
        if data:
            self._has_begun = True
            self._parser.feed_data(data)
        elif self._ends_with_connection:
            self._complete()
        else:
            what = "within its answer" if self._has_begun else "without an answer"
            raise RequestFailed(f"the server closed the connection {what}")

    def on_header(self, name: bytes, _: bytes) -> None:
        self._has_length |= name.lower() in {b"content-length", b"transfer-encoding"}

    def on_headers_complete(self) -> None:
        self._ends_with_connection = not self._has_length

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)

    def on_message_begin(self) -> None:
        if self.response is not None:  # more than was asked for, which the next request would take for its answer
            self.keeps_connection = False

    def on_message_complete(self) -> None:
        if self.response is None and self._parser.get_status_code() >= HTTPStatus.OK:  # others precede the answer
            self._complete()
            self.keeps_connection = self._parser.should_keep_alive()

    def _complete(self) -> None:
        self.response = Response(self._parser.get_status_code(), b"".join(self._parts))
