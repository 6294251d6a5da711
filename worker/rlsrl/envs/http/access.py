"""A client's access to one environment server: retries, and a circuit breaker for all environments of a process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import structlog

from rlsrl.envs.http.connections import Connections, RequestFailed, Response
from rlsrl.envs.http.options import HttpOptions
from rlsrl.envs.http.protocol import STATE
from rlsrl.envs.unreachable import EnvironmentUnreachable, RemoteEnvironmentError
from rlsrl.runtime.errors import ConfigurationError

CONNECT_SECONDS = 10.0
"""The longest wait for a connection, if ``timeout_seconds`` is not shorter."""
_MAX_CHARACTERS = 300
"""Of a server's text in an error."""
_TRY_AGAIN = (408, 425, 429)
"""Statuses below 500 of which a later try may succeed."""

_log = structlog.stdlib.get_logger(__name__)


class ServerAccess:
    """Sends requests to one server. Any thread may use it.

    The circuit breaker opens after ``breaker_failures`` failed tries in a row. While it is open, requests fail at once.
    One of the threads in ``wait`` probes the server, at intervals that grow. A probe that is answered closes the
    breaker, but the next failed try opens it again: only a request that succeeds ends the row of failures.
    """

    def __init__(
        self,
        options: HttpOptions,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        log: structlog.stdlib.BoundLogger = _log,
    ) -> None:
        """Send nothing yet.

        Raises:
            ConfigurationError: the token cannot be read.
        """
        self.url = options.url.rstrip("/")
        self._options = options
        self._now = now
        self._sleep = sleep
        self._log = log
        headers = {"Content-Type": "application/json", **_authorization(options.token_file)}
        self._connections = Connections(self.url, headers)
        self._connect_seconds = min(CONNECT_SECONDS, options.timeout_seconds)
        self._jitter = np.random.default_rng()
        self._changed = threading.Condition()
        self._num_failures = 0
        """Failed tries and probes in a row."""
        self._is_open = False
        self._is_probing = False
        self._probe_at = 0.0
        self._away_since: float | None = None
        self._reason = ""
        """The last failure."""

    @property
    def is_open(self) -> bool:
        """Whether requests fail at once."""
        return self._is_open

    def call(self, method: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request, which is sent again after failures that may pass. So it must be repeatable.

        Raises:
            EnvironmentUnreachable: the server did not answer, or it has no such session any more.
            RemoteEnvironmentError: the environment raised an error.
            ConfigurationError: the server refuses the request for good; the text is the server's.
        """
        content = json.dumps(body, allow_nan=False).encode()
        for attempt in range(self._options.retries + 1):
            if self._is_open:
                break
            if attempt:
                self._sleep(self._pause(attempt - 1))
            response = self._try(method, path, content, self._options.timeout_seconds)
            if response is not None:
                self._succeeded()
                return self._content(response, method, path)
        raise self._unreachable()

    def call_once(self, method: str, path: str) -> None:
        """Send a request that may be lost: one quick try, and only if the server is not away."""
        if not self._is_open:
            self._try(method, path, None, self._connect_seconds)

    def wait(self, timeout: float) -> bool:
        """Wait until the breaker is closed, and return whether it is. A probe that is answered wakes all threads.

        It lasts ``timeout`` seconds, or as long as one probe.
        """
        deadline = self._now() + timeout
        with self._changed:
            while self._is_open:
                now = self._now()
                if not self._is_probing and now >= self._probe_at:
                    self._is_probing = True
                    break
                if now >= deadline:
                    return False
                until = deadline if self._is_probing else min(deadline, self._probe_at)
                self._changed.wait(max(0.0, until - now))
            else:
                return True
        return self._probe()

    def _probe(self) -> bool:
        is_answered = False
        try:
            is_answered = self._try("GET", STATE, None, self._connect_seconds) is not None
        finally:
            with self._changed:
                self._is_probing = False
                if is_answered:
                    self._is_open = False
                self._changed.notify_all()
        return is_answered

    def _try(self, method: str, path: str, content: bytes | None, seconds: float) -> Response | None:
        """Return the answer to one request within ``seconds``, or None after a failure that may pass."""
        try:
            response = self._connections.request(
                method, path, content, connect_seconds=self._connect_seconds, seconds=seconds
            )
        except RequestFailed as error:
            self._failed(shorten(str(error), _MAX_CHARACTERS, placeholder="..."))
            return None
        if response.status in _TRY_AGAIN or (
            response.status >= 500 and _error_of(response).get("error") != "environment"
        ):
            self._failed(f"status {response.status}: {_text(response)}")
            return None
        return response

    def _failed(self, reason: str) -> None:
        with self._changed:
            self._num_failures += 1
            self._reason = reason
            if self._num_failures < self._options.breaker_failures:
                return
            self._probe_at = self._now() + self._pause(self._num_failures - self._options.breaker_failures)
            if self._away_since is None:
                self._away_since = self._now()
                self._log.warning("environment_server_away", url=self.url, error=reason)
            self._is_open = True

    def _succeeded(self) -> None:
        if not self._num_failures:
            return  # the usual case takes no lock
        with self._changed:
            self._num_failures = 0
            self._is_open = False
            if self._away_since is not None:
                seconds = round(self._now() - self._away_since, 1)
                self._log.info("environment_server_back", url=self.url, seconds=seconds)
            self._away_since = None
            self._changed.notify_all()

    def _pause(self, number: int) -> float:
        """Return the pause after failure ``number``, from 0. Jitter keeps clients from coming all at once."""
        longest = min(self._options.max_backoff_seconds, self._options.backoff_seconds * 2.0 ** min(number, 30))
        return float(longest * self._jitter.uniform(0.5, 1.0))

    def _unreachable(self) -> EnvironmentUnreachable:
        return EnvironmentUnreachable(f"the environment server {self.url} is away: {self._reason}", wait=self.wait)

    def _content(self, response: Response, method: str, path: str) -> dict[str, Any]:
        """Return the body of an answer, or raise its error."""
        if response.status < 300:
            content = _json_of(response)
            if isinstance(content, dict):
                return content
            raise RuntimeError(f"{self.url} answered {method} {path} with {_text(response)!r}, not a JSON object")
        error = _error_of(response)
        kind, text = error.get("error"), str(error.get("message", _text(response)))
        if kind == "environment":
            raise RemoteEnvironmentError(
                f"{text} (in the environment server {self.url})",
                kind=str(error.get("type") or "an error"),
                traceback=str(error.get("traceback", "")),
            )
        if kind == "unknown_session":
            raise EnvironmentUnreachable(f"the environment server {self.url} has lost the episode: {text}")
        if response.status in (401, 403):
            text = f"{text}; set environment.http.tokenFile"
        elif response.status == 404:
            text = f"{text}; is there an environment server at environment.http.url?"
        raise ConfigurationError(
            f"the environment server {self.url} refuses {method} {path}: {response.status}: {text}"
        )


@cache
def access_to(options: HttpOptions) -> ServerAccess:
    """Return the one access of this process with those options, so that all environments share its breaker.

    Raises:
        ConfigurationError: the token cannot be read.
    """
    return ServerAccess(options)


def _authorization(token_file: str | None) -> dict[str, str]:
    if token_file is None:
        return {}
    try:
        token = Path(token_file).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"environment.http.tokenFile: cannot read {token_file}: {error}") from error
    if not token.isprintable():
        raise ConfigurationError(
            f"environment.http.tokenFile: the token in {token_file} has several lines; allowed: one"
        )
    return {"Authorization": f"Bearer {token}"}


def _json_of(response: Response) -> Any:
    try:
        return json.loads(response.data)
    except ValueError:
        return None


def _error_of(response: Response) -> dict[str, Any]:
    content = _json_of(response)
    return content if isinstance(content, dict) else {}


def _text(response: Response) -> str:
    """Return what a server says: its message, or the beginning of its answer."""
    message = _error_of(response).get("message")
    return shorten(str(message or response.data.decode(errors="replace")), _MAX_CHARACTERS, placeholder="...")
