"""Plays a fixed policy for a fixed number of episodes: for ``rlsrl eval`` and for the evaluator.

Every environment plays the same number of episodes. The first N episodes to finish would be the short ones: the bad
ones if each step gives a reward, and the good ones if each step costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlsrl.data.episodes import InfoStatistics, finite_mean, info_field
from rlsrl.data.slots import Slot, rollout_layout
from rlsrl.data.specs import ArraySpec
from rlsrl.envs.faults import EnvironmentFaults
from rlsrl.envs.seeds import environment_seed
from rlsrl.envs.vector import VectorEnv
from rlsrl.policies.acting import LocalActor

_NOISE_DOMAIN = 21
"""First word of the spawn key. No other use of the seed has it (``envs.seeds``, ``workers.build.common``)."""


class EvaluationUnfinished(RuntimeError):
    """There is no result. The text says why: no episode has ended within the allowed steps, or the mean return is not
    finite."""


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The finite returns and the lengths of the episodes; at least one episode."""

    returns: tuple[float, ...]
    """Undiscounted return of each episode, ordered by environment."""
    lengths: tuple[int, ...]
    """Steps of each episode, in the same order."""
    info: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By chosen key of ``info``: its finite values at the ends of these episodes."""
    num_steps: int = 0
    """Steps of all environments, those outside of these episodes included: an environment steps on after its last one
    until all have ended theirs."""
    num_faults: int = 0
    """Environment faults meanwhile. The episodes that they cut do not count; others took their place."""
    unfinished: str = ""
    """Why some episodes are missing; empty if all have ended. Long episodes are missing rather than short ones, so that
    such a result does not compare with others."""

    @property
    def num_episodes(self) -> int:
        """Number of episodes."""
        return len(self.returns)

    @property
    def return_mean(self) -> float:
        """Mean return."""
        return float(np.mean(self.returns))

    @property
    def return_std(self) -> float:
        """Standard deviation of these returns (divided by their number)."""
        with np.errstate(invalid="ignore", over="ignore"):
            return float(np.std(self.returns))

    @property
    def length_mean(self) -> float:
        """Mean number of steps of an episode."""
        return float(np.mean(self.lengths))

    @property
    def episode_info(self) -> InfoStatistics:
        """Of each chosen key of ``info``: the mean, and how many of these episodes had a value."""
        return {key: {"mean": finite_mean(values), "count": len(values)} for key, values in self.info.items()}

    def to_json(self) -> Mapping[str, Any]:
        """Return the summary as a JSON value; null for a value that is NaN or infinite, which JSON lacks.

        It has ``unfinished`` only if episodes are missing.
        """
        values = {
            "return_mean": self.return_mean,
            "return_std": self.return_std,
            "return_min": min(self.returns),
            "return_max": max(self.returns),
            "length_mean": self.length_mean,
        }
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        unfinished = {"unfinished": self.unfinished} if self.unfinished else {}
        counts = {"episodes": self.num_episodes, "steps": self.num_steps, "faults": self.num_faults}
        return {**counts, **finite, "episode_info": self.episode_info, **unfinished}


@dataclass(frozen=True, kw_only=True)
class EpisodeShare:
    """How episodes are divided among environments: each environment plays equally many."""

    num_environments: int
    episodes_per_environment: int

    @property
    def num_episodes(self) -> int:
        """Episodes that will be played: at least the wanted number."""
        return self.num_environments * self.episodes_per_environment


def share_episodes(num_episodes: int, num_environments: int) -> EpisodeShare:
    """Divide at least ``num_episodes`` among the environments. Fewer episodes than environments use one each.

    Raises:
        ValueError: an argument is below 1.
    """
    if num_episodes < 1 or num_environments < 1:
        raise ValueError(f"num_episodes={num_episodes}, num_environments={num_environments}: both must be at least 1")
    num_environments = min(num_environments, num_episodes)
    return EpisodeShare(
        num_environments=num_environments, episodes_per_environment=-(-num_episodes // num_environments)
    )


def evaluation_seeds(seed: int, num_environments: int) -> list[int]:
    """Return the seeds of the environments. They are unrelated to those of training with the same experiment seed."""
    return [environment_seed(seed, rank, 0, purpose="evaluation") for rank in range(num_environments)]


def acting_noise(seed: int) -> np.random.Generator:
    """Return the generator with which actions are drawn, unless the evaluation is greedy."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_NOISE_DOMAIN,)))


@dataclass(frozen=True, kw_only=True)
class _Episode:
    """An episode that has ended."""

    total: float
    """Its undiscounted return."""
    length: int
    info: Mapping[str, float]
    """By chosen key of ``info``: its finite value, if there is one."""


