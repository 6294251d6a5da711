"""The source of durations and dates. Tests pass a clock of their own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time. Code that measures or paces takes one as an argument."""

    def monotonic(self) -> float:
        """Return seconds since a fixed moment. They never go back: use them for durations."""

    def time(self) -> float:
        """Return Unix seconds. They may jump: use them for dates only."""


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        return time.monotonic()

    def time(self) -> float:
        """Unix seconds."""
        return time.time()
