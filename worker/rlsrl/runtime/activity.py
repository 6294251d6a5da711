"""Measures how a worker spends its time: shares of the last seconds, by stage of work and by reason to wait."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Literal

WORKING = "working"
"""The activity of a worker that does not wait."""
COMPILER = "compiler"
"""The reason to wait of a trainer whose step is compiled: this wait is work."""
CREDIT = "credit"
"""The reason to wait of an actor or a buffer worker that may fill no slot."""
END_OF_TRAINING = "the end of training"
"""The reason to wait of an actor or a buffer worker once the run needs no more samples."""
Stage = Literal["environment", "inference", "update", "copy"]
"""Stages of work: step environments, choose their actions, train, and move samples and weights."""
WINDOW_SECONDS = 10.0
"""Length of the window that shares are computed over."""


def working_on(stage: str) -> str:
    """Return the name of the activity of working on ``stage``."""
    return f"{WORKING}: {stage}"


def stage_of(activity: str) -> str | None:
    """Return the stage of work of an activity, "" for work without a stage, or None for waiting."""
    return activity.removeprefix(WORKING).removeprefix(": ") if activity.startswith(WORKING) else None


class Activity:
    """The time that one thread spends on each activity. Not thread-safe."""

    def __init__(self, *, now: Callable[[], float]) -> None:
        """``now`` returns monotonic seconds. Time counts from the first ``turn_to``."""
        self._now = now
        self._current: str | None = None
        self._since = now()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds by activity, since construction."""
        self._samples: deque[tuple[float, dict[str, float]]] = deque([(self._since, {})])
        """Times of earlier calls of ``shares``, each with the seconds by activity at that time; oldest first."""

    def turn_to(self, activity: str | None) -> None:
        """Begin an activity. None: the time does not count, for example while the worker is paused."""
        self._count_current()
        self._current = activity

    def spent(self, seconds: Mapping[Stage, float]) -> None:
        """Attribute seconds of completed work to stages."""
        self._count_current()
        for stage, duration in seconds.items():
            self._seconds[working_on(stage)] += duration
            self._seconds[WORKING] -= duration

    def shares(self) -> dict[str, float]:
        """Return each activity's share of the window; empty if no time counted.

        The window begins at an earlier call, so its length is ``WINDOW_SECONDS`` plus at most one heartbeat.
        """
        now = self._count_current()
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW_SECONDS:
            self._samples.popleft()
        before = self._samples[0][1]
        spent = {activity: seconds - before.get(activity, 0.0) for activity, seconds in self._seconds.items()}
        self._fit_stages(spent)
        self._samples.append((now, dict(self._seconds)))
        total = sum(spent.values())
        return {activity: seconds / total for activity, seconds in spent.items() if seconds > 0} if total > 0 else {}

    @staticmethod
    def _fit_stages(spent: dict[str, float]) -> None:
        """Scale the stages down if together they exceed the work of the window.

        A stage is reported when it is complete, so part of its time may lie before the window.
        """
        stages = [activity for activity in spent if stage_of(activity)]
        work = sum(spent[activity] for activity in (*stages, WORKING) if activity in spent)
        reported = sum(spent[stage] for stage in stages)
        if reported > work:
            spent.update({stage: spent[stage] * max(0.0, work) / reported for stage in stages}, **{WORKING: 0.0})

    def _count_current(self) -> float:
        """Add the time since the last call to the current activity; return the present time."""
        now = self._now()
        if self._current is not None:
            self._seconds[self._current] += now - self._since
        self._since = now
        return now
