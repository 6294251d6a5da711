"""Counts training progress and evaluates the stop conditions. Pure; each checkpoint stores it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsrl.data.specs import Arrays


@dataclass(frozen=True, kw_only=True)
class StopConditions:
    """Training ends at the first step boundary at which a condition holds. None is no condition."""

    return_mean: float | None
    """Mean undiscounted return of the last ``episodes`` episodes, once that many have ended."""
    episodes: int
    env_steps: int | None
    """Trained transitions, over all ranks."""
    train_steps: int | None
    wall_seconds: float | None
    """Seconds of training, over all lives of the run."""


class Progress:
    """The run's counters and the returns of its last episodes."""

    def __init__(self, *, episodes: int) -> None:
        self.env_steps = 0
        self.train_steps = 0
        self.num_episodes = 0
        self.train_seconds = 0.0
        self._returns: deque[float] = deque(maxlen=episodes)

    def add(self, *, returns: Sequence[float], num_transitions: int, seconds: float) -> None:
        """Count a trained batch: the returns of the episodes that ended in it, and the seconds since the last batch."""
        self._returns.extend(returns)
        self.num_episodes += len(returns)
        self.env_steps += num_transitions
        self.train_steps += 1
        self.train_seconds += seconds

    @property
    def return_mean(self) -> float | None:
        """The mean return of the last episodes, at most ``episodes``; None before the first."""
        return sum(self._returns) / len(self._returns) if self._returns else None

    def stop_reason(self, stop: StopConditions) -> str | None:
        """Return the name, as in the spec, of a condition that holds, or None."""
        full = len(self._returns) == self._returns.maxlen
        mean = self.return_mean
        conditions = {
            "returnMean": stop.return_mean is not None and full and mean is not None and mean >= stop.return_mean,
            "envSteps": stop.env_steps is not None and self.env_steps >= stop.env_steps,
            "trainSteps": stop.train_steps is not None and self.train_steps >= stop.train_steps,
            "wallSeconds": stop.wall_seconds is not None and self.train_seconds >= stop.wall_seconds,
        }
        return next((name for name, holds in conditions.items() if holds), None)

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values for ``load_state_dict``."""
        return {
            "env_steps": self.env_steps,
            "train_steps": self.train_steps,
            "num_episodes": self.num_episodes,
            "train_seconds": self.train_seconds,
            "returns": list(self._returns),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.env_steps = int(state["env_steps"])
        self.train_steps = int(state["train_steps"])
        self.num_episodes = int(state["num_episodes"])
        self.train_seconds = float(state["train_seconds"])
        self._returns.clear()
        self._returns.extend(state["returns"])


def episode_returns(batch: Arrays) -> list[float]:
    """Return the undiscounted returns of the episodes that ended in a batch ([T, B] fields of a slot), by step."""
    reported = (batch["episode_length"] > 0) & batch["mask"]
    returns: list[float] = batch["episode_return"][reported].tolist()
    return returns
