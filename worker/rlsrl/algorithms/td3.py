"""TD3 (Fujimoto et al. 2018, "Addressing function approximation error in actor-critic methods"), as pure functions."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from rlsrl.algorithms.base import POLICY, WEIGHT, ParameterGroup, Tensors
from rlsrl.algorithms.schedules import Scheduled, scheduled, value_at
from rlsrl.algorithms.twin_critics import NEXT_NOISE, TwinCriticAlgorithm
from rlsrl.algorithms.twin_critics import coefficients as shared_coefficients
from rlsrl.api.spec import Td3Spec
from rlsrl.policies.critics import CRITICS
from rlsrl.policies.exploration import DEVIATION
from rlsrl.policies.networks import POLICY_HEAD
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.runtime.errors import ConfigurationError

TARGET_POLICY, TARGET_CRITICS = "target_policy", "target_critics"
"""The parts of the state that have the parameters of the target networks."""


def build(settings: Td3Spec, policy: TorchPolicy, num_ranks: int, end: int | None) -> Td3:
    """Return one of ``num_ranks`` ranks' algorithm: see ``catalog.Implementation.build``.

    Raises:
        ConfigurationError: the actions are no vectors of floats.
    """
    action = policy.env_spec.action
    if action.kind != "continuous":
        raise ConfigurationError(
            "algorithm.td3 takes a Box of floats with finite bounds; the environment's actions are "
            f"{action.kind}: for Discrete ones take algorithm.sac or algorithm.dqn"
        )
    return Td3(policy, settings, num_ranks=num_ranks, schedules=coefficients(settings, end))


def coefficients(settings: Td3Spec, end: int | None) -> dict[str, Scheduled]:
    """Return what may change: see ``catalog.Implementation.coefficients``."""
    deviation = scheduled(settings.exploration_deviation, settings.exploration_deviation_schedule, end)
    return {**shared_coefficients(settings, end), DEVIATION: deviation}


class Td3(TwinCriticAlgorithm[Td3Spec]):
    """Trains a deterministic policy to have a high value, later than the critics and less often."""

    @property
    @override
    def groups(self) -> dict[str, ParameterGroup]:
        """The critics, with each minibatch; the policy, with every ``policyPeriod``-th."""
        return {
            CRITICS: self._critic_group(),
            POLICY: ParameterGroup(loss=self.policy_loss, every=self._settings.policy_period),
        }

    @override
    def initial_state(self, params: Tensors) -> Tensors:
        return {TARGET_POLICY: params[POLICY].clone(), TARGET_CRITICS: params[CRITICS].clone()}

    @override
    def update_state(self, params: Tensors, state: Tensors) -> Tensors:
        """Move the target networks, with each update of the policy (Fujimoto et al., algorithm 1)."""
        return {
            TARGET_POLICY: torch.lerp(state[TARGET_POLICY], params[POLICY], self._settings.tau),
            TARGET_CRITICS: torch.lerp(state[TARGET_CRITICS], params[CRITICS], self._settings.tau),
        }

    @override
    def acting_scalars(self, env_steps: int) -> Mapping[str, float]:
        """Return the actors' noise, and that actions are uniform until training begins."""
        return {**super().acting_scalars(env_steps), DEVIATION: value_at(self._schedules[DEVIATION], env_steps)}

    @override
    def critic_loss(self, params: Tensors, state: Tensors, minibatch: Tensors) -> tuple[Tensor, Tensors]:
        """Return the critics' loss: clipped double Q-learning with smoothed targets (algorithm 1, equations 10, 14)."""
        with torch.no_grad():
            following, limit = self._following(minibatch), self._settings.target_noise_clip
            noise = (minibatch[NEXT_NOISE] * self._settings.target_deviation).clamp(-limit, limit)
            action = (self._policy(state[TARGET_POLICY], following)[POLICY_HEAD] + noise).clamp(-1.0, 1.0)
            value = self._values(state[TARGET_CRITICS], following, action).amin(dim=0)
            target = minibatch["reward"] + minibatch["discount"] * value
        return self._regression(self._values(params[CRITICS], minibatch, minibatch["action"]), target, minibatch)

    def policy_loss(self, params: Tensors, state: Tensors, minibatch: Tensors) -> tuple[Tensor, Tensors]:
        """Return minus the mean value of the policy's actions by the first critic (algorithm 1)."""
        del state
        action = self._policy(params[POLICY], minibatch)[POLICY_HEAD]
        loss = -torch.dot(self._values(params[CRITICS], minibatch, action)[0], minibatch[WEIGHT])
        return loss, {"policy_loss": loss.detach()}