class Evaluation:
    """Plays ``episodes_per_environment`` episodes in each environment, one step of all of them at a time.

    One thread uses it.
    """

    def __init__(
        self,
        actor: LocalActor,
        envs: VectorEnv,
        *,
        num_steps: int,
        episodes_per_environment: int,
        max_steps: int,
        episode_info: Sequence[str] = (),
        faults: EnvironmentFaults | None = None,
        state: Mapping[str, ArraySpec] | None = None,
    ) -> None:
        """Prepare the evaluation. ``step`` plays it.

        Args:
            actor: Has its weights, for slots of ``num_steps`` steps with one lane per environment.
            envs: Have not been stepped, and report ``episode_info``. The caller closes them.
            faults: Counts the environments' faults; None: the result reports none.
            episode_info: Keys of ``info`` that the result reports.
            state: The spec of the policy's recurrent state by name; None: it has none.
            num_steps: Steps between two checks for the end.
            episodes_per_environment: Episodes that count of each environment. Later episodes do not count.
            max_steps: Steps of each environment after which to give up, rounded up to whole slots.
        """
        self._actor = actor
        self._is_recurrent = bool(state)
        self._envs = envs
        self._num_steps = num_steps
        self._wanted = episodes_per_environment
        self._max_steps = max_steps
        self._faults = faults or EnvironmentFaults()
        self._fields = {key: info_field(key) for key in episode_info}
        layout = rollout_layout(
            envs.spec,
            num_steps=num_steps,
            num_lanes=envs.num_envs,
            state=state,
            episode_info=tuple(episode_info),
        )
        self._slot = Slot(arrays=layout.view(bytearray(layout.nbytes)))
        self._episodes: list[list[_Episode]] = [[] for _ in range(envs.num_envs)]
        self._steps_taken = 0
        """Of each environment, failed ones included."""
        self._num_steps_valid = 0
        """Of all environments, without failed ones, in full slots."""

    def step(self) -> EvaluationResult | None:
        """Take one step in each environment. Return the result once it is there, else None.

        The result is there when all episodes have ended. After ``max_steps`` steps it has those that have ended.

        Raises:
            EvaluationUnfinished: no episode has ended within ``max_steps`` steps, or the mean return is not finite.
            ConfigurationError: a chosen value of ``info`` is not a number.
            EnvironmentFault: too many values in a row are not finite.
            EnvironmentFailed: an environment failed more often than its budget allows.
        """
        step = self._steps_taken % self._num_steps
        if step == 0:
            self._envs.begin(self._slot.arrays)
            self._actor.begin(self._slot)
        self._envs.step(self._slot.arrays, step, self._actor.act(step))
        self._steps_taken += 1
        if step + 1 < self._num_steps:
            return None
        if self._is_recurrent:  # others need no log-probabilities
            self._actor.finish()
        self._collect()
        return self._result()

    def play(self) -> EvaluationResult:
        """Take steps until the result is there. Raise what ``step`` raises."""
        while (result := self.step()) is None:
            pass
        return result

    def _collect(self) -> None:
        """Append the slot's ended episodes to those of their environments, in the order of their ends."""
        arrays = self._slot.arrays
        self._num_steps_valid += int(arrays["mask"].sum())
        for step, lane in np.argwhere(arrays["episode_length"]):
            info = {key: float(arrays[name][step, lane]) for key, name in self._fields.items()}
            episode = _Episode(
                total=float(arrays["episode_return"][step, lane]),
                length=int(arrays["episode_length"][step, lane]),
                info={key: value for key, value in info.items() if math.isfinite(value)},
            )
            self._episodes[lane].append(episode)

    def _result(self) -> EvaluationResult | None:
        fewest = min(map(len, self._episodes))
        if fewest < self._wanted and self._steps_taken < self._max_steps:
            return None
        counted = [episode for ended in self._episodes for episode in ended[: self._wanted]]
        unfinished = "" if fewest >= self._wanted else self._missing(len(counted), fewest)
        if not counted:
            raise EvaluationUnfinished(unfinished)
        result = EvaluationResult(
            returns=tuple(episode.total for episode in counted),
            lengths=tuple(episode.length for episode in counted),
            info={key: [each.info[key] for each in counted if key in each.info] for key in self._fields},
            num_steps=self._num_steps_valid,
            num_faults=self._faults.num_faults,
            unfinished=unfinished,
        )
        if not math.isfinite(result.return_mean):
            raise EvaluationUnfinished(
                f"the mean return is {result.return_mean}: an episode's return exceeds 32-bit floats"
            )
        return result

    def _missing(self, num_ended: int, fewest: int) -> str:
        """Return which episodes have not ended."""
        return (
            f"{num_ended} of {self._wanted * len(self._episodes)} episodes ended in {self._steps_taken} steps of each "
            f"environment; environment {[len(ended) for ended in self._episodes].index(fewest)} ended {fewest} of "
            f"{self._wanted}; allow more steps, or set a time limit on episodes"
        )
