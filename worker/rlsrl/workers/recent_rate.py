"""The present speed of a count that grows in steps, from its values and the times of their arrival. Pure."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 10.0
"""Seconds over which the rate is measured; more if the count grows more rarely."""


class RecentRate:
    """The growth per second over the last ``WINDOW_SECONDS``, or since the last growth but one if that is longer ago.

    It is 0 once the count has stood still for the window, and for twice as long as its last growth took: a stalled run
    shows no speed, and one with long training steps shows the speed of its last step.
    """

    def __init__(self) -> None:
        self._growth: deque[tuple[float, float]] = deque()
        """The times, in seconds, at which the count was seen to have grown, with its value; oldest first."""

    def note(self, now: float, count: float) -> None:
        """Record the count. A smaller count, as after a restart, discards the earlier ones."""
        growth = self._growth
        if growth and count < growth[-1][1]:
            growth.clear()
        if not growth or count > growth[-1][1]:
            growth.append((now, count))
        while len(growth) > 2 and growth[1][0] <= growth[-1][0] - WINDOW_SECONDS:
            growth.popleft()

    def per_second(self, now: float) -> float | None:
        """Return the rate; None before the count has grown once."""
        if len(self._growth) < 2:
            return None
        (first_at, first), (before_at, _), (last_at, last) = self._growth[0], self._growth[-2], self._growth[-1]
        if now - last_at > max(WINDOW_SECONDS, 2 * (last_at - before_at)):
            return 0.0
        return (last - first) / (last_at - first_at)
