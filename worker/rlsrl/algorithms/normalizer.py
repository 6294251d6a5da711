"""Running statistics that standardise observations and scale rewards. The trainer owns them.

The observations' statistics are part of each version. A batch is evaluated with the statistics it was acted with (apart
from the policy lag, as with the weights). Only then does the batch update them, for the next version.

Rewards are divided by the standard deviation of the discounted return, as OpenAI Baselines' VecNormalize and
Gymnasium's NormalizeReward do, so that values and advantages have a scale the optimizer can work with. Actors do not
need the rewards' statistics: these stay here, and a batch updates them before it is scaled. Each lane's return so far
continues over rollouts, which may reach different trainers, late or never. So the actors keep it (``envs.returns``),
and slots carry it. After that rewards may be clipped, to any range.

With replay a store keeps raw values. Each transition updates the statistics once, when it has arrived. Rows have the
statistics of the moment when they are drawn, as in Stable-Baselines3's replay buffers (Raffin et al. 2021). Each reward
is scaled and clipped before the rewards of n steps are added up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.algorithms.base import Reduce
from rlsrl.buffers.replay.rows import NEXT
from rlsrl.data.slots import DISCOUNTED_RETURN
from rlsrl.data.specs import Arrays, ArraySpec, EnvSpec
from rlsrl.policies.normalization import (
    CLIP_RANGE,
    EPSILON,
    count_of,
    mean_of,
    standardizations,
    standardized,
    variance_of,
)

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

    @classmethod
    def of(cls, samples: NDArray[Any]) -> Self:
        """Return the moments of samples, [n, *shape]."""
        if not len(samples):
            return cls.zeros(samples.shape[1:])
        values = samples.astype(np.float64)
        mean = np.asarray(values.mean(axis=0))
        squares = np.asarray(np.square(values - mean).sum(axis=0))
        return cls(count=np.asarray(float(len(values))), mean=mean, squares=squares)

    @property
    def variance(self) -> NDArray[np.float64]:
        """The variance of the samples, [*shape]; 1 without samples."""
        return self.squares / self.count if self.count else np.ones_like(self.squares)

    def sums(self, samples: NDArray[Any]) -> NDArray[np.float64]:
        """Return the sums for ``with_sums``, [1 + 2 * size], of samples [n, *shape]. Sums of several parts add up."""
        deviations = samples.astype(np.float64) - self.mean
        parts = (float(len(samples)), deviations.sum(axis=0).ravel(), np.square(deviations).sum(axis=0).ravel())
        return np.concatenate([np.atleast_1d(part) for part in parts])

    def sums_of(self, other: Moments) -> NDArray[np.float64]:
        """Return ``sums`` of the samples whose moments ``other`` has."""
        shift = other.mean - self.mean
        parts = (other.count, other.count * shift, other.squares + other.count * np.square(shift))
        return np.concatenate([np.ravel(part) for part in parts])

    def with_sums(self, sums: NDArray[np.float64]) -> Self:
        """Return the moments with more samples, given by their sums."""
        added = sums[0]
        if added == 0.0:
            return self
        total, squares = (part.reshape(self.mean.shape) for part in np.split(sums[1:], 2))
        shift = total / added
        return self._with(added, shift, np.maximum(squares - added * np.square(shift), 0.0))

    def joined(self, other: Moments) -> Self:
        """Return the moments with the samples of ``other``."""
        return self._with(other.count, other.mean - self.mean, other.squares) if other.count else self

    def _with(self, added: NDArray[np.float64], shift: NDArray[np.float64], squares: NDArray[np.float64]) -> Self:
        """Return the moments with ``added`` samples that have these ``squares`` and a mean that is larger by ``shift``.

        This is the pairwise update of Chan et al. (1983).
        """
        count = self.count + added
        return type(self)(
            count=np.asarray(count),
            mean=np.asarray(self.mean + shift * (added / count)),
            squares=np.asarray(self.squares + squares + np.square(shift) * (self.count * added / count)),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleMoments:
    """What a ``ReplayNormalizer`` learns from some transitions."""

    moments: Mapping[str, Moments]
    """Moments of the samples by name: those of the ``ReplayNormalizer``."""
    num_left_out: int
    """Transitions that are left out, since one of their values is not finite."""


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
        self.fields = (*self._paths, DISCOUNTED_RETURN) if rewards else self._paths
        """The fields of slots that the statistics cover."""
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
        if self._scales_rewards or self._reward_clip is not None:
            seen = {**seen, "reward": self.rewards(slots["reward"])}
        return seen, metrics

    def rewards(self, raw: NDArray[Any]) -> NDArray[np.float32]:
        """Return rewards as the algorithm sees them, scaled by the present statistics and clipped."""
        seen = self._scaled(raw) if self._scales_rewards else raw
        return seen if self._reward_clip is None else np.clip(seen, -self._reward_clip, self._reward_clip)

    def samples_of(self, slots: Arrays) -> Arrays:
        """Return ``fields`` of the transitions of slots, with the observations that were acted on: each [n, ...]."""
        mask = slots["mask"]
        return {field: slots[field][: len(mask)][mask] for field in self.fields}

    def _normalized(self, slots: Arrays, reduce: Reduce) -> tuple[Arrays, Mapping[str, float]]:
        observation = standardized(
            {path: slots[path] for path in self._paths}, standardizations(self._statistics, self._paths)
        )
        num_left_out = self._learn(slots, reduce)
        return {**slots, **observation}, {"non_finite_transitions": num_left_out}

    def _learn(self, slots: Arrays, reduce: Reduce) -> float:
        """Add all ranks' transitions to the statistics; return how many were left out."""
        samples, num_left_out = _finite(self.samples_of(slots))
        named = zip(self._moments.values(), samples, strict=True)
        return self._update(num_left_out, [moments.sums(array) for moments, array in named], reduce)

    def _update(self, num_left_out: int, sums: Sequence[NDArray[np.float64]], reduce: Reduce) -> float:
        """Add all ranks' samples, by this rank's sums for each of the moments; return how many were left out."""
        parts = [np.array([num_left_out], np.float64), *sums]
        of_all, *sums = np.split(reduce(np.concatenate(parts)), np.cumsum([len(part) for part in parts])[:-1])
        self._moments = {
            name: moments.with_sums(part) for (name, moments), part in zip(self._moments.items(), sums, strict=True)
        }
        self._statistics = self._published()
        return float(of_all[0])

    def _scaled(self, reward: NDArray[Any]) -> NDArray[np.float32]:
        scale = np.float32(1.0 / np.sqrt(self._moments[_RETURN].variance + EPSILON))
        with np.errstate(over="ignore"):  # what is infinite is clipped
            return np.clip(reward * scale, -CLIP_RANGE, CLIP_RANGE)

    def _published(self) -> Arrays:
        statistics = {}
        for path in self._paths:
            moments = self._moments[path]
            for name, values in (
                (mean_of(path), moments.mean),
                (variance_of(path), moments.variance),
                (count_of(path), moments.count),
            ):
                # Beyond the largest float32 a variance would be infinite, and a version must be finite.
                statistics[name] = np.asarray(np.minimum(values, _GREATEST), np.float32)
                statistics[name].flags.writeable = False
        return statistics

    def start_from(self, statistics: Arrays) -> None:
        """Start with the observations' statistics of a version. The scale of rewards starts without samples.

        Raises:
            KeyError: the version has no statistics of an observation; nothing has changed.
        """
        given = {}
        for path in self._paths:
            mean, variance, count = (
                np.asarray(statistics[name], np.float64) for name in (mean_of(path), variance_of(path), count_of(path))
            )
            given[path] = Moments(count=count, mean=mean, squares=variance * count)
        self._moments |= given
        self._statistics = self._published()

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


