"""The delay between two attempts to connect. This module needs no gRPC."""

from __future__ import annotations

FIRST_BACK_OFF_SECONDS = 0.1
"""Delay after the first failed attempt."""
MAX_BACK_OFF_SECONDS = 1.0
"""Longest delay between two attempts."""


class BackOff:
    """The delay before the next attempt. It doubles with each failure, up to a limit. For one thread."""

    def __init__(
        self, *, first_seconds: float = FIRST_BACK_OFF_SECONDS, max_seconds: float = MAX_BACK_OFF_SECONDS
    ) -> None:
        self._first = first_seconds
        self._max = max_seconds
        self._delay = first_seconds

    def next_delay(self) -> float:
        """Return the seconds to wait after a failed attempt, and double the delay for the failure after it."""
        delay = self._delay
        self._delay = min(2 * delay, self._max)
        return delay

    def reset(self) -> None:
        """Return to the first delay. Call it after an attempt that succeeded."""
        self._delay = self._first
