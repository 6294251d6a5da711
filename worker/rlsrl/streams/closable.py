"""The end of a stream that one thread uses and any thread may close."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from rlsrl.streams.eventfd import EventFd
from rlsrl.streams.protocols import StreamClosed


class Closable(ABC):
    """An object with a thread-safe ``close``.

    Methods that use its resources run inside ``_exclusive`` and, while they wait, also wait for ``_wake``. If such a
    method runs during ``close``, its thread disposes of the resources; otherwise ``close`` does.
    """

    def __init__(self, name: str) -> None:
        """``name`` stands in error messages."""
        self._name = name
        self._closed = False
        self._in_call = threading.Lock()
        self._wake = EventFd()

    def close(self) -> None:
        """Dispose of the resources and wake the waiting thread. Idempotent. Not for use in a signal handler."""
        self._closed = True
        self._wake.set()
        self._dispose_if_idle()

    @abstractmethod
    def _dispose(self) -> None:
        """Close everything but ``_wake``. No other method runs meanwhile. Must be idempotent."""

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Use the resources inside the block.

        Raises:
            StreamClosed: ``close`` was called.
        """
        try:
            with self._in_call:
                self._check_open()
                yield
        finally:
            if self._closed:
                self._dispose_if_idle()

    def _check_open(self) -> None:
        if self._closed:
            raise StreamClosed(f"{self._name} was closed")

    def _dispose_if_idle(self) -> None:
        """Dispose of the resources, unless another thread uses them: that thread disposes of them when it leaves."""
        if not self._in_call.acquire(blocking=False):
            return
        try:
            self._dispose()
            self._wake.close()
        finally:
            self._in_call.release()
