"""Drawing actions from distribution parameters, one rollout at a time. numpy only.

Noise is drawn once per rollout, and log-probabilities are computed once at its end. A step costs a few operations on
that step's arrays.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.data.specs import ActionPart, ActionSpec, PartKind
from rlsrl.policies.epsilon_greedy import raise_epsilon
from rlsrl.policies.exploration import UNIFORM_LOG_STD
from rlsrl.policies.exported import LOG_STD_RANGE, SMALLEST
from rlsrl.policies.pink_noise import PinkNoise, PinkProcess

Floats = NDArray[np.float32]

HALF_LOG_TWO_PI = np.float32(0.5 * math.log(2.0 * math.pi))
LOG_TWO = np.float32(math.log(2.0))
SQRT_TWO_OVER_PI = np.float32(math.sqrt(2.0 / math.pi))
LARGEST_TANH = np.float32(1.0 - 1e-6)
"""Squashed actions are cut to this before their tanh is undone: in float32 it reaches 1."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Exploration:
    """How an actor's lanes explore, beside what the policy's distributions say."""

    exponents: Floats | None = None
    """The power of each lane's epsilon, [N], where actions are chosen by their values; None: 1."""
    pink: PinkNoise | None = None
    """The noise of vectors of floats; None: independent from step to step."""


AS_DISTRIBUTED = Exploration()
"""Lanes explore as the distributions say."""


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


class PartSampler(Sampler):
    """A sampler of one part of an action."""

    PARAMETERS_PER_OUTPUT = 1

    def __init__(self, noise: Floats, rng: np.random.Generator | None, parameters: Floats | None = None) -> None:
        """``parameters`` is the part's slice of a joint action's parameters, [T, P, N]; None: an array of its own."""
        super().__init__(noise, rng)
        num_steps, size, num_lanes = noise.shape
        shape = num_steps, size * self.PARAMETERS_PER_OUTPUT, num_lanes
        self.parameters = np.zeros(shape, np.float32) if parameters is None else parameters


class LogitSampler(PartSampler):
    """A sampler whose parameters are logits, one for each output, and which draws by adding noise to them."""

    def __init__(self, noise: Floats, rng: np.random.Generator | None, parameters: Floats | None = None) -> None:
        """``noise`` is [T, A, N]: A choices, or A flags."""
        super().__init__(noise, rng, parameters)
        self._steps = list(zip(self.parameters, noise, strict=True))
        self._perturbed: Floats = np.empty(noise.shape[1:], np.float32)


class CategoricalSampler(LogitSampler):
    """Draws from softmax(logits) as argmax(logits + Gumbel noise): the Gumbel-max trick. Parameters are the logits."""

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


class EpsilonGreedySampler(CategoricalSampler):
    """Draws from epsilon-greedy distributions, with another epsilon in each lane."""

    def __init__(self, noise: Floats, rng: np.random.Generator | None, exponents: Floats) -> None:
        """Raise the epsilon of each lane to its power, ``exponents`` [N]."""
        super().__init__(noise, rng)
        self._exponents = exponents

    @override
    def choose(self, step: int, out: NDArray[Any]) -> None:
        raise_epsilon(self.parameters[step], self._exponents)
        super().choose(step, out)

    @override
    def of_lane(self, lane: int) -> Sampler:
        return EpsilonGreedySampler(self._noise[:, :, lane : lane + 1], None, self._exponents[lane : lane + 1])


class BernoulliSampler(LogitSampler):
    """Draws each flag as logit + logistic noise > 0, which is true with probability sigmoid(logit)."""

    @override
    def _draw(self, rng: np.random.Generator) -> None:
        noise = self._noise
        rng.random(out=noise, dtype=np.float32)
        np.maximum(noise, SMALLEST, out=noise)
        np.subtract(np.log(noise), np.log1p(-noise), out=noise)

    @override
    def choose(self, step: int, out: NDArray[Any]) -> None:
        logits, noise = self._steps[step]
        np.greater(np.add(logits, noise, out=self._perturbed), 0.0, out=out.T)

    @override
    def log_probs(self, actions: NDArray[Any], out: Floats) -> None:
        signs = np.where(actions.transpose(0, 2, 1) != 0, np.float32(1.0), np.float32(-1.0))
        np.negative(np.logaddexp(np.float32(0.0), -signs * self.parameters).sum(axis=1), out=out)


