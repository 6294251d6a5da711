"""Numbers of the training that may change while it runs. A number that never changes is a plain float."""

from __future__ import annotations

from dataclasses import dataclass

from rlsrl.api.spec import ScheduleSpec


@dataclass(frozen=True, kw_only=True)
class LinearSchedule:
    """Moves linearly from ``start`` to ``end`` and stays there."""

    start: float
    end: float
    env_steps: int
    """Env steps of the whole run after which the value is ``end``."""

    def at(self, env_steps: int) -> float:
        """Return the value after ``env_steps`` env steps."""
        progress = min(env_steps / self.env_steps, 1.0)
        return (1.0 - progress) * self.start + progress * self.end


Scheduled = float | LinearSchedule
"""A constant or a schedule."""


def value_at(scheduled: Scheduled, env_steps: int) -> float:
    """Return the value after ``env_steps`` env steps."""
    return scheduled.at(env_steps) if isinstance(scheduled, LinearSchedule) else scheduled


def scheduled(start: float, schedule: ScheduleSpec | None, end: int | None) -> Scheduled:
    """Return the number or its schedule, which ends after ``end`` env steps unless it says when itself."""
    if schedule is None:
        return start
    env_steps = schedule.chosen.env_steps or end
    assert env_steps is not None, "validation leaves at least one"
    return LinearSchedule(start=start, end=schedule.chosen.to, env_steps=env_steps)
