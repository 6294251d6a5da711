"""Drawing actions from distribution parameters, one rollout at a time. numpy only.

Noise is drawn once per rollout, and log-probabilities are computed once at its end. A step costs a few operations on
that step's arrays.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.data.specs import ActionSpec

Floats = NDArray[np.float32]

DistributionKind = Literal["categorical", "gaussian"]

SMALLEST = np.finfo(np.float32).tiny
"""Lower bound of exponential draws: a draw can be exactly 0, and its logarithm must be finite."""
HALF_LOG_TWO_PI = np.float32(0.5 * math.log(2.0 * math.pi))


class Sampler(ABC):
    """Draws the actions of one rollout of T steps and N lanes after another. One thread uses it."""

    parameters: Floats
    """Distribution parameters of the rollout, [T, A, N]. The caller writes step t before ``choose(t)``."""

    def __init__(self, noise: Floats, rng: np.random.Generator | None) -> None:
        """Draw actions with ``noise`` [T, ., N], which ``begin`` refills from ``rng``.

        Without ``rng``, ``begin`` leaves the noise as it is: zeros choose the most probable action.
        """
        self._noise = noise
        self._rng = rng

    def begin(self) -> None:
        """Draw the noise of a whole rollout."""
        if self._rng is not None:
            self._draw(self._rng)

    @abstractmethod
    def _draw(self, rng: np.random.Generator) -> None:
        """Refill the noise."""

    @abstractmethod
    def choose(self, step: int, out: NDArray[Any]) -> None:
        """Write the actions of that step, [N, ...], from its parameters."""

    @abstractmethod
    def log_probs(self, actions: NDArray[Any], out: Floats) -> None:
        """Write the log-probability (density) of each of the rollout's actions, [T, N, ...] -> [T, N]."""

    def of_lane(self, lane: int) -> Sampler:
        """Return a sampler of that lane alone, with its own parameters and a view of this sampler's noise.

        It chooses what this sampler would choose for the lane. Another thread may use it once this sampler's ``begin``
        has returned.
        """
        return type(self)(self._noise[:, :, lane : lane + 1], None)


class CategoricalSampler(Sampler):
    """Draws from softmax(logits) as argmax(logits + Gumbel noise): the Gumbel-max trick."""

    def __init__(self, noise: Floats, rng: np.random.Generator | None) -> None:
        """``noise`` is [T, A, N]."""
        super().__init__(noise, rng)
        self.parameters: Floats = np.zeros(noise.shape, np.float32)
        """Logits, [T, A, N]."""
        self._steps = list(zip(self.parameters, noise, strict=True))
        self._perturbed: Floats = np.empty(noise.shape[1:], np.float32)

    @override
    def _draw(self, rng: np.random.Generator) -> None:
        noise = self._noise
        rng.standard_exponential(out=noise, dtype=np.float32)
        np.maximum(noise, SMALLEST, out=noise)
        np.log(noise, out=noise)
        np.negative(noise, out=noise)

    @override
    def choose(self, step: int, out: NDArray[Any]) -> None:
        logits, noise = self._steps[step]
        np.add(logits, noise, out=self._perturbed)
        self._perturbed.argmax(0, out=out)

    @override
    def log_probs(self, actions: NDArray[Any], out: Floats) -> None:
        shifted = self.parameters - self.parameters.max(axis=1, keepdims=True)
        chosen = np.take_along_axis(shifted, actions[:, np.newaxis], axis=1)[:, 0]
        np.subtract(chosen, np.log(np.exp(shifted).sum(axis=1)), out=out)


class GaussianSampler(Sampler):
    """Draws from N(mean, diag(std^2)) as mean + std * standard normal noise. The most probable action is the mean."""

    def __init__(self, noise: Floats, rng: np.random.Generator | None) -> None:
        """``noise`` is [T, D, N]."""
        super().__init__(noise, rng)
        num_steps, size, num_lanes = noise.shape
        self.parameters: Floats = np.zeros((num_steps, 2 * size, num_lanes), np.float32)
        """Means, then logarithms of the standard deviations, [T, 2D, N]."""
        self._mean, self._log_std = self.parameters[:, :size], self.parameters[:, size:]
        self._steps = list(zip(self._mean, self._log_std, noise, strict=True))
        self._deviation: Floats = np.empty((size, num_lanes), np.float32)

    @override
    def _draw(self, rng: np.random.Generator) -> None:
        rng.standard_normal(out=self._noise, dtype=np.float32)

    @override
    def choose(self, step: int, out: NDArray[Any]) -> None:
        """Write the actions as drawn: the environment's adapter clips them to its bounds."""
        mean, log_std, noise = self._steps[step]
        deviation = np.exp(log_std, out=self._deviation)
        np.multiply(deviation, noise, out=deviation)
        np.add(mean, deviation, out=out.T)

    @override
    def log_probs(self, actions: NDArray[Any], out: Floats) -> None:
        deviation = (actions.transpose(0, 2, 1) - self._mean) * np.exp(-self._log_std)
        np.sum(-0.5 * np.square(deviation) - self._log_std - HALF_LOG_TWO_PI, axis=1, out=out)


SAMPLERS: dict[DistributionKind, type[Sampler]] = {"categorical": CategoricalSampler, "gaussian": GaussianSampler}
"""Samplers by kind of distribution."""


def make_sampler(
    kind: DistributionKind, size: int, *, num_steps: int, num_lanes: int, rng: np.random.Generator, greedy: bool
) -> Sampler:
    """Return the sampler of a kind of distribution with ``size`` choices or entries.

    ``greedy``: take the most probable action. Nothing is drawn from ``rng`` then.
    """
    return SAMPLERS[kind](np.zeros((num_steps, size, num_lanes), np.float32), None if greedy else rng)


def sampler_for(
    action: ActionSpec, *, num_steps: int, num_lanes: int, rng: np.random.Generator, greedy: bool
) -> Sampler:
    """Return the sampler of such actions."""
    kind: DistributionKind = "categorical" if action.kind == "discrete" else "gaussian"
    size = action.num_actions if action.kind == "discrete" else math.prod(action.array.shape)
    return make_sampler(kind, size, num_steps=num_steps, num_lanes=num_lanes, rng=rng, greedy=greedy)
