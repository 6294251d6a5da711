"""Parallelised Q-learning (Gallici et al. 2024, "Simplifying deep temporal difference learning"), as pure functions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from rlsrl.algorithms.base import POLICY, WEIGHT, Algorithm, Batch, Evaluate, ParameterGroup, Reduce, Tensors
from rlsrl.algorithms.returns import explained_variance, explained_variance_sums, generalized_advantages
from rlsrl.algorithms.rows import (
    as_rows,
    check_divides,
    chosen_values,
    frame_rows,
    has_choice,
    mean_schedule,
    step_rows,
)
from rlsrl.algorithms.schedules import Scheduled, scheduled, value_at
from rlsrl.api.spec import PqnSpec
from rlsrl.data.specs import Arrays
from rlsrl.policies.device import to_device, to_host
from rlsrl.policies.epsilon_greedy import EPSILON
from rlsrl.policies.torch_policy import TorchPolicy


def build(settings: PqnSpec, policy: TorchPolicy, num_ranks: int, end: int | None) -> Pqn:
    """Return one of ``num_ranks`` ranks' algorithm: see ``catalog.Implementation.build``."""
    return Pqn(policy, settings, minibatch_size=settings.minibatch_size // num_ranks, **coefficients(settings, end))


def coefficients(settings: PqnSpec, end: int | None) -> dict[str, Scheduled]:
    """Return the probability of a random action, which may change: see ``catalog.Implementation.coefficients``."""
    return {"epsilon": scheduled(settings.epsilon, settings.epsilon_schedule, end)}


class Pqn(Algorithm):
    """Several passes over each batch towards targets that are computed once, at the step's start.

    Targets are Q(lambda) returns that start from the largest values under the present weights: no target network, and
    no replay. Peng's Q(lambda): what the policy chose is not corrected for, be it random or by older weights.
    """

    def __init__(self, policy: TorchPolicy, settings: PqnSpec, *, minibatch_size: int, epsilon: Scheduled) -> None:
        """Train the network of ``policy``, whose own weights are not used; ``minibatch_size`` is this rank's share."""
        self._network = policy.pure
        self._device = policy.device
        self._observation = tuple(policy.env_spec.observation)
        self._settings = settings
        self._minibatch_size = minibatch_size
        self._epsilon = epsilon

    @property
    @override
    def groups(self) -> dict[str, ParameterGroup]:
        return {POLICY: ParameterGroup(loss=self.loss)}

    @override
    def prepare(self, params: Tensors, slots: Arrays, reduce: Reduce, evaluate: Evaluate) -> Batch:
        """Evaluate all T+1 frames in one pass and compute the targets. Rows are the T * B steps, time first.

        With V(s) the largest value in s, ``target_t = r_t + discount * ((1 - q_lambda) * V(s_{t+1}) + q_lambda *
        target_{t+1})`` (Gallici et al., algorithm 1): the returns of ``generalized_advantages`` for that V. Beyond a
        truncation and beyond the last step ``target_{t+1}`` is ``V(s_{t+1})``.

        Raises:
            ValueError: the number of rows is no multiple of the minibatch size.
        """
        mask = slots["mask"]
        check_divides(mask, self._minibatch_size)
        frames = frame_rows(slots, self._observation, self._network, self._device)
        evaluated = evaluate(params, frames)
        largest, chosen = (to_host(evaluated[name]).reshape(mask.shape[0] + 1, -1) for name in ("largest", "chosen"))
        _, target = generalized_advantages(
            reward=slots["reward"],
            value=largest,
            terminated=slots["terminated"],
            truncated=slots["truncated"],
            mask=mask,
            discount=self._settings.discount,
            gae_lambda=self._settings.q_lambda,
        )
        return Batch(
            rows={**step_rows(frames, mask.size), "target": to_device(as_rows(target), self._device)},
            schedule_inputs={"mask": as_rows(mask)},
            num_transitions=int(np.count_nonzero(mask)),
            metrics={
                "explained_variance": explained_variance(
                    reduce(explained_variance_sums(chosen[:-1][mask], target[mask]))
                )
            },
        )

    @override
    def evaluate(self, params: Tensors, rows: Tensors) -> Tensors:
        """Return the ``largest`` value and that of the ``chosen`` action, [N] each. Without a legal action it is 0."""
        values = self._network(params[POLICY], rows)["q"]
        largest = torch.where(has_choice(values), values.amax(dim=-1), 0.0)
        return {"largest": largest, "chosen": chosen_values(values, rows["action"])}

    @override
    def schedule(self, batch: Batch, rng: np.random.Generator, reduce: Reduce) -> Tensors:
        """Cut a permutation of all rows into minibatches in each pass; each weighs the mean over its transitions."""
        passes, size = self._settings.epochs, self._minibatch_size
        return mean_schedule(batch.schedule_inputs["mask"], rng, reduce, passes=passes, size=size)

    @override
    def acting_scalars(self, env_steps: int) -> Mapping[str, float]:
        """Return the probability of a random action."""
        return {EPSILON: value_at(self._epsilon, env_steps)}

    @override
    def adopt(self, coefficients: Mapping[str, Scheduled]) -> None:
        self._epsilon = coefficients["epsilon"]

    def loss(self, params: Tensors, state: Tensors, minibatch: Tensors) -> tuple[Tensor, Tensors]:
        """Return the mean squared difference of the chosen actions' values from their targets, as a weighted sum."""
        del state
        weight = minibatch[WEIGHT]
        chosen = chosen_values(self._network(params[POLICY], minibatch)["q"], minibatch["action"])
        loss = torch.dot((chosen - minibatch["target"]).square(), weight)
        metrics = {"loss": loss, "q": torch.dot(chosen, weight)}
        return loss, {name: tensor.detach() for name, tensor in metrics.items()}
