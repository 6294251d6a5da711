"""What a worker spends its time with: which work, or waiting, and for what; as shares of the last seconds."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Literal

WORKING = "working"
"""What a worker is shown to do when it waits for nothing."""
Stage = Literal["environment", "inference", "update", "copy"]
"""Work whose share is told: environments, choosing their actions, training, and moving samples and weights."""
WINDOW_SECONDS = 10.0
"""Shares are of about so many last seconds."""


def working_on(stage: str) -> str:
    """What an activity is called that is a part of the work."""
    return f"{WORKING}: {stage}"


def stage_of(what: str) -> str | None:
    """The part of the work that an activity of that name is, empty for what has no name; None for waiting."""
    return what.removeprefix(WORKING).removeprefix(": ") if what.startswith(WORKING) else None


class Activity:
    """The time of one thread. Not thread-safe."""

    def __init__(self, *, now: Callable[[], float]) -> None:
        """``now`` gives monotonic seconds; nothing counts before the first ``turn_to``."""
        self._now = now
        self._doing: str | None = None
        self._since = now()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        """By what was done, since the beginning."""
        self._looks: deque[tuple[float, dict[str, float]]] = deque([(self._since, {})])

    def turn_to(self, doing: str | None) -> None:
        """From now on the thread does this; None for what does not count, as when it is paused."""
        self._settle()
        self._doing = doing

    def spent(self, seconds: Mapping[Stage, float]) -> None:
        """So many of the seconds that the thread has worked went into these stages of its work."""
        self._settle()
        for stage, each in seconds.items():
            self._seconds[working_on(stage)] += each
            self._seconds[WORKING] -= each

    def shares(self) -> dict[str, float]:
        """How the time was spent between now and the last look that is as long ago as the window; empty if none was.

        Each call is a look: called at heartbeats, the window is exact to one of them.
        """
        now = self._settle()
        while len(self._looks) > 1 and self._looks[1][0] <= now - WINDOW_SECONDS:
            self._looks.popleft()
        before = self._looks[0][1]
        spent = {what: seconds - before.get(what, 0.0) for what, seconds in self._seconds.items()}
        self._fit_stages(spent)
        self._looks.append((now, dict(self._seconds)))
        total = sum(spent.values())
        return {what: seconds / total for what, seconds in spent.items() if seconds > 0} if total > 0 else {}

    @staticmethod
    def _fit_stages(spent: dict[str, float]) -> None:
        """Work is told when it is done: stages may have more of a window than it has of work. Then they share that."""
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
