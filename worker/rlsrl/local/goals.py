"""The stop conditions of a run, their progress and the time that is left. Pure.

Totals are another process's JSON: any of them may be missing or have another type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsrl.api.spec import Stop
from rlsrl.local.worker_report import number

RETURN_LABEL = "return"
SECONDS_LABEL = "seconds"


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One stop condition and its progress."""

    label: str
    target: float
    current: float | None
    per_second: float | None = None
    """The present speed. None: it is unknown, or the value need not grow, as a mean return."""

    @property
    def fraction(self) -> float:
        """Progress from 0 to 1; 0 while unknown. A target of 0 or less has only 0 and 1."""
        if self.current is None or self.target <= 0:
            return float(self.current is not None and self.current >= self.target)
        return min(1.0, max(0.0, self.current / self.target))

    @property
    def seconds_left(self) -> float | None:
        """The time to the target at the present speed; None: it cannot be told."""
        if self.current is None or not self.per_second:
            return None
        return max(0.0, (self.target - self.current) / self.per_second)


def goals(stop: Stop, totals: Mapping[str, Any], elapsed_seconds: float) -> list[Goal]:
    """Return the stop conditions that are set, in the spec's order.

    Args:
        stop: the conditions.
        totals: of the coordinator's status.
        elapsed_seconds: stands for the training time while ``totals`` lacks it.
    """
    trained_seconds = number(totals, "train_seconds")
    env_steps, train_steps = number(totals, "env_steps"), number(totals, "train_steps")
    speed = number(totals, "env_steps_per_second")
    # A run takes equally many env steps for each training step, but for the first ones with replay.
    train_speed = speed * train_steps / env_steps if speed and train_steps and env_steps else None
    found = (
        (RETURN_LABEL, stop.return_mean, number(totals, "return_mean"), None),
        ("env steps", stop.env_steps, env_steps, speed),
        ("train steps", stop.train_steps, train_steps, train_speed),
        (SECONDS_LABEL, stop.wall_seconds, elapsed_seconds if trained_seconds is None else trained_seconds, 1.0),
    )
    return [
        Goal(label=label, target=float(target), current=current, per_second=per_second)
        for label, target, current, per_second in found
        if target is not None
    ]


def seconds_left(found: Sequence[Goal]) -> float | None:
    """Return the time until the first of the conditions is met at the present speed; None: it cannot be told.

    A mean return may end the run earlier.
    """
    return min((left for goal in found if (left := goal.seconds_left) is not None), default=None)


def time_left(found: Sequence[Goal]) -> str:
    """Return the time that is left as text, for example ``about 80 s left``; nothing if it cannot be told."""
    left = seconds_left(found)
    if left is None:
        return ""
    is_bound = any(goal.label == RETURN_LABEL for goal in found)
    return f"{'at most ' if is_bound else ''}about {_duration(left)} left"


def _duration(seconds: float) -> str:
    """Return a duration with as many digits as an estimate deserves."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
