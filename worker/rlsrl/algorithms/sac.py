"""Soft actor-critic (Haarnoja et al. 2018, "Soft actor-critic algorithms and applications"), as pure functions.

For discrete actions that of Christodoulou (2019, "Soft actor-critic for discrete action settings"): means over actions
are computed instead of sampled.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import override

from rlsrl.algorithms.base import POLICY, WEIGHT, ParameterGroup, Tensors
from rlsrl.algorithms.rows import chosen_values, has_choice
from rlsrl.algorithms.twin_critics import NEXT_NOISE, NOISE, TwinCriticAlgorithm, coefficients
from rlsrl.api.spec import SacSpec
from rlsrl.policies.critics import CRITICS
from rlsrl.policies.distributions import squashed_sample
from rlsrl.policies.exported import MASKED_LOGIT
from rlsrl.policies.networks import POLICY_HEAD
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.runtime.errors import ConfigurationError

__all__ = ["Sac", "build", "coefficients"]

TEMPERATURE = "temperature"
"""The group of the logarithm of the temperature, and its metric."""
TARGET = "target"
"""The part of the state that has the parameters of the target critics."""
SURPLUS = "entropy_surplus"
"""By how much the policy's entropy exceeds the target in each row, from its own loss for the temperature's."""
DISCRETE_ENTROPY_SHARE = 0.98
"""The default of ``targetEntropy``, as a share of the largest entropy of legal actions (Christodoulou, section 5.1)."""


def build(settings: SacSpec, policy: TorchPolicy, num_ranks: int, end: int | None) -> Sac:
    """Return one of ``num_ranks`` ranks' algorithm: see ``catalog.Implementation.build``.

    Raises:
        ConfigurationError: the actions have several parts.
    """
    action = policy.env_spec.action
    if action.kind == "joint":
        raise ConfigurationError(
            "algorithm.sac takes Discrete actions, or a Box of floats with finite bounds; the environment's actions "
            f"have the parts {', '.join(part.kind for part in action.parts)}"
        )
    return Sac(policy, settings, num_ranks=num_ranks, schedules=coefficients(settings, end))


class Sac(TwinCriticAlgorithm[SacSpec]):
    """Trains the policy to have a high value and a high entropy, weighted by the temperature."""

    @property
    @override
    def groups(self) -> dict[str, ParameterGroup]:
        """The critics, then the policy, then the temperature."""
        groups = {CRITICS: self._critic_group(), POLICY: ParameterGroup(loss=self.policy_loss)}
        if self._settings.learn_temperature:
            first = torch.tensor([math.log(self._settings.temperature)], dtype=torch.float32)
            groups[TEMPERATURE] = ParameterGroup(loss=self.temperature_loss, initial=first)
        return groups

    @override
    def initial_state(self, params: Tensors) -> Tensors:
        return {TARGET: params[CRITICS].clone()}

    @override
    def update_state(self, params: Tensors, state: Tensors) -> Tensors:
        return {TARGET: torch.lerp(state[TARGET], params[CRITICS], self._settings.tau)}

    @override
    def critic_loss(self, params: Tensors, state: Tensors, minibatch: Tensors) -> tuple[Tensor, Tensors]:
        """Return the critics' loss (Haarnoja et al., equations 5 and 6)."""
        with torch.no_grad():
            target = minibatch["reward"] + minibatch["discount"] * self._soft_value(params, state, minibatch)
        found = self._values(params[CRITICS], minibatch, None if self._is_discrete else minibatch["action"])
        if self._is_discrete:
            found = torch.stack([chosen_values(values, minibatch["action"]) for values in found])
        return self._regression(found, target, minibatch)

    def policy_loss(self, params: Tensors, state: Tensors, minibatch: Tensors) -> tuple[Tensor, Tensors]:
        """Return the policy's loss (Haarnoja et al., equation 9; Christodoulou, equation 12), and entropies of rows."""
        del state
        parameters = self._policy(params[POLICY], minibatch)[POLICY_HEAD]
        if self._is_discrete:
            value, entropy = _of_choices(parameters, self._values(params[CRITICS], minibatch))
        else:
            action, log_prob = squashed_sample(parameters, minibatch[NOISE])
            value, entropy = self._values(params[CRITICS], minibatch, action).amin(dim=0), -log_prob
        loss = torch.dot(-value - self._temperature(params) * entropy, minibatch[WEIGHT])
        surplus = entropy - self._target_entropy(parameters)
        metrics = {"policy_loss": loss, "entropy": torch.dot(entropy, minibatch[WEIGHT]), SURPLUS: surplus}
        return loss, {name: tensor.detach() for name, tensor in metrics.items()}

    def temperature_loss(self, params: Tensors, state: Tensors, minibatch: Tensors) -> tuple[Tensor, Tensors]:
        """Return the temperature's loss, by the entropies of the policy's loss (Haarnoja et al., equation 18)."""
        del state
        temperature = params[TEMPERATURE].exp().squeeze(0)
        loss = temperature * torch.dot(minibatch[SURPLUS], minibatch[WEIGHT])
        # Its weights add up to 1 over all ranks, so that the shares of the temperature do, too.
        return loss, {TEMPERATURE: temperature.detach() * minibatch[WEIGHT].sum()}

    def _target_entropy(self, parameters: Tensor) -> Tensor | float:
        """Return the entropy that the temperature aims at, by the policy's head: [] or [N]."""
        if self._settings.target_entropy is not None:
            return self._settings.target_entropy
        if not self._is_discrete:
            return -float(self._action.num_outputs)
        num_legal = (parameters > MASKED_LOGIT).sum(dim=-1).clamp(min=1)
        return DISCRETE_ENTROPY_SHARE * torch.log(num_legal.to(parameters.dtype))

    def _temperature(self, params: Tensors) -> Tensor | float:
        return params[TEMPERATURE].exp().squeeze(0) if self._settings.learn_temperature else self._settings.temperature

    def _soft_value(self, params: Tensors, state: Tensors, minibatch: Tensors) -> Tensor:
        """Return the soft values of what follows, [N], by the target critics; 0 where no action is legal."""
        following = self._following(minibatch)
        parameters = self._policy(params[POLICY], following)[POLICY_HEAD]
        if self._is_discrete:
            value, entropy = _of_choices(parameters, self._values(state[TARGET], following))
            soft = value + self._temperature(params) * entropy
            return torch.where(has_choice(parameters), soft, 0.0)
        action, log_prob = squashed_sample(parameters, minibatch[NEXT_NOISE])
        return self._values(state[TARGET], following, action).amin(dim=0) - self._temperature(params) * log_prob


def _of_choices(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the policy's mean of the smaller values and its entropy, each [N], by logits [N, A] and values [2, N, A].

    No gradient flows into the values.
    """
    log_probs = torch.log_softmax(logits, dim=-1)
    # An illegal choice has the probability 0, whose product with the logarithm would be 0 times a huge number.
    probs = torch.where(logits > MASKED_LOGIT, log_probs.exp(), 0.0)
    smaller = values.detach().amin(dim=0)
    return (probs * smaller).sum(dim=-1), -(probs * log_probs).sum(dim=-1)
