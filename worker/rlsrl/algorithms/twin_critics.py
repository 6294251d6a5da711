"""What soft actor-critic and TD3 share: two critics that learn from a store, and target networks that follow slowly."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from rlsrl.algorithms.base import (
    ERRORS,
    WEIGHT,
    Algorithm,
    Batch,
    Evaluate,
    ParameterGroup,
    Reduce,
    Tensors,
)
from rlsrl.algorithms.rows import IMPORTANCE_EXPONENT, corrected_weights, drawn_batch, drawn_schedule
from rlsrl.algorithms.schedules import Scheduled, scheduled, value_at
from rlsrl.api.spec import TwinCriticSettings
from rlsrl.buffers.replay.rows import NEXT
from rlsrl.data.specs import Arrays, EnvSpec
from rlsrl.policies.critics import ACTION, CRITICS, TwinCritics
from rlsrl.policies.exploration import UNIFORM
from rlsrl.policies.functional import PureNetwork
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.runtime.errors import ConfigurationError

CRITIC_LEARNING_RATE = "critic_learning_rate"
NOISE, NEXT_NOISE = "noise", "next_noise"
"""Keys of the schedule: standard normal noise of the actions in the rows and of those that follow, [K, M, D] each."""
Settings = TypeVar("Settings", bound=TwinCriticSettings)


def coefficients(settings: TwinCriticSettings, end: int | None) -> dict[str, Scheduled]:
    """Return what may change: see ``catalog.Implementation.coefficients``."""
    return {
        CRITIC_LEARNING_RATE: scheduled(settings.critic_learning_rate, settings.critic_learning_rate_schedule, end),
        IMPORTANCE_EXPONENT: scheduled(settings.importance_exponent, settings.importance_exponent_schedule, end),
    }


def _check_vectors(env_spec: EnvSpec) -> None:
    """Refuse images: dense critics would see millions of weights and values up to 255."""
    for path, spec in env_spec.observation.items():
        if spec.dtype == "uint8" and len(spec.shape) > 1:
            raise ConfigurationError(
                f"the critics consist of dense layers, and {path} is an image, uint8{list(spec.shape)}; images need an "
                "algorithm without such critics"
            )


class TwinCriticAlgorithm(Algorithm, Generic[Settings]):
    """Trains a policy on the smaller value of two critics (Fujimoto et al. 2018, "Addressing function approximation
    error in actor-critic methods")."""

    def __init__(
        self,
        policy: TorchPolicy,
        settings: Settings,
        *,
        num_ranks: int,
        schedules: Mapping[str, Scheduled],
    ) -> None:
        """Train the network of ``policy``, whose own weights are not used.

        Raises:
            ConfigurationError: an observation is an image.
        """
        _check_vectors(policy.env_spec.unmasked)
        self._policy = policy.pure
        self._device = policy.device
        self._observation = tuple(policy.env_spec.observation)
        self._action = policy.env_spec.action
        self._is_discrete = self._action.kind == "discrete"
        critics = TwinCritics(policy.env_spec.unmasked, **settings.critic.model_dump()).to(policy.device)
        self._critics = PureNetwork(critics)
        self._first_critics = self._critics.layout.flatten(critics)
        self._settings = settings
        self._num_ranks = num_ranks
        self._schedules = schedules

    def _critic_group(self) -> ParameterGroup:
        """Return the group of both critics."""
        return ParameterGroup(loss=self.critic_loss, initial=self._first_critics, learning_rate=CRITIC_LEARNING_RATE)

    @override
    def prepare(self, params: Tensors, slots: Arrays, reduce: Reduce, evaluate: Evaluate) -> Batch:
        return drawn_batch(slots, self._device)

    @override
    def schedule(self, batch: Batch, rng: np.random.Generator, reduce: Reduce) -> Tensors:
        size = self._settings.minibatch_size // self._num_ranks
        drawn = drawn_schedule(batch, size=size, num_ranks=self._num_ranks)
        if self._is_discrete:
            return drawn
        shape = (*drawn[WEIGHT].shape, self._action.num_outputs)
        noise = {name: torch.from_numpy(rng.standard_normal(shape, np.float32)) for name in (NOISE, NEXT_NOISE)}
        return {**drawn, **noise}

    @override
    def coefficients(self, env_steps: int) -> Mapping[str, float]:
        names = (CRITIC_LEARNING_RATE, IMPORTANCE_EXPONENT)
        return {name: value_at(self._schedules[name], env_steps) for name in names}

    @override
    def acting_scalars(self, env_steps: int) -> Mapping[str, float]:
        """Return that actions are uniform, until training begins."""
        return {UNIFORM: float(env_steps < self._settings.replay.start)}

    @override
    def adopt(self, coefficients: Mapping[str, Scheduled]) -> None:
        self._schedules = coefficients

    @abstractmethod
    def critic_loss(self, params: Tensors, state: Tensors, minibatch: Tensors) -> tuple[Tensor, Tensors]:
        """Return the loss of both critics."""

    def _following(self, minibatch: Tensors) -> dict[str, Tensor]:
        """Return the observations that the transitions lead to, by path."""
        return {name: minibatch[NEXT + name] for name in self._observation}

    def _values(self, critics: Tensor, observation: Tensors, action: Tensor | None = None) -> Tensor:
        """Return both critics' values by these parameters, [2, N], of the actions; [2, N, A] of all choices without."""
        inputs = dict(observation) if action is None else {**observation, ACTION: action}
        return self._critics(critics, inputs)[CRITICS]

    @staticmethod
    def _regression(found: Tensor, target: Tensor, minibatch: Tensors) -> tuple[Tensor, Tensors]:
        """Return half the mean squared error of the values, [2, N], from the target, [N], summed over the critics."""
        error = found - target
        loss = 0.5 * torch.dot(error.square().sum(dim=0), corrected_weights(minibatch))
        mean = minibatch[WEIGHT]
        of_rows = error.abs().mean(dim=0)
        metrics = {
            "critic_loss": loss,
            "q": torch.dot(found.mean(dim=0), mean),
            "td_error": torch.dot(of_rows, mean),
            ERRORS: of_rows,
        }
        return loss, {name: tensor.detach() for name, tensor in metrics.items()}
