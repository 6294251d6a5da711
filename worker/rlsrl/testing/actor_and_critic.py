"""An algorithm with every part of the interface, for tests: two parameter groups and a state.

It is an advantage actor-critic whose critic is a network of its own. Actors never get it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from rlsrl.algorithms.adam import Adam
from rlsrl.algorithms.base import POLICY, WEIGHT, Batch, Evaluate, ParameterGroup, Reduce, Tensors
from rlsrl.algorithms.custom import CustomAlgorithm, Setup
from rlsrl.algorithms.returns import generalized_advantages
from rlsrl.algorithms.rows import as_rows, check_divides, frame_rows, mean_schedule, step_rows
from rlsrl.api.spec import AlgorithmNeeds
from rlsrl.data.specs import Arrays
from rlsrl.policies.device import to_device, to_host
from rlsrl.policies.distributions import log_prob_and_entropy_for
from rlsrl.policies.functional import PureNetwork
from rlsrl.policies.networks import FlattenObservation, Heads, Observation

CRITIC = "critic"
"""The critic's parameter group."""
TARGET = "target"
"""The state: a mean of the critic's parameters that follows them slowly."""
CRITIC_LEARNING_RATE = "critic_learning_rate"
"""The coefficient that is the critic's learning rate."""
FOLLOWING = 0.05
"""How far the target moves towards the critic with each minibatch."""


class Critic(nn.Module):
    """Values observations."""

    def __init__(self, setup: Setup, hidden_size: int) -> None:
        super().__init__()
        flatten = FlattenObservation(setup.policy.env_spec.unmasked.observation)
        self.layers = nn.Sequential(
            flatten, nn.Linear(flatten.num_features, hidden_size), nn.Tanh(), nn.Linear(hidden_size, 1)
        )

    @override
    def forward(self, observation: Observation) -> Heads:
        """Return ``value`` [N]."""
        return {"value": self.layers(observation).squeeze(-1)}


class ActorAndCritic(CustomAlgorithm):
    """Trains the policy on advantages by the target critic, and the critic on the returns by it."""

    interface = 1

    def __init__(
        self,
        setup: Setup,
        hidden_size: int = 32,
        critic_learning_rate: float = 1e-3,
        gae_lambda: float = 0.95,
        entropy_coefficient: float = 0.01,
    ) -> None:
        self._setup = setup
        self._device = setup.policy.device
        self._policy = setup.policy.pure
        critic = Critic(setup, hidden_size).to(self._device)
        self._critic = PureNetwork(critic)
        self._first_critic = self._critic.layout.flatten(critic)
        self._critic_learning_rate = critic_learning_rate
        self._gae_lambda = gae_lambda
        self._entropy_coefficient = entropy_coefficient
        self._observation = tuple(setup.policy.env_spec.observation)
        self._log_prob_and_entropy = log_prob_and_entropy_for(setup.policy.env_spec.action)

    @property
    @override
    def needs(self) -> AlgorithmNeeds:
        wanted = self._setup.settings.needs
        return AlgorithmNeeds(minibatch_size=wanted.minibatch_size, epochs=wanted.epochs, outputs="policy")

    @property
    @override
    def groups(self) -> dict[str, ParameterGroup]:
        """The critic before the policy, with longer gradients."""
        return {
            CRITIC: ParameterGroup(
                loss=self.critic_loss,
                initial=self._first_critic,
                learning_rate=CRITIC_LEARNING_RATE,
                optimizer=Adam(epsilon=1e-8, max_gradient_norm=10.0),
            ),
            POLICY: ParameterGroup(loss=self.policy_loss),
        }

    @override
    def coefficients(self, env_steps: int) -> Mapping[str, float]:
        return {CRITIC_LEARNING_RATE: self._critic_learning_rate}

    @override
    def initial_state(self, params: Tensors) -> Tensors:
        return {TARGET: params[CRITIC].clone()}

    @override
    def update_state(self, params: Tensors, state: Tensors) -> Tensors:
        return {TARGET: torch.lerp(state[TARGET], params[CRITIC], FOLLOWING)}

    @override
    def prepare(self, params: Tensors, slots: Arrays, reduce: Reduce, evaluate: Evaluate) -> Batch:
        mask = slots["mask"]
        check_divides(mask, self._setup.minibatch_size)
        frames = frame_rows(slots, self._observation, self._policy, self._device)
        value = to_host(evaluate(params, frames)["value"]).reshape(len(mask) + 1, -1)
        advantage, returns = generalized_advantages(
            reward=slots["reward"],
            value=value,
            terminated=slots["terminated"],
            truncated=slots["truncated"],
            mask=mask,
            discount=self._setup.settings.discount,
            gae_lambda=self._gae_lambda,
        )
        computed = {"advantage": advantage, "return": returns}
        return Batch(
            rows={
                **step_rows(frames, mask.size),
                **{name: to_device(as_rows(array), self._device) for name, array in computed.items()},
            },
            schedule_inputs={"mask": as_rows(mask)},
            num_transitions=int(np.count_nonzero(mask)),
        )

    @override
    def evaluate(self, params: Tensors, rows: Tensors) -> Tensors:
        return {"value": self._critic(params[CRITIC], rows)["value"]}

    @override
    def schedule(self, batch: Batch, rng: np.random.Generator, reduce: Reduce) -> Tensors:
        mask = batch.schedule_inputs["mask"]
        return mean_schedule(mask, rng, reduce, passes=self.needs.epochs, size=self._setup.minibatch_size)

    def critic_loss(self, params: Tensors, state: Tensors, minibatch: Tensors) -> tuple[Tensor, Tensors]:
        """Return half the mean squared error of the value, pulled a little towards the target's."""
        value = self._critic(params[CRITIC], minibatch)["value"]
        with torch.no_grad():
            behind = self._critic(state[TARGET], minibatch)["value"]
        error = (value - minibatch["return"]).square() + 0.1 * (value - behind).square()
        loss = 0.5 * torch.dot(error, minibatch[WEIGHT])
        return loss, {"value_loss": loss.detach()}

    def policy_loss(self, params: Tensors, state: Tensors, minibatch: Tensors) -> tuple[Tensor, Tensors]:
        """Return the policy gradient's loss, with a bonus for entropy."""
        del state
        parameters = self._policy(params[POLICY], minibatch)["policy"]
        log_prob, entropies = self._log_prob_and_entropy(parameters, minibatch["action"])
        entropy = torch.dot(entropies, minibatch[WEIGHT])
        loss = -torch.dot(log_prob * minibatch["advantage"], minibatch[WEIGHT]) - self._entropy_coefficient * entropy
        return loss, {"policy_loss": loss.detach(), "entropy": entropy.detach()}
