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
from rlsrl.policies.acting import RolloutActor

_NOISE_DOMAIN = 21
"""First word of the spawn key; that of no other use of the seed (``envs.seeds``, ``workers.build.common``)."""


class EvaluationUnfinished(RuntimeError):  # noqa: N818 - named for the fact
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


def evaluate(
    actor: RolloutActor, envs: VectorEnv, *, num_steps: int, episodes_per_environment: int, max_steps: int
) -> EvaluationResult:
    """Play ``episodes_per_environment`` episodes in each environment.

    Args:
        actor: Loaded, and made for slots of ``num_steps`` steps and as many lanes as there are environments.
        envs: Fresh: no step was taken yet. Closing them is left to the caller.
        num_steps: Steps between two looks at who has finished.
        episodes_per_environment: How many; what an environment plays beyond them does not count.
        max_steps: Steps of each environment after which to give up, rounded up to whole slots.

    Raises:
        EvaluationUnfinished: an environment has not ended its episodes in ``max_steps`` steps.
        EnvironmentFailed: an environment raised.
    """
    layout = rollout_layout(envs.spec, num_steps=num_steps, num_lanes=envs.num_envs)
    slot = Slot(arrays=layout.view(bytearray(layout.nbytes)))
    episodes: list[list[tuple[float, int]]] = [[] for _ in range(envs.num_envs)]
    steps_taken = 0
    while (fewest := min(map(len, episodes))) < episodes_per_environment:
        if steps_taken >= max_steps:
            raise EvaluationUnfinished(
                f"environment {[len(done) for done in episodes].index(fewest)} ended {fewest} of "
                f"{episodes_per_environment} episodes in {steps_taken} steps; does the policy ever end one, or is "
                "there a time limit missing?"
            )
        _play(actor, envs, slot, num_steps)
        _collect(slot, episodes)
        steps_taken += num_steps
    counted = [episode for done in episodes for episode in done[:episodes_per_environment]]
    return EvaluationResult(
        returns=tuple(episode_return for episode_return, _ in counted), lengths=tuple(length for _, length in counted)
    )


def _play(actor: RolloutActor, envs: VectorEnv, slot: Slot, num_steps: int) -> None:
    """Fill the slot; the actor's ``finish`` is left out, for nobody reads log-probabilities."""
    envs.begin(slot.arrays)
    actor.begin(slot)
    for step in range(num_steps):
        envs.step(slot.arrays, step, actor.act(step))


def _collect(slot: Slot, episodes: list[list[tuple[float, int]]]) -> None:
    """Append the slot's ended episodes to their environments', in the order of their ends."""
    arrays = slot.arrays
    for step, lane in np.argwhere(arrays["terminated"] | arrays["truncated"]):
        episodes[lane].append((float(arrays["episode_return"][step, lane]), int(arrays["episode_length"][step, lane])))
