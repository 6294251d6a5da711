"""Numbers of the training that change as it goes on. A number that does not is a plain float."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LinearSchedule:
    """In a straight line from ``start`` to ``end``, and there from then on."""

    start: float
    end: float
    env_steps: int
    """Transitions trained, over all ranks and lives of the run, after which ``end`` is reached."""

    def at(self, env_steps: int) -> float:
        """The value after so many transitions."""
        progress = min(env_steps / self.env_steps, 1.0)
        return (1.0 - progress) * self.start + progress * self.end


Scheduled = float | LinearSchedule
"""A constant, or how it changes."""


def value_at(scheduled: Scheduled, env_steps: int) -> float:
    """The value after so many transitions."""
    return scheduled.at(env_steps) if isinstance(scheduled, LinearSchedule) else scheduled
