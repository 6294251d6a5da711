"""A descriptor to wait on beside sockets, that another thread can make ready."""

from __future__ import annotations

import os
import threading
from contextlib import suppress


class EventFd:
    """Stays ready from ``set`` on, until ``clear``. Safe from any thread, also when ``set`` and ``close`` meet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """The descriptor; -1 after ``close``."""
        return self._fd

    def set(self) -> None:
        """Wake whoever waits on it now or later. Nothing happens after ``close``."""
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Nobody is to be woken any more, until the next ``set``."""
        with self._lock, suppress(BlockingIOError):
            if self._fd >= 0:
                os.eventfd_read(self._fd)

    def close(self) -> None:
        """Nobody waits on it any more. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
