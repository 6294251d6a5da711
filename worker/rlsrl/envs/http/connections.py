"""Connections to one HTTP server, which are kept for further requests. Python's own client has the least overhead."""

from __future__ import annotations

import select
import ssl
from collections import deque
from collections.abc import Mapping
from http.client import HTTP_PORT, HTTPS_PORT, HTTPConnection, HTTPException, HTTPSConnection
from typing import NamedTuple
from urllib.parse import urlsplit


class RequestFailed(Exception):
    """There is no answer. The text says why."""


class Response(NamedTuple):
    """The answer to a request."""

    status: int
    data: bytes


class Connections:
    """Sends requests. Any thread may use it; each request in progress has a connection of its own."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """Connect to nothing yet. ``headers`` are sent with each request to the server at ``url``."""
        parts = urlsplit(url)
        assert parts.hostname is not None, "the spec has checked the URL"
        is_https = parts.scheme == "https"
        self._host, self._path = parts.hostname, parts.path.rstrip("/")
        # http.client would look for a missing port in an IPv6 address.
        self._port = parts.port or (HTTPS_PORT if is_https else HTTP_PORT)
        self._tls = ssl.create_default_context() if is_https else None
        self._headers = dict(headers)
        self._idle: deque[HTTPConnection] = deque()

    def request(
        self, method: str, path: str, content: bytes | None, *, connect_seconds: float, seconds: float
    ) -> Response:
        """Return the answer to one request.

        Args:
            method: such as ``POST``.
            path: below the server's URL.
            content: the body.
            connect_seconds: the longest wait for a connection.
            seconds: the longest wait for the next part of the answer.

        Raises:
            RequestFailed: no connection, no answer in time, or no answer in HTTP.
        """
        try:
            connection = self._kept() or self._open(connect_seconds)
            return self._exchange(connection, method, path, content, seconds)
        except (OSError, HTTPException) as error:
            raise RequestFailed(str(error) or type(error).__name__) from error

    def _kept(self) -> HTTPConnection | None:
        """Return a kept connection that the server has not closed meanwhile, or None."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            poll = select.poll()
            poll.register(connection.sock, select.POLLIN)
            if not poll.poll(0):
                return connection
            connection.close()  # between two requests there is nothing to read but the end

    def _open(self, seconds: float) -> HTTPConnection:
        if self._tls is None:
            connection = HTTPConnection(self._host, self._port, timeout=seconds)
        else:
            connection = HTTPSConnection(self._host, self._port, timeout=seconds, context=self._tls)
        connection.connect()
        return connection

    def _exchange(
        self, connection: HTTPConnection, method: str, path: str, content: bytes | None, seconds: float
    ) -> Response:
        """Send the request and return the answer. Keep the connection if it can be used again, else close it."""
        try:
            connection.sock.settimeout(seconds)
            connection.request(method, self._path + path, body=content, headers=self._headers)
            answer = connection.getresponse()
            response = Response(answer.status, answer.read())
        except BaseException:
            connection.close()
            raise
        if connection.sock is not None:  # http.client closes it where the server asks for that
            self._idle.append(connection)
        return response