class ReplayNormalizer(Normalizer):
    """The normaliser of rows that are drawn from a store. It learns from transitions apart from them.

    Any thread may use ``fields``, ``samples_of`` and ``moments_of``, which do not depend on the statistics.
    """

    _num_left_out = 0.0
    """Transitions of all ranks that were left out since the last ``step``."""

    @property
    def is_empty(self) -> bool:
        """Whether statistics without a sample would normalise something."""
        return any(moments.count == 0.0 for moments in self._moments.values())

    def moments_of(self, samples: Arrays) -> SampleMoments:
        """Return what to learn from transitions with these ``fields``, each [n, ...]."""
        finite, num_left_out = _finite(samples)
        moments = {name: Moments.of(array) for name, array in zip(self._moments, finite, strict=True)}
        return SampleMoments(moments=moments, num_left_out=num_left_out)

    def joined(self, parts: Iterable[SampleMoments]) -> SampleMoments:
        """Return what to learn from the transitions of all parts, of which there may be none."""
        moments = {name: Moments.zeros(each.mean.shape) for name, each in self._moments.items()}
        num_left_out = 0
        for part in parts:
            moments = {name: each.joined(part.moments[name]) for name, each in moments.items()}
            num_left_out += part.num_left_out
        return SampleMoments(moments=moments, num_left_out=num_left_out)

    def learn(self, found: SampleMoments, reduce: Reduce) -> None:
        """Add all ranks' transitions to the statistics. All ranks call this together."""
        sums = [moments.sums_of(found.moments[name]) for name, moments in self._moments.items()]
        self._num_left_out += self._update(found.num_left_out, sums, reduce)

    @override
    def step(self, slots: Arrays, reduce: Reduce) -> tuple[Arrays, Mapping[str, float]]:
        """Return (rows of ``rlsrl.buffers.replay.rows`` for the algorithm, metrics). Their rewards are ``rewards``."""
        if not self._moments:
            return slots, {}
        found = standardizations(self._statistics, self._paths)
        metrics = {"non_finite_transitions": self._num_left_out}
        self._num_left_out = 0.0
        # Sequences have what transitions lead to among their frames.
        by_path = {name: found[path] for path in found for name in (path, NEXT + path) if name in slots}
        return standardized(slots, by_path), metrics


def _finite(samples: Arrays) -> tuple[list[NDArray[Any]], int]:
    """Return (the arrays without transitions of which any is not finite, the number of these)."""
    finite = np.logical_and.reduce(
        [np.isfinite(array).all(axis=tuple(range(1, array.ndim))) for array in samples.values()]
    )
    return [array[finite] for array in samples.values()], int(np.count_nonzero(~finite))


def normalizable(env_spec: EnvSpec) -> dict[str, ArraySpec]:
    """Return the observations that can be standardised: floats.

    Integers and booleans stay as they are: images have a known scale, and the mean of a flag or code has no meaning.
    """
    return {path: spec for path, spec in env_spec.unmasked.observation.items() if np.dtype(spec.dtype).kind == "f"}
