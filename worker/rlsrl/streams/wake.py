"""A descriptor to wait on beside sockets, that another thread can make ready, once and for good."""

from __future__ import annotations

import os
import threading


class Wake:
    """Stays ready from ``set`` on. Safe from any thread, also when ``set`` and ``close`` meet."""

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

    def close(self) -> None:
        """Nobody waits on it any more. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
