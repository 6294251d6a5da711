"""The running statistics by which observations are standardised and rewards scaled. They belong to the trainer.

The statistics of the observations are part of each version: a batch is evaluated with those it was acted with (but for
the policy lag, as with the weights), and only then moves them on, to be published with the next version.

Rewards are divided by the standard deviation of the discounted return, as OpenAI Baselines' VecNormalize and
Gymnasium's NormalizeReward do, so that values and advantages have a scale the optimizer can work with. Nobody acts on
them, so their statistics stay here, and a batch moves them before it is scaled by them. The return so far of each lane
goes on over rollouts, which may reach different trainers, late or never: so the actors keep it (``envs.returns``) and
slots carry it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlsrl.algorithms.base import Reduce
from rlsrl.data.slots import DISCOUNTED_RETURN
from rlsrl.data.specs import Arrays, ArraySpec, EnvSpec
from rlsrl.policies.normalization import CLIP_RANGE, EPSILON, mean_of, standardizations, standardized, variance_of

_RETURN = "return"
"""The name of the returns' statistics in the state; those of observations begin with ``observation``."""
_GREATEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True, eq=False)
class Moments:
    """Count, mean and spread of arrays of one shape, entry by entry, in float64."""

    count: NDArray[np.float64]
    """Samples so far, []."""
    mean: NDArray[np.float64]
    """[*shape]; 0 without samples."""
    squares: NDArray[np.float64]
    """Sum of the squared deviations from the mean, [*shape]."""

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> Self:
        """Those of no samples."""
        return cls(count=np.zeros(()), mean=np.zeros(shape), squares=np.zeros(shape))

    @property
    def variance(self) -> NDArray[np.float64]:
        """[*shape]; 1 without samples."""
        return self.squares / self.count if self.count else np.ones_like(self.squares)

    def sums(self, samples: NDArray[Any]) -> NDArray[np.float64]:
        """What ``with_sums`` needs of samples [n, *shape]: sums of several parts add up. [1 + 2 * size]."""
        deviations = samples.astype(np.float64) - self.mean
        parts = (float(len(samples)), deviations.sum(axis=0).ravel(), np.square(deviations).sum(axis=0).ravel())
        return np.concatenate([np.atleast_1d(part) for part in parts])

    def with_sums(self, sums: NDArray[np.float64]) -> Self:
        """Those of the samples so far and of those whose sums are given, by the pairwise update of Chan et al. 1983."""
        added = sums[0]
        if added == 0.0:
            return self
        total, squares = (part.reshape(self.mean.shape) for part in np.split(sums[1:], 2))
        count, shift = self.count + added, total / added
        within = np.maximum(squares - added * np.square(shift), 0.0)
        return type(self)(
            count=np.asarray(count),
            mean=np.asarray(self.mean + shift * (added / count)),
            squares=np.asarray(self.squares + within + np.square(shift) * (self.count * added / count)),
        )


class Normalizer:
    """Standardises the observations named to it and scales rewards if asked to. One thread uses it.

    Deterministic, also across ``state_dict`` and ``load_state_dict``; equal on all ranks, over whose samples together
    the statistics are.
    """

    def __init__(self, observation: Mapping[str, ArraySpec] | None = None, *, rewards: bool = False) -> None:
        """Begin without samples: nothing is shifted or scaled. ``observation``: what to standardise, by path."""
        self._moments = {path: Moments.zeros(spec.shape) for path, spec in (observation or {}).items()}
        self._paths = tuple(self._moments)
        self._scales_rewards = rewards
        if rewards:
            self._moments[_RETURN] = Moments.zeros(())
        self._statistics = self._published()

    @property
    def statistics(self) -> Arrays:
        """What ``Parameters.statistics`` of the version to be published next holds; read-only."""
        return self._statistics

    def step(self, slots: Arrays, reduce: Reduce) -> tuple[Arrays, Mapping[str, float]]:
        """(slots as the algorithm sees them, metrics); moves the statistics on.

        Every transition counts once, with the observation it was acted on. One whose observation or return is not
        finite is left out of the statistics and counted.
        """
        if not self._moments:
            return slots, {}
        observation = standardized(
            {path: slots[path] for path in self._paths}, standardizations(self._statistics, self._paths)
        )
        num_left_out = self._learn(slots, reduce)
        seen = {**slots, **observation}
        if self._scales_rewards:
            seen["reward"] = self._scaled(slots["reward"])
        return seen, {"non_finite_transitions": num_left_out}

    def _learn(self, slots: Arrays, reduce: Reduce) -> float:
        """Take in all ranks' transitions; returns how many were left out."""
        mask = slots["mask"]
        samples = {path: slots[path][:-1][mask] for path in self._paths}
        if self._scales_rewards:
            samples[_RETURN] = slots[DISCOUNTED_RETURN][mask]
        finite = np.ones(np.count_nonzero(mask), np.bool_)
        for array in samples.values():
            finite &= np.isfinite(array).reshape(len(array), -1).all(axis=1)
        parts = [np.array([np.count_nonzero(~finite)], np.float64)]
        parts += [moments.sums(samples[name][finite]) for name, moments in self._moments.items()]
        num_left_out, *sums = np.split(reduce(np.concatenate(parts)), np.cumsum([len(part) for part in parts])[:-1])
        self._moments = {
            name: moments.with_sums(each) for (name, moments), each in zip(self._moments.items(), sums, strict=True)
        }
        self._statistics = self._published()
        return float(num_left_out[0])

    def _scaled(self, reward: NDArray[Any]) -> NDArray[np.float32]:
        scale = np.float32(1.0 / np.sqrt(self._moments[_RETURN].variance + EPSILON))
        return np.clip(reward * scale, -CLIP_RANGE, CLIP_RANGE)

    def _published(self) -> Arrays:
        statistics = {}
        for path in self._paths:
            moments = self._moments[path]
            for name, values in ((mean_of(path), moments.mean), (variance_of(path), moments.variance)):
                # A variance beyond what float32 holds would be infinite, and no version may be.
                statistics[name] = np.minimum(values, _GREATEST).astype(np.float32)
                statistics[name].flags.writeable = False
        return statistics

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Arrays by path, to resume from; copies."""
        return {
            f"{name}/{part}": array.copy()
            for name, moments in self._moments.items()
            for part, array in vars(moments).items()
        }

    def load_state_dict(self, arrays: Arrays) -> None:
        """Go on where ``state_dict`` was taken.

        Raises:
            KeyError: it is not a state of the same observations and rewards; nothing has changed.
        """
        self._moments = {
            name: Moments(**{part: arrays[f"{name}/{part}"].astype(np.float64) for part in vars(moments)})
            for name, moments in self._moments.items()
        }
        self._statistics = self._published()


def normalizable(env_spec: EnvSpec) -> dict[str, ArraySpec]:
    """The observations that are standardised where that is asked for: floats.

    Integers and booleans stay as they are: images have a scale of their own, and flags and codes no mean that says
    anything.
    """
    return {path: spec for path, spec in env_spec.unmasked.observation.items() if np.dtype(spec.dtype).kind == "f"}
