"""Playing a fixed policy for a fixed number of episodes: for ``rlsrl eval`` and for the evaluator.

Every environment plays the same number of episodes. Taking the first N to finish anywhere would favour short ones,
which are the bad ones where a reward comes with every step, and the good ones where a step costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlsrl.data.slots import Slot, rollout_layout
from rlsrl.envs.seeds import environment_seed
from rlsrl.envs.vector import VectorEnv
from rlsrl.policies.acting import LocalActor

_NOISE_DOMAIN = 21
"""First word of the spawn key; that of no other use of the seed (``envs.seeds``, ``workers.build.common``)."""


class EvaluationUnfinished(RuntimeError):
    """Some environment has not ended its episodes within the steps allowed; the text says which and how far it got."""


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """What the episodes came to; at least one."""

    returns: tuple[float, ...]
    """Undiscounted return of each episode, environment by environment."""
    lengths: tuple[int, ...]
    """Steps of each episode, in the same order."""

    @property
    def num_episodes(self) -> int:
        """How many episodes were played."""
        return len(self.returns)

    @property
    def return_mean(self) -> float:
        """Mean return."""
        return float(np.mean(self.returns))

    @property
    def return_std(self) -> float:
        """Standard deviation of the returns, over the episodes as they are (not an estimate for others)."""
        return float(np.std(self.returns))

    @property
    def length_mean(self) -> float:
        """Mean steps of an episode."""
        return float(np.mean(self.lengths))

    def to_json(self) -> Mapping[str, Any]:
        """The summary as a JSON value."""
        return {
            "episodes": self.num_episodes,
            "return_mean": self.return_mean,
            "return_std": self.return_std,
            "return_min": min(self.returns),
            "return_max": max(self.returns),
            "length_mean": self.length_mean,
        }


@dataclass(frozen=True, kw_only=True)
class EpisodeShare:
    """How a wanted number of episodes is shared out: as few environments as wanted, each with equally many."""

    num_environments: int
    episodes_per_environment: int

    @property
    def num_episodes(self) -> int:
        """Episodes that will be played: at least those wanted."""
        return self.num_environments * self.episodes_per_environment


def share_episodes(num_episodes: int, num_environments: int) -> EpisodeShare:
    """Share out at least ``num_episodes``; with fewer episodes than environments, one each for as many as needed.

    Raises:
        ValueError: one of them is below 1.
    """
    if num_episodes < 1 or num_environments < 1:
        raise ValueError(f"an evaluation has episodes and environments, not {num_episodes} and {num_environments}")
    num_environments = min(num_environments, num_episodes)
    return EpisodeShare(
        num_environments=num_environments, episodes_per_environment=-(-num_episodes // num_environments)
    )


def evaluation_seeds(seed: int, num_environments: int) -> list[int]:
    """Seeds of the environments; unrelated to those of training with the same experiment seed."""
    return [environment_seed(seed, rank, 0, purpose="evaluation") for rank in range(num_environments)]


def acting_noise(seed: int) -> np.random.Generator:
    """What actions are drawn with, where they are drawn."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_NOISE_DOMAIN,)))


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
    ) -> None:
        """Begin; nothing is played yet.

        Args:
            actor: Loaded, and made for slots of ``num_steps`` steps and as many lanes as there are environments.
            envs: Fresh: no step was taken yet. Closing them is left to the caller.
            num_steps: Steps between two looks at who has finished.
            episodes_per_environment: How many; what an environment plays beyond them does not count.
            max_steps: Steps of each environment after which to give up, rounded up to whole slots.
        """
        self._actor = actor
        self._envs = envs
        self._num_steps = num_steps
        self._wanted = episodes_per_environment
        self._max_steps = max_steps
        layout = rollout_layout(envs.spec, num_steps=num_steps, num_lanes=envs.num_envs)
        self._slot = Slot(arrays=layout.view(bytearray(layout.nbytes)))
        self._episodes: list[list[tuple[float, int]]] = [[] for _ in range(envs.num_envs)]
        self._steps_taken = 0

    def step(self) -> EvaluationResult | None:
        """Take one step in each environment; returns what the episodes came to once all have ended.

        Raises:
            EvaluationUnfinished: an environment has not ended its episodes in ``max_steps`` steps.
            EnvironmentFailed: an environment raised.
        """
        step = self._steps_taken % self._num_steps
        if step == 0:
            self._envs.begin(self._slot.arrays)
            self._actor.begin(self._slot)
        # The actor's ``finish`` is left out, for nobody reads log-probabilities.
        self._envs.step(self._slot.arrays, step, self._actor.act(step))
        self._steps_taken += 1
        if step + 1 < self._num_steps:
            return None
        self._collect()
        return self._result()

    def play(self) -> EvaluationResult:
        """Take all steps there are to take; raises what they raise."""
        while (result := self.step()) is None:
            pass
        return result

    def _collect(self) -> None:
        """Append the slot's ended episodes to their environments', in the order of their ends."""
        arrays = self._slot.arrays
        for step, lane in np.argwhere(arrays["episode_length"]):
            episode = (float(arrays["episode_return"][step, lane]), int(arrays["episode_length"][step, lane]))
            self._episodes[lane].append(episode)

    def _result(self) -> EvaluationResult | None:
        fewest = min(map(len, self._episodes))
        if fewest >= self._wanted:
            counted = [episode for done in self._episodes for episode in done[: self._wanted]]
            returns, lengths = zip(*counted, strict=True)
            return EvaluationResult(returns=returns, lengths=lengths)
        if self._steps_taken >= self._max_steps:
            raise EvaluationUnfinished(
                f"environment {[len(done) for done in self._episodes].index(fewest)} ended {fewest} of "
                f"{self._wanted} episodes in {self._steps_taken} steps; does the policy ever end one, or is "
                "there a time limit missing?"
            )
        return None
