"""One-step Q-learning with a target network, for tests of replay: what a user would write."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from rlsrl.algorithms.base import ERRORS, POLICY, WEIGHT, Batch, Evaluate, ParameterGroup, Reduce, Tensors
from rlsrl.algorithms.custom import CustomAlgorithm, Setup
from rlsrl.algorithms.rows import chosen_values, drawn_batch, drawn_schedule
from rlsrl.api.spec import AlgorithmNeeds
from rlsrl.buffers.replay.rows import NEXT
from rlsrl.data.specs import Arrays
from rlsrl.policies.epsilon_greedy import EPSILON

TARGET = "target"
"""The state: the parameters of the target network."""


class QLearning(CustomAlgorithm):
    """Moves the value of each action towards its reward and the target network's value of what follows.

    As in Mnih et al. (2015), but that the target network follows slowly instead of in jumps.
    """

    interface = 1

    def __init__(self, setup: Setup, *, following: float = 0.05, epsilon: float = 0.1) -> None:
        """Let the target network move by ``following`` towards the network with each minibatch."""
        self._setup = setup
        self._network = setup.policy.pure
        self._device = setup.policy.device
        self._observation = tuple(setup.policy.env_spec.observation)
        self._following = following
        self._epsilon = epsilon

    @property
    @override
    def needs(self) -> AlgorithmNeeds:
        wanted = self._setup.settings.needs
        return AlgorithmNeeds(minibatch_size=wanted.minibatch_size, replay=wanted.replay, outputs="actionValues")

    @property
    @override
    def groups(self) -> dict[str, ParameterGroup]:
        return {POLICY: ParameterGroup(loss=self.loss)}

    @override
    def acting_scalars(self, env_steps: int) -> Mapping[str, float]:
        return {EPSILON: self._epsilon}

    @override
    def initial_state(self, params: Tensors) -> Tensors:
        return {TARGET: params[POLICY].clone()}

    @override
    def update_state(self, params: Tensors, state: Tensors) -> Tensors:
        return {TARGET: torch.lerp(state[TARGET], params[POLICY], self._following)}

    @override
    def prepare(self, params: Tensors, slots: Arrays, reduce: Reduce, evaluate: Evaluate) -> Batch:
        """Use the rows of a replay store as they are."""
        return drawn_batch(slots, self._device)

    @override
    def schedule(self, batch: Batch, rng: np.random.Generator, reduce: Reduce) -> Tensors:
        return drawn_schedule(batch, size=self._setup.minibatch_size, num_ranks=self._setup.num_ranks)

    def loss(self, params: Tensors, state: Tensors, minibatch: Tensors) -> tuple[Tensor, Tensors]:
        """Return the mean squared error of the chosen actions' values, as a weighted sum, and the errors."""
        values = self._network(params[POLICY], minibatch)["q"]
        chosen = chosen_values(values, minibatch["action"])
        with torch.no_grad():
            following = {name: minibatch[NEXT + name] for name in self._observation}
            best = self._network(state[TARGET], following)["q"].amax(dim=-1)
            target = minibatch["reward"] + minibatch["discount"] * best
        errors = chosen - target
        loss = torch.dot(errors.square(), minibatch[WEIGHT])
        metrics = {"loss": loss, "q": torch.dot(chosen, minibatch[WEIGHT]), ERRORS: errors}
        return loss, {name: tensor.detach() for name, tensor in metrics.items()}