class GaussianSampler(PartSampler):
    """Draws from N(mean, diag(std^2)) as mean + std * standard normal noise. The most probable action is the mean.

    Parameters are the means, then the logarithms of the standard deviations.
    """

    PARAMETERS_PER_OUTPUT = 2

    pink: PinkProcess | None = None
    """Draws the noise; None: it is independent from step to step."""

    def __init__(self, noise: Floats, rng: np.random.Generator | None, parameters: Floats | None = None) -> None:
        """``noise`` is [T, D, N]."""
        super().__init__(noise, rng, parameters)
        _, size, num_lanes = noise.shape
        self._mean, self._log_std = self.parameters[:, :size], self.parameters[:, size:]
        self._steps = list(zip(self._mean, self._log_std, noise, strict=True))
        self._deviation: Floats = np.empty((size, num_lanes), np.float32)

    @override
    def _draw(self, rng: np.random.Generator) -> None:
        if self.pink is None:
            rng.standard_normal(out=self._noise, dtype=np.float32)
        else:
            self.pink.fill(self._noise, rng)

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


class BoundedSampler(GaussianSampler):
    """Draws vectors within [-1, 1]. They are uniform if the deviations say so (``exploration.UNIFORM_LOG_STD``)."""

    @override
    def choose(self, step: int, out: NDArray[Any]) -> None:
        """Write the actions, which the environment's wrapper scales to its bounds."""
        mean, log_std, noise = self._steps[step]
        if log_std[0, 0] < UNIFORM_LOG_STD:
            self._write(mean, log_std, noise, out)
        elif noise.any():
            self._write_uniform(noise, out)
        else:  # greedy: the most probable action is that of the mean, whatever is still drawn at random
            self._write(mean, noise, noise, out)

    @abstractmethod
    def _write(self, mean: Floats, log_std: Floats, noise: Floats, out: NDArray[Any]) -> None:
        """Write the actions, [N, D], by means, logarithms of deviations and noise, each [D, N]."""

    def _write_uniform(self, noise: Floats, out: NDArray[Any]) -> None:
        """Write actions that are uniform within [-1, 1], by normal noise [D, N].

        They are ``2 Phi(noise) - 1`` with the normal distribution function Phi, of which numpy has none. The tanh of
        Hendrycks and Gimpel (2016, "Gaussian error linear units") differs from it by at most 0.001.
        """
        scaled = np.square(noise, out=self._deviation)
        scaled *= 0.044715
        scaled += 1.0
        scaled *= noise
        scaled *= SQRT_TWO_OVER_PI
        np.tanh(scaled, out=out.T)

    def _write_uniform_log_probs(self, out: Floats) -> None:
        """Write the logarithms of the densities, [T, N], of those actions that were uniform."""
        out[self._log_std[:, 0] >= UNIFORM_LOG_STD] = -LOG_TWO * self._log_std.shape[1]


class SquashedSampler(BoundedSampler):
    """Draws tanh(u) of u from N(mean, diag(std^2)): the squashed Gaussian of soft actor-critic (Haarnoja et al. 2018).

    The logarithms of deviations are cut to ``LOG_STD_RANGE``. The action of greedy evaluation is the tanh of the mean.
    """

    @override
    def _write(self, mean: Floats, log_std: Floats, noise: Floats, out: NDArray[Any]) -> None:
        deviation = np.clip(log_std, *LOG_STD_RANGE, out=self._deviation)
        np.exp(deviation, out=deviation)
        deviation *= noise
        deviation += mean
        np.tanh(deviation, out=out.T)

    @override
    def log_probs(self, actions: NDArray[Any], out: Floats) -> None:
        """Write the logarithms of the densities of the actions within [-1, 1]^D (Haarnoja et al., equation 21)."""
        squashed = np.clip(actions.transpose(0, 2, 1), -LARGEST_TANH, LARGEST_TANH)
        log_std = np.clip(self._log_std, *LOG_STD_RANGE)
        deviation = (np.arctanh(squashed) - self._mean) * np.exp(-log_std)
        density = -0.5 * np.square(deviation) - log_std - HALF_LOG_TWO_PI - np.log1p(-np.square(squashed))
        np.sum(density, axis=1, out=out)
        self._write_uniform_log_probs(out)


class ClippedSampler(BoundedSampler):
    """Draws mean + std * standard normal noise and cuts it to [-1, 1]."""

    @override
    def _write(self, mean: Floats, log_std: Floats, noise: Floats, out: NDArray[Any]) -> None:
        deviation = np.exp(log_std, out=self._deviation)
        deviation *= noise
        deviation += mean
        np.clip(deviation, -1.0, 1.0, out=out.T)

    @override
    def log_probs(self, actions: NDArray[Any], out: Floats) -> None:
        """Write the logarithms of the densities before the cut, at the actions after it."""
        super().log_probs(actions, out)
        self._write_uniform_log_probs(out)


