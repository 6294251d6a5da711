"""Passes the newest weights from the thread that gets them to the thread that evaluates with them."""

from __future__ import annotations

import threading

from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Parameters
from rlsrl.runtime.pipe import PipeClosed

CLOSED = "this worker gets no newer weights any more"


class LatestParameters:
    """Holds the newest weights. One thread puts them, another takes them and says which version it needs."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._newest: Parameters | None = None
        self._taken: Version | None = None
        self._wanted: Version | None = None
        self._closed = False

    def put(self, parameters: Parameters) -> None:
        """Hold these weights, the newest. Weights that were not taken before are dropped."""
        with self._changed:
            self._newest = parameters
            if self._wanted is not None and parameters.version >= self._wanted:
                self._wanted = None
            self._changed.notify_all()

    def take(self) -> Parameters | None:
        """Return the newest weights, or None if there are none, or if they were taken before.

        Raises:
            PipeClosed: ``close`` was called.
        """
        with self._changed:
            self._check()
            if self._newest is None or self._newest.version == self._taken:
                return None
            self._taken = self._newest.version
            return self._newest

    def newest(self, min_version: Version) -> Version | None:
        """Return the version of the newest weights, or None if it is older than ``min_version``.

        In that case weights of ``min_version`` or newer are ``wanted`` from now on, until ``put`` brings them.

        Raises:
            PipeClosed: ``close`` was called.
        """
        with self._changed:
            self._check()
            if self._newest is not None and self._newest.version >= min_version:
                return self._newest.version
            self._wanted = min_version
            self._changed.notify_all()
            return None

    def wanted(self, timeout: float) -> Version | None:
        """Return the version that is waited for, or None if there is no such wait within ``timeout`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._wanted is not None or self._closed, timeout)
            return self._wanted

    def close(self) -> None:
        """Wake waiting threads. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _check(self) -> None:
        if self._closed:
            raise PipeClosed(CLOSED)
