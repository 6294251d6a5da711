"""The end of a stream that one thread uses and any thread may close, and the event that wakes this thread."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rlsrl.streams.protocols import StreamClosed


class EventFd:
    """An event with a file descriptor: readable from ``set`` until ``clear``. Thread-safe."""

    def __init__(self) -> None:
        # The lock keeps ``set`` from writing to a descriptor that ``close`` has given back to the system.
        self._lock = threading.Lock()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """Return the descriptor, or -1 after ``close``."""
        return self._fd

    def set(self) -> None:
        """Make the descriptor readable. Does nothing after ``close``."""
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Make the descriptor unreadable until the next ``set``."""
        with self._lock, suppress(BlockingIOError):
            if self._fd >= 0:
                os.eventfd_read(self._fd)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


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