SAMPLERS: Mapping[PartKind, type[PartSampler]] = {
    "categorical": CategoricalSampler,
    "bernoulli": BernoulliSampler,
    "gaussian": GaussianSampler,
    "squashed": SquashedSampler,
    "clipped": ClippedSampler,
}
"""Samplers by kind of part."""


class JointSampler(Sampler):
    """Draws each part of an action by a sampler of its own, one part after the other. Parts are independent."""

    def __init__(
        self,
        parts: Sequence[ActionPart],
        noises: Sequence[Floats],
        rng: np.random.Generator | None,
        pink: PinkNoise | None = None,
    ) -> None:
        """``noises`` has the noise of each part, [T, num_outputs, N]."""
        super().__init__(noises[0], rng)
        num_steps, _, num_lanes = noises[0].shape
        ends = [0, *accumulate(part.num_parameters for part in parts)]
        self.parameters = np.zeros((num_steps, ends[-1], num_lanes), np.float32)
        self._parts = tuple(parts)
        self._noises = tuple(noises)
        self._samplers = [
            _sampler_of(part, number, noise, rng, self.parameters[:, begin:end], pink)
            for number, (part, noise, (begin, end)) in enumerate(zip(parts, noises, pairwise(ends), strict=True))
        ]
        entries = pairwise([0, *accumulate(part.num_entries for part in parts)])
        self._places = [
            begin if part.kind == "categorical" else slice(begin, end)
            for part, (begin, end) in zip(parts, entries, strict=True)
        ]
        """The entries of each part in the action's array: one place for a choice."""
        self._choice: NDArray[np.int64] = np.zeros(num_lanes, np.int64)

    @override
    def _draw(self, rng: np.random.Generator) -> None:
        for sampler in self._samplers:
            sampler.begin()

    @override
    def choose(self, step: int, out: NDArray[Any]) -> None:
        for sampler, place in zip(self._samplers, self._places, strict=True):
            if isinstance(place, slice):
                sampler.choose(step, out[:, place])
            else:
                sampler.choose(step, self._choice)
                out[:, place] = self._choice

    @override
    def log_probs(self, actions: NDArray[Any], out: Floats) -> None:
        of_part = np.empty_like(out)
        out.fill(0.0)
        for sampler, place in zip(self._samplers, self._places, strict=True):
            entries = actions[..., place]
            sampler.log_probs(entries if isinstance(place, slice) else entries.astype(np.int64), of_part)
            out += of_part

    @override
    def of_lane(self, lane: int) -> Sampler:
        return JointSampler(self._parts, [noise[:, :, lane : lane + 1] for noise in self._noises], None)


def make_sampler(
    parts: Sequence[ActionPart],
    *,
    is_joint: bool,
    num_steps: int,
    num_lanes: int,
    rng: np.random.Generator,
    greedy: bool,
    exploration: Exploration = AS_DISTRIBUTED,
) -> Sampler:
    """Return the sampler of actions with those parts.

    ``is_joint``: actions are vectors, [N, entries], also with one part.
    ``greedy``: take the most probable action. Nothing is drawn from ``rng`` then.
    """
    noises = [np.zeros((num_steps, part.num_outputs, num_lanes), np.float32) for part in parts]
    drawn_from = None if greedy else rng
    if exploration.exponents is not None:
        return EpsilonGreedySampler(noises[0], drawn_from, exploration.exponents)
    if is_joint:
        return JointSampler(parts, noises, drawn_from, exploration.pink)
    return _sampler_of(parts[0], 0, noises[0], drawn_from, None, exploration.pink)


def _sampler_of(
    part: ActionPart,
    number: int,
    noise: Floats,
    rng: np.random.Generator | None,
    parameters: Floats | None,
    pink: PinkNoise | None,
) -> PartSampler:
    """Return the sampler of the part of that number."""
    sampler = SAMPLERS[part.kind](noise, rng, parameters)
    if pink is not None and isinstance(sampler, GaussianSampler):
        sampler.pink = pink.of_part(number, noise.shape[1:])
    return sampler


def sampler_for(
    action: ActionSpec,
    *,
    num_steps: int,
    num_lanes: int,
    rng: np.random.Generator,
    greedy: bool,
    exploration: Exploration = AS_DISTRIBUTED,
) -> Sampler:
    """Return the sampler of such actions: see ``make_sampler``."""
    return make_sampler(
        action.parts,
        is_joint=action.kind == "joint",
        num_steps=num_steps,
        num_lanes=num_lanes,
        rng=rng,
        greedy=greedy,
        exploration=exploration,
    )
