"""Asks the coordinator how the run is doing, beside the controller's loop: an unreachable one only makes old news."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rlsrl.runtime.coordination import CoordinatorUnavailable

ANSWER_SECONDS = 1.0
"""How long one answer may take."""


class StatusClient(Protocol):
    """Where the status comes from: ``rlsrl.runtime.coordination.CoordinatorClient``."""

    def status(self, timeout: float) -> Mapping[str, Any]:
        """The experiment as the coordinator sees it.

        Raises:
            CoordinatorUnavailable: no answer in time.
        """

    def close(self) -> None:
        """Let a call that waits fail."""


class StatusMonitor:
    """Keeps the newest status. A thread of its own asks, from ``start`` to ``close``; any thread may read.

    It owns the client.
    """

    def __init__(
        self,
        client: StatusClient,
        *,
        publish: Callable[[Mapping[str, Any]], None] = lambda status: None,  # noqa: ARG005 - whoever shows it elsewhere
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is asked before ``start``.

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
        """Begin to ask, with so much time between an answer and the next question."""
        self._thread = threading.Thread(target=self._run, args=(interval_seconds,), name="status-monitor", daemon=True)
        self._thread.start()

    def newest(self) -> tuple[Mapping[str, Any] | None, float]:
        """The last status and its age in seconds; None and 0 before the first."""
        newest = self._newest
        if newest is None:
            return None, 0.0
        status, at = newest
        return status, self._clock() - at

    def close(self) -> None:
        """Stop asking; a question under way fails at once."""
        self._closed.set()
        self._client.close()
        if self._thread is not None:
            self._thread.join(ANSWER_SECONDS)

    def _run(self, interval_seconds: float) -> None:
        """Ask, wait for the interval, ask again; ``close`` ends the wait and the question."""
        while not self._closed.is_set():
            if (status := self._ask()) is not None:
                self._newest = (status, self._clock())
                self._publish(status)
            self._closed.wait(interval_seconds)

    def _ask(self) -> Mapping[str, Any] | None:
        try:
            return self._client.status(ANSWER_SECONDS)
        except CoordinatorUnavailable:
            return None  # It shows as the age of the last answer.
        except ValueError:
            # gRPC's word for a channel that `close` has closed meanwhile, and json's for an answer that is none.
            return None
