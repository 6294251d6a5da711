"""A file descriptor that wakes a thread which waits for sockets."""

from __future__ import annotations

import os
import threading
from contextlib import suppress


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
