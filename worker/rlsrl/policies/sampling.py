"""Drawing actions from distribution parameters, one rollout at a time. numpy only.

Noise is drawn once a rollout and log-probabilities are computed once at its end; a step is a few operations on arrays
of that step.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from rlsrl.data.specs import ActionSpec

Floats = NDArray[np.float32]

DistributionKind = Literal["categorical", "gaussian"]

SMALLEST = np.finfo(np.float32).tiny
"""Keeps the logarithm of an exponential draw finite: a draw can be exactly 0."""
HALF_LOG_TWO_PI = np.float32(0.5 * math.log(2.0 * math.pi))


class Chooser(Protocol):
    """Chooses the actions of one rollout of T steps and N lanes after another. One thread uses it."""

    parameters: Floats
    """Distribution parameters of the rollout, [T, A, N]: step t is written here before ``choose(t)``."""

    def choose(self, step: int, out: NDArray[Any]) -> None:
        """Write the actions of that step, [N, ...], from its parameters."""


class Sampler(Chooser, Protocol):
    """Chooses by noise that it draws."""

    def begin(self) -> None:
        """Draw the noise of a whole rollout."""

    def of_lane(self, lane: int) -> Chooser:
        """Chooses for that lane alone what this one would, by the noise that this one draws: in another thread, after
        ``begin``. Has parameters of its own.
        """

    def log_probs(self, actions: NDArray[Any], out: Floats) -> None:
        """Write the log-probability (density) of each of the rollout's actions, [T, N, ...] -> [T, N]."""


def make_sampler(
    kind: DistributionKind, size: int, *, num_steps: int, num_lanes: int, rng: np.random.Generator, greedy: bool
) -> Sampler:
    """The sampler of a kind of distribution with ``size`` choices or entries.

    ``greedy``: the most probable action, without noise, so that ``rng`` is not used.
    """
    if kind == "categorical":
        return CategoricalSampler(num_steps=num_steps, num_lanes=num_lanes, num_actions=size, rng=rng, greedy=greedy)
    return GaussianSampler(num_steps=num_steps, num_lanes=num_lanes, size=size, rng=rng, greedy=greedy)


def sampler_for(
    action: ActionSpec, *, num_steps: int, num_lanes: int, rng: np.random.Generator, greedy: bool
) -> Sampler:
    """The sampler of such actions."""
    kind: DistributionKind = "categorical" if action.kind == "discrete" else "gaussian"
    size = action.num_actions if action.kind == "discrete" else math.prod(action.array.shape)
    return make_sampler(kind, size, num_steps=num_steps, num_lanes=num_lanes, rng=rng, greedy=greedy)


class CategoricalChooser:
    """Takes argmax(logits + noise); of Gumbel noise that is a draw from softmax(logits): the Gumbel-max trick."""

    def __init__(self, noise: Floats) -> None:
        """Choose by ``noise`` [T, A, N], whatever is in it at the time."""
        self.parameters: Floats = np.zeros(noise.shape, np.float32)
        """Logits, [T, A, N]."""
        self._steps = list(zip(self.parameters, noise, strict=True))
        self._perturbed: Floats = np.empty(noise.shape[1:], np.float32)

    def choose(self, step: int, out: NDArray[Any]) -> None:
        """Write the actions of that step, [N] int64, from its logits."""
        logits, noise = self._steps[step]
        np.add(logits, noise, out=self._perturbed)
        self._perturbed.argmax(0, out=out)


class CategoricalSampler(CategoricalChooser):
    """Draws from softmax(logits)."""

    def __init__(
        self, *, num_steps: int, num_lanes: int, num_actions: int, rng: np.random.Generator, greedy: bool
    ) -> None:
        self._rng = None if greedy else rng
        self._noise: Floats = np.zeros((num_steps, num_actions, num_lanes), np.float32)
        super().__init__(self._noise)

    def begin(self) -> None:
        """Draw the noise of a whole rollout."""
        if self._rng is None:
            return
        noise = self._noise
        self._rng.standard_exponential(out=noise, dtype=np.float32)
        np.maximum(noise, SMALLEST, out=noise)
        np.log(noise, out=noise)
        np.negative(noise, out=noise)

    def of_lane(self, lane: int) -> CategoricalChooser:
        """See ``Sampler``."""
        return CategoricalChooser(self._noise[:, :, lane : lane + 1])

    def log_probs(self, actions: NDArray[Any], out: Floats) -> None:
        """Write the log-probability of each of the rollout's actions, both [T, N]."""
        shifted = self.parameters - self.parameters.max(axis=1, keepdims=True)
        chosen = np.take_along_axis(shifted, actions[:, np.newaxis], axis=1)[:, 0]
        np.subtract(chosen, np.log(np.exp(shifted).sum(axis=1)), out=out)


class GaussianChooser:
    """Takes mean + std * noise; of standard normal noise that is a draw from N(mean, diag(std^2))."""

    def __init__(self, noise: Floats) -> None:
        """Choose by ``noise`` [T, D, N], whatever is in it at the time."""
        num_steps, size, num_lanes = noise.shape
        self.parameters: Floats = np.zeros((num_steps, 2 * size, num_lanes), np.float32)
        """Means, then logarithms of the standard deviations, [T, 2D, N]."""
        self._mean, self._log_std = self.parameters[:, :size], self.parameters[:, size:]
        self._steps = list(zip(self._mean, self._log_std, noise, strict=True))
        self._deviation: Floats = np.empty((size, num_lanes), np.float32)

    def choose(self, step: int, out: NDArray[Any]) -> None:
        """Write the actions of that step, [N, D], as drawn: whoever steps the environment keeps them in its bounds."""
        mean, log_std, noise = self._steps[step]
        deviation = np.exp(log_std, out=self._deviation)
        np.multiply(deviation, noise, out=deviation)
        np.add(mean, deviation, out=out.T)


class GaussianSampler(GaussianChooser):
    """Draws from N(mean, diag(std^2)). The most probable action is the mean."""

    def __init__(self, *, num_steps: int, num_lanes: int, size: int, rng: np.random.Generator, greedy: bool) -> None:
        self._rng = None if greedy else rng
        self._noise: Floats = np.zeros((num_steps, size, num_lanes), np.float32)
        super().__init__(self._noise)

    def begin(self) -> None:
        """Draw the noise of a whole rollout."""
        if self._rng is not None:
            self._rng.standard_normal(out=self._noise, dtype=np.float32)

    def of_lane(self, lane: int) -> GaussianChooser:
        """See ``Sampler``."""
        return GaussianChooser(self._noise[:, :, lane : lane + 1])

    def log_probs(self, actions: NDArray[Any], out: Floats) -> None:
        """Write the logarithm of the density at each of the rollout's actions, [T, N, D] -> [T, N]."""
        deviation = (actions.transpose(0, 2, 1) - self._mean) * np.exp(-self._log_std)
        np.sum(-0.5 * np.square(deviation) - self._log_std - HALF_LOG_TWO_PI, axis=1, out=out)
