"""Where durations and dates come from, so that tests can say what time it is."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time. Whoever measures or paces takes one as an argument."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment; never goes back. For durations."""

    def time(self) -> float:
        """Unix seconds. For dates only: it may jump."""


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        return time.monotonic()

    def time(self) -> float:
        """Unix seconds."""
        return time.time()
