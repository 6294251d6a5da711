"""Running statistics that standardise observations and scale rewards. The trainer owns them.

The observations' statistics are part of each version. A batch is evaluated with the statistics it was acted with (apart
from the policy lag, as with the weights). Only then does the batch update them, for the next version.

Rewards are divided by the standard deviation of the discounted return, as OpenAI Baselines' VecNormalize and
Gymnasium's NormalizeReward do, so that values and advantages have a scale the optimizer can work with. Actors do not
need the rewards' statistics: these stay here, and a batch updates them before it is scaled. Each lane's return so far
continues over rollouts, which may reach different trainers, late or never. So the actors keep it (``envs.returns``),
and slots carry it. After that rewards may be clipped, to any range.
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
"""The name, in the state, of the statistics of the field ``discounted_return``. The observations' names start with
``observation``."""
_GREATEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True, eq=False)
class Moments:
    """Count, mean and squared deviations of arrays of one shape, element by element, in float64."""

    count: NDArray[np.float64]
    """Number of samples, []."""
    mean: NDArray[np.float64]
    """Mean of the samples, [*shape]; 0 without samples."""
    squares: NDArray[np.float64]
    """Sum of the squared deviations from the mean, [*shape]."""

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> Self:
        """Return the moments of no samples."""
        return cls(count=np.zeros(()), mean=np.zeros(shape), squares=np.zeros(shape))

    @property
    def variance(self) -> NDArray[np.float64]:
        """The variance of the samples, [*shape]; 1 without samples."""
        return self.squares / self.count if self.count else np.ones_like(self.squares)

    def sums(self, samples: NDArray[Any]) -> NDArray[np.float64]:
        """Return the sums for ``with_sums``, [1 + 2 * size], of samples [n, *shape]. Sums of several parts add up."""
        deviations = samples.astype(np.float64) - self.mean
        parts = (float(len(samples)), deviations.sum(axis=0).ravel(), np.square(deviations).sum(axis=0).ravel())
        return np.concatenate([np.atleast_1d(part) for part in parts])

    def with_sums(self, sums: NDArray[np.float64]) -> Self:
        """Return the moments with more samples, given by their sums: the pairwise update of Chan et al. (1983)."""
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
    """Standardises chosen observations and, if asked to, scales and clips rewards. One thread uses it.

    Deterministic, also across ``state_dict`` and ``load_state_dict``. The statistics cover all ranks' samples, and are
    equal on all ranks.
    """

    def __init__(
        self,
        observation: Mapping[str, ArraySpec] | None = None,
        *,
        rewards: bool = False,
        reward_clip: float | None = None,
    ) -> None:
        """Start without samples: nothing is scaled yet. ``observation`` names what to standardise, by path.

        ``rewards`` says whether to scale rewards; all rewards are clipped to [-reward_clip, reward_clip].
        """
        self._moments = {path: Moments.zeros(spec.shape) for path, spec in (observation or {}).items()}
        self._paths = tuple(self._moments)
        self._scales_rewards = rewards
        self._reward_clip = reward_clip
        if rewards:
            self._moments[_RETURN] = Moments.zeros(())
        self._statistics = self._published()

    @property
    def statistics(self) -> Arrays:
        """The statistics for the next version's ``Parameters.statistics``; read-only."""
        return self._statistics

    def step(self, slots: Arrays, reduce: Reduce) -> tuple[Arrays, Mapping[str, float]]:
        """Return (slots for the algorithm, metrics); update the statistics.

        Every transition counts once, with the observation it was acted on. A transition is left out of the statistics,
        and counted in ``non_finite_transitions``, if its observation or its ``discounted_return`` is not finite.
        """
        seen, metrics = self._normalized(slots, reduce) if self._moments else (slots, {})
        if self._reward_clip is not None:
            seen = {**seen, "reward": np.clip(seen["reward"], -self._reward_clip, self._reward_clip)}
        return seen, metrics

    def _normalized(self, slots: Arrays, reduce: Reduce) -> tuple[Arrays, Mapping[str, float]]:
        observation = standardized(
            {path: slots[path] for path in self._paths}, standardizations(self._statistics, self._paths)
        )
        num_left_out = self._update(slots, reduce)
        seen = {**slots, **observation}
        if self._scales_rewards:
            seen["reward"] = self._scaled(slots["reward"])
        return seen, {"non_finite_transitions": num_left_out}

    def _update(self, slots: Arrays, reduce: Reduce) -> float:
        """Add all ranks' transitions to the statistics; return how many were left out."""
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
            name: moments.with_sums(part) for (name, moments), part in zip(self._moments.items(), sums, strict=True)
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
                # Beyond the largest float32 a variance would be infinite, and a version must be finite.
                statistics[name] = np.minimum(values, _GREATEST).astype(np.float32)
                statistics[name].flags.writeable = False
        return statistics

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Return copies of the state's arrays, by path."""
        return {
            f"{name}/{part}": array.copy()
            for name, moments in self._moments.items()
            for part, array in vars(moments).items()
        }

    def load_state_dict(self, arrays: Arrays) -> None:
        """Continue from a saved state.

        Raises:
            KeyError: the state is of other observations or rewards; nothing has changed.
        """
        self._moments = {
            name: Moments(**{part: arrays[f"{name}/{part}"].astype(np.float64) for part in vars(moments)})
            for name, moments in self._moments.items()
        }
        self._statistics = self._published()


def normalizable(env_spec: EnvSpec) -> dict[str, ArraySpec]:
    """Return the observations that can be standardised: floats.

    Integers and booleans stay as they are: images have a known scale, and the mean of a flag or code has no meaning.
    """
    return {path: spec for path, spec in env_spec.unmasked.observation.items() if np.dtype(spec.dtype).kind == "f"}
