"""A clock that a test advances."""

from __future__ import annotations

import threading


class ManualClock:
    """A ``Clock`` that only ``advance`` moves. Any thread may read or advance it."""

    def __init__(self, *, monotonic: float = 0.0, time: float = 1_700_000_000.0) -> None:
        self._lock = threading.Lock()
        self._monotonic = monotonic
        self._time = time

    def monotonic(self) -> float:
        """Return the seconds since a fixed moment."""
        with self._lock:
            return self._monotonic

    def time(self) -> float:
        """Return Unix seconds."""
        with self._lock:
            return self._time

    def advance(self, seconds: float) -> None:
        """Advance the clock.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"time does not go back: {seconds} s")
        with self._lock:
            self._monotonic += seconds
            self._time += seconds
