"""How far training has come, and whether that is far enough. Pure, and durable with every checkpoint."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsrl.data.specs import Arrays


@dataclass(frozen=True, kw_only=True)
class StopConditions:
    """Training ends at the first step boundary at which one holds; None never holds."""

    return_mean: float | None
    """Mean undiscounted return of the last ``episodes`` episodes, once there were so many."""
    episodes: int
    env_steps: int | None
    """Transitions trained."""
    train_steps: int | None
    wall_seconds: float | None
    """Seconds spent training, over all of the run's lives."""


class Progress:
    """Counters of the run so far and the returns of its last episodes."""

    def __init__(self, *, episodes: int) -> None:
        self.env_steps = 0
        self.train_steps = 0
        self.num_episodes = 0
        self.train_seconds = 0.0
        self._returns: deque[float] = deque(maxlen=episodes)

    def add(self, *, returns: Sequence[float], num_transitions: int, seconds: float) -> None:
        """Count a trained batch: the returns of the episodes that ended in it, and the time since the one before."""
        self._returns.extend(returns)
        self.num_episodes += len(returns)
        self.env_steps += num_transitions
        self.train_steps += 1
        self.train_seconds += seconds

    @property
    def return_mean(self) -> float | None:
        """Mean return of the last episodes, at most as many as the window holds; None before the first."""
        return sum(self._returns) / len(self._returns) if self._returns else None

    def stop_reason(self, stop: StopConditions) -> str | None:
        """The condition that holds now, named as in the spec; None while training goes on."""
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
        """JSON values that ``load_state_dict`` reads back."""
        return {
            "env_steps": self.env_steps,
            "train_steps": self.train_steps,
            "num_episodes": self.num_episodes,
            "train_seconds": self.train_seconds,
            "returns": list(self._returns),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.env_steps = int(state["env_steps"])
        self.train_steps = int(state["train_steps"])
        self.num_episodes = int(state["num_episodes"])
        self.train_seconds = float(state["train_seconds"])
        self._returns.clear()
        self._returns.extend(state["returns"])


def episode_returns(batch: Arrays) -> list[float]:
    """Undiscounted returns of the episodes reported in a batch ([T, B] fields of a slot), in the order of steps."""
    reported = (batch["episode_length"] > 0) & batch["mask"]
    returns: list[float] = batch["episode_return"][reported].tolist()
    return returns
