"""Decides when periodic work is due: log, push parameters, pull parameters."""

from __future__ import annotations

from rlsrl.runtime.clock import Clock, SystemClock


class FrequencyControl:
    """Work is due ``seconds`` or ``steps`` after it was last due, whichever comes first.

    With neither, work is never due. Time and steps count from construction. One thread uses it.
    """

    def __init__(
        self,
        *,
        seconds: float | None = None,
        steps: int | None = None,
        least: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        """``least`` makes work due more often at first: at each of the first ``least`` checks, then after the share
        1 / ``least`` of the time since the first one, until that is ``seconds``.

        So work is due ``least`` times at least, spread over the time, however soon all ends.
        """
        if seconds is not None and not seconds > 0:
            raise ValueError(f"seconds must be above 0, not {seconds}")
        if steps is not None and steps < 1:
            raise ValueError(f"steps must be at least 1, not {steps}")
        self._seconds = seconds
        self._steps = steps
        self._least = least
        self._num_due = 0
        self._began: float | None = None
        self._clock = clock if clock is not None else SystemClock()
        self._last = self._clock.monotonic()
        self._num_steps = 0

    def check(self, steps: int = 1) -> bool:
        """Count ``steps`` more steps and return whether work is due. If so, time and steps start again at 0."""
        self._num_steps += steps
        now = self._clock.monotonic()
        by_steps = self._steps is not None and self._num_steps >= self._steps
        by_time = self._seconds is not None and now - self._last >= self._interval(self._seconds, now)
        if not (by_steps or by_time):
            return False
        self._last = now
        self._num_steps = 0
        self._num_due += 1
        return True

    def _interval(self, seconds: float, now: float) -> float:
        if self._least is None:
            return seconds
        self._began = now if self._began is None else self._began
        return 0.0 if self._num_due < self._least else min(seconds, (now - self._began) / self._least)
