"""Measures how a worker spends its time: shares of the last seconds, by stage of work and by reason to wait."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Literal

WORKING = "working"
"""The activity of a worker that does not wait."""
Stage = Literal["environment", "inference", "update", "copy"]
"""Stages of work: step environments, choose their actions, train, and move samples and weights."""
WINDOW_SECONDS = 10.0
"""Length of the window that shares are computed over."""


def working_on(stage: str) -> str:
    """Return the name of the activity that is this stage of work."""
    return f"{WORKING}: {stage}"


def stage_of(what: str) -> str | None:
    """Return the stage of work of an activity, "" for work without a stage, or None for waiting."""
    return what.removeprefix(WORKING).removeprefix(": ") if what.startswith(WORKING) else None


class Activity:
    """The time of one thread. Not thread-safe."""

    def __init__(self, *, now: Callable[[], float]) -> None:
        """``now`` returns monotonic seconds. Nothing counts before the first ``turn_to``."""
        self._now = now
        self._doing: str | None = None
        self._since = now()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        """By activity, since the beginning."""
        self._samples: deque[tuple[float, dict[str, float]]] = deque([(self._since, {})])

    def turn_to(self, doing: str | None) -> None:
        """Begin an activity. None: the time does not count, for example while the worker is paused."""
        self._settle()
        self._doing = doing

    def spent(self, seconds: Mapping[Stage, float]) -> None:
        """Attribute seconds of work, which is done already, to stages."""
        self._settle()
        for stage, each in seconds.items():
            self._seconds[working_on(stage)] += each
            self._seconds[WORKING] -= each

    def shares(self) -> dict[str, float]:
        """Return the shares of the activities in the window; empty if no time counted.

        The window begins at an earlier call, so its length is exact to one heartbeat.
        """
        now = self._settle()
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW_SECONDS:
            self._samples.popleft()
        before = self._samples[0][1]
        spent = {what: seconds - before.get(what, 0.0) for what, seconds in self._seconds.items()}
        self._fit_stages(spent)
        self._samples.append((now, dict(self._seconds)))
        total = sum(spent.values())
        return {what: seconds / total for what, seconds in spent.items() if seconds > 0} if total > 0 else {}

    @staticmethod
    def _fit_stages(spent: dict[str, float]) -> None:
        """Scale stages down where they exceed the work of the window: a stage is reported after it was done."""
        stages = [what for what in spent if stage_of(what)]
        work = sum(spent[what] for what in (*stages, WORKING) if what in spent)
        told = sum(spent[what] for what in stages)
        if told > work:
            spent.update({what: spent[what] * max(0.0, work) / told for what in stages}, **{WORKING: 0.0})

    def _settle(self) -> float:
        now = self._now()
        if self._doing is not None:
            self._seconds[self._doing] += now - self._since
        self._since = now
        return now
