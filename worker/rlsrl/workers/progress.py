"""Counts training progress and evaluates the stop conditions. Pure. Each checkpoint stores what it counts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsrl.data.episodes import EndedEpisodes, InfoStatistics, finite_mean

ENV_STEPS = "envSteps"
"""The stop condition that counts env steps, as in the spec."""
SKIP_WINDOW = 200
"""The newest minibatches that ``SkipWindow`` judges."""


@dataclass(frozen=True, kw_only=True)
class StopConditions:
    """Training ends at the first step boundary at which a condition holds. None is no condition."""

    return_mean: float | None
    """Mean undiscounted return of the last ``episodes`` episodes with a finite return, once that many have ended."""
    episodes: int
    env_steps: int | None
    """Trained transitions, over all ranks."""
    train_steps: int | None
    wall_seconds: float | None
    """Seconds of training, over all attempts."""
    now: bool = False
    """Whether training ends at once."""


class Progress:
    """The run's counters and the reports of its last episodes."""

    def __init__(self, *, episodes: int) -> None:
        self.env_steps = 0
        self.train_steps = 0
        self.num_episodes = 0
        self.train_seconds = 0.0
        self.minibatches = 0
        self.minibatches_skipped = 0
        self.non_finite_returns = 0
        """Episodes whose return was NaN or infinite. They are in no mean."""
        self.store_request: str | None = None
        """The last request to store a version that was taken."""
        self._returns: deque[float] = deque(maxlen=episodes)
        self._lengths: deque[int] = deque(maxlen=episodes)
        self._info: dict[str, deque[float]] = {}
        """By key of ``info``: the values of the last ``episodes`` episodes that had one."""
        self._info_counts: dict[str, int] = {}
        """By key: the episodes that had a value."""

    def gathered(self, episodes: EndedEpisodes, *, env_steps: int) -> None:
        """Count transitions of all ranks that were gathered, and the episodes that ended in them."""
        finite = [value for value in episodes.returns if math.isfinite(value)]
        self._returns.extend(finite)
        self._lengths.extend(episodes.lengths)
        self.non_finite_returns += len(episodes.returns) - len(finite)
        for key, values in episodes.info.items():
            self._values_of(key).extend(values)
            self._info_counts[key] = self._info_counts.get(key, 0) + len(values)
        self.num_episodes += len(episodes.returns)
        self.env_steps += env_steps

    def trained(self, *, seconds: float, minibatches: int, skipped: int) -> None:
        """Count a training step.

        Args:
            seconds: since the last one.
            minibatches: of the batch, skipped ones included.
            skipped: minibatches that were skipped.
        """
        self.minibatches += minibatches
        self.minibatches_skipped += skipped
        self.train_steps += 1
        self.train_seconds += seconds

    @property
    def return_mean(self) -> float | None:
        """The mean return of the last ``episodes`` episodes; None before the first, or if the sum overflows."""
        return finite_mean(self._returns)

    @property
    def length_mean(self) -> float | None:
        """The mean number of steps of the last ``episodes`` episodes; None before the first."""
        return finite_mean(self._lengths)

    @property
    def episode_info(self) -> InfoStatistics:
        """Of each chosen key of ``info``: the mean of its last values, and how many episodes of the run had one."""
        return {key: {"mean": finite_mean(self._info[key]), "count": count} for key, count in self._info_counts.items()}

    def stop_reason(self, stop: StopConditions) -> str | None:
        """Return the name, as in the spec, of a condition that holds, or None."""
        full = len(self._returns) == self._returns.maxlen
        mean = self.return_mean
        conditions = {
            "returnMean": stop.return_mean is not None and full and mean is not None and mean >= stop.return_mean,
            ENV_STEPS: stop.env_steps is not None and self.env_steps >= stop.env_steps,
            "trainSteps": stop.train_steps is not None and self.train_steps >= stop.train_steps,
            "wallSeconds": stop.wall_seconds is not None and self.train_seconds >= stop.wall_seconds,
            "now": stop.now,
        }
        return next((name for name, holds in conditions.items() if holds), None)

    def steps_left(self, stop: StopConditions, *, batch_transitions: int) -> int | None:
        """Return how many training steps are needed at least until ``envSteps``, ``trainSteps`` or ``now`` ends it.

        None: none of them is set. ``batch_transitions``: most transitions of a batch, over all ranks. The other
        conditions may end the run earlier. Batches with fewer transitions make it longer.
        """
        left = [0] if stop.now else []
        if stop.train_steps is not None:
            left.append(stop.train_steps - self.train_steps)
        if stop.env_steps is not None:
            left.append(-((self.env_steps - stop.env_steps) // batch_transitions))
        return max(0, min(left)) if left else None

    @property
    def metadata(self) -> dict[str, Any]:
        """What a version's metadata say of the training up to it: JSON values."""
        return {
            "env_steps": self.env_steps,
            "train_steps": self.train_steps,
            "return_mean": self.return_mean,
            "length_mean": self.length_mean,
            "episode_info": self.episode_info,
            "train_seconds": round(self.train_seconds, 3),
            "minibatches": self.minibatches,
            "minibatches_skipped": self.minibatches_skipped,
            "non_finite_returns": self.non_finite_returns,
            "store_request": self.store_request,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values for ``load_state_dict``."""
        return {
            "env_steps": self.env_steps,
            "train_steps": self.train_steps,
            "num_episodes": self.num_episodes,
            "train_seconds": self.train_seconds,
            "minibatches": self.minibatches,
            "minibatches_skipped": self.minibatches_skipped,
            "non_finite_returns": self.non_finite_returns,
            "store_request": self.store_request,
            "returns": list(self._returns),
            "lengths": list(self._lengths),
            "info": {key: list(values) for key, values in self._info.items()},
            "info_counts": dict(self._info_counts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. A state of an older version of rlsrl lacks some counts: they start at 0."""
        self.env_steps = int(state["env_steps"])
        self.train_steps = int(state["train_steps"])
        self.num_episodes = int(state["num_episodes"])
        self.train_seconds = float(state["train_seconds"])
        self.minibatches = int(state.get("minibatches", 0))
        self.minibatches_skipped = int(state.get("minibatches_skipped", 0))
        self.non_finite_returns = int(state.get("non_finite_returns", 0))
        self.store_request = state.get("store_request")
        self._returns.clear()
        self._returns.extend(state["returns"])
        self._lengths.clear()
        self._lengths.extend(state.get("lengths", ()))
        self._info.clear()
        for key, values in state.get("info", {}).items():
            self._values_of(key).extend(values)
        self._info_counts = dict(state.get("info_counts", {}))

    def _values_of(self, key: str) -> deque[float]:
        return self._info.setdefault(key, deque(maxlen=self._returns.maxlen))


class SkipWindow:
    """Finds that training does not learn: more than half of the last ``SKIP_WINDOW`` minibatches were skipped.

    All ranks skip the same minibatches, so their windows agree. A trainer that resumes judges the minibatches of the
    lives before, too: a run that does not learn must not succeed because its trainer died near the end.
    """

    def __init__(self, taken: Sequence[bool] = ()) -> None:
        """Continue from the ``taken`` of a saved window; without them, begin with an empty one."""
        self._taken: deque[bool] = deque(taken, maxlen=SKIP_WINDOW)

    @property
    def taken(self) -> list[bool]:
        """Whether each minibatch of the window was taken, oldest first."""
        return list(self._taken)

    def add(self, taken: Sequence[bool]) -> None:
        """Count a step's minibatches, in order: False for each one skipped."""
        self._taken.extend(taken)

    def failure(self, *, at_end: bool) -> str | None:
        """Return why the run must end, or None. Only ``at_end`` fewer than ``SKIP_WINDOW`` minibatches are judged."""
        skipped, judged = self._taken.count(False), len(self._taken)
        if 2 * skipped <= judged or (judged < SKIP_WINDOW and not at_end):
            return None
        return (
            f"{skipped} of the last {judged} minibatches were skipped, and changed nothing: their loss or gradient was "
            "not finite. At most half may be. Look for extreme rewards and observations of the environment "
            "(normalizeRewards, rewardClip and normalizeObservations bound them), or lower learningRate"
        )
