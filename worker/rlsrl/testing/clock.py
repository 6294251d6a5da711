"""A clock that stands still until a test moves it."""

from __future__ import annotations

import threading


class ManualClock:
    """A ``Clock`` whose time is set by ``advance``. Any thread may read or move it."""

    def __init__(self, *, monotonic: float = 0.0, time: float = 1_700_000_000.0) -> None:
        self._lock = threading.Lock()
        self._monotonic = monotonic
        self._time = time

    def monotonic(self) -> float:
        """Seconds since some fixed moment; moves only by ``advance``."""
        with self._lock:
            return self._monotonic

    def time(self) -> float:
        """Unix seconds; moves only by ``advance``."""
        with self._lock:
            return self._time

    def advance(self, seconds: float) -> None:
        """Let time pass.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"time does not go back: {seconds} s")
        with self._lock:
            self._monotonic += seconds
            self._time += seconds
