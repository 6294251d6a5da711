"""Polls the coordinator's status beside the controller's loop. While it is unreachable the last status stays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rlsrl.runtime.coordination import CoordinatorUnavailable

ANSWER_SECONDS = 1.0
"""Deadline of one request."""


class StatusClient(Protocol):
    """The part of ``rlsrl.runtime.coordination.CoordinatorClient`` that the monitor uses."""

    def status(self, timeout: float) -> Mapping[str, Any]:
        """Return the coordinator's status document.

        Raises:
            CoordinatorUnavailable: no answer in time.
        """

    def close(self) -> None:
        """Close the connection; a waiting call fails."""


class StatusMonitor:
    """Keeps the newest status. Its own thread polls from ``start`` to ``close``; any thread may read.

    The monitor owns the client and closes it.
    """

    def __init__(
        self,
        client: StatusClient,
        *,
        publish: Callable[[Mapping[str, Any]], None] = lambda status: None,  # noqa: ARG005 - the callback's signature
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the monitor; polling begins with ``start``.

        Args:
            publish: Called with each status, from the monitor's thread; must not raise.
            clock: Gives monotonic seconds.
        """
        self._client = client
        self._publish = publish
        self._clock = clock
        self._newest: tuple[Mapping[str, Any], float] | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, *, interval_seconds: float) -> None:
        """Begin to poll; ``interval_seconds`` pass between an answer and the next request."""
        self._thread = threading.Thread(target=self._run, args=(interval_seconds,), name="status-monitor", daemon=True)
        self._thread.start()

    def newest(self) -> tuple[Mapping[str, Any] | None, float]:
        """Return the newest status and its age in seconds; None and 0 before the first."""
        newest = self._newest
        if newest is None:
            return None, 0.0
        status, at = newest
        return status, self._clock() - at

    def close(self) -> None:
        """Stop polling; a running request fails at once."""
        self._closed.set()
        self._client.close()
        if self._thread is not None:
            self._thread.join(ANSWER_SECONDS)

    def _run(self, interval_seconds: float) -> None:
        """Poll until ``close``, which ends both the request and the wait."""
        while not self._closed.is_set():
            if (status := self._ask()) is not None:
                self._newest = (status, self._clock())
                self._publish(status)
            self._closed.wait(interval_seconds)

    def _ask(self) -> Mapping[str, Any] | None:
        try:
            return self._client.status(ANSWER_SECONDS)
        except CoordinatorUnavailable:
            return None  # The display shows the age of the last answer.
        except ValueError:
            # gRPC raises this for a channel that `close` has closed, json for an invalid answer.
            return None
