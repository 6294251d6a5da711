"""Deep Q-learning (Mnih et al. 2015, "Human-level control through deep reinforcement learning"), as pure functions.

With double Q-learning (van Hasselt et al. 2016, "Deep reinforcement learning with double Q-learning"). Rewards of n
steps and draws by priority are the replay store's. Recurrent networks are trained on sequences, which is R2D2
(Kapturowski et al. 2019): see ``value_rows``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import huber_loss
from typing_extensions import override

from rlsrl.algorithms.base import ERRORS, POLICY, Algorithm, Batch, Evaluate, ParameterGroup, Reduce, Tensors
from rlsrl.algorithms.rows import IMPORTANCE_EXPONENT, chosen_values, has_choice
from rlsrl.algorithms.schedules import Scheduled, scheduled, value_at
from rlsrl.algorithms.value_rescaling import rescaled, restored
from rlsrl.algorithms.value_rows import DrawnSequences, TransitionRows, ValueRows
from rlsrl.api.spec import DqnSpec, PrioritySpec
from rlsrl.data.specs import Arrays
from rlsrl.policies.epsilon_greedy import EPSILON
from rlsrl.policies.networks import ACTION_VALUES_HEAD, QUANTILES_HEAD
from rlsrl.policies.torch_policy import TorchPolicy

TARGET = "target"
"""The part of the state that has the parameters of the target network."""


def build(settings: DqnSpec, policy: TorchPolicy, num_ranks: int, end: int | None) -> Dqn:
    """Return one of ``num_ranks`` ranks' algorithm: see ``catalog.Implementation.build``."""
    return Dqn(policy, settings, num_ranks=num_ranks, schedules=coefficients(settings, end))


def coefficients(settings: DqnSpec, end: int | None) -> dict[str, Scheduled]:
    """Return what may change: see ``catalog.Implementation.coefficients``."""
    return {
        EPSILON: scheduled(settings.epsilon, settings.epsilon_schedule, end),
        IMPORTANCE_EXPONENT: scheduled(settings.importance_exponent, settings.importance_exponent_schedule, end),
    }


class Dqn(Algorithm):
    """Moves the values of chosen actions towards rewards and a target network's values of what follows.

    The target network is a copy of the network, made again after every ``targetPeriod`` minibatches.
    """

    def __init__(
        self, policy: TorchPolicy, settings: DqnSpec, *, num_ranks: int, schedules: Mapping[str, Scheduled]
    ) -> None:
        """Train the network of ``policy``, whose own weights are not used."""
        self._rows = _rows_of(policy, settings, num_ranks)
        self._settings = settings
        self._schedules = schedules

    @property
    @override
    def groups(self) -> dict[str, ParameterGroup]:
        return {POLICY: ParameterGroup(loss=self.loss)}

    @override
    def initial_state(self, params: Tensors) -> Tensors:
        return {TARGET: params[POLICY].clone()}

    @property
    @override
    def state_every(self) -> int:
        return self._settings.target_period

    @override
    def update_state(self, params: Tensors, state: Tensors) -> Tensors:
        return {TARGET: params[POLICY]}

    @override
    def prepare(self, params: Tensors, slots: Arrays, reduce: Reduce, evaluate: Evaluate) -> Batch:
        return self._rows.batch(slots)

    @override
    def schedule(self, batch: Batch, rng: np.random.Generator, reduce: Reduce) -> Tensors:
        return self._rows.schedule(batch, reduce)

    @override
    def coefficients(self, env_steps: int) -> Mapping[str, float]:
        return {IMPORTANCE_EXPONENT: value_at(self._schedules[IMPORTANCE_EXPONENT], env_steps)}

    @override
    def acting_scalars(self, env_steps: int) -> Mapping[str, float]:
        """Return the probability of a random action: 1 until training begins."""
        has_begun = env_steps >= self._settings.replay.start
        return {EPSILON: value_at(self._schedules[EPSILON], env_steps) if has_begun else 1.0}

    @override
    def adopt(self, coefficients: Mapping[str, Scheduled]) -> None:
        self._schedules = coefficients

    def loss(self, params: Tensors, state: Tensors, minibatch: Tensors) -> tuple[Tensor, Tensors]:
        """Return the mean of Huber's loss of the chosen actions' values, as a weighted sum, and the rows' errors.

        The target is ``reward + discount * Q_target(s', argmax_a Q(s', a))`` (van Hasselt et al., eq. 4); without
        ``double`` the target network chooses, too (Mnih et al., algorithm 1). A network with quantiles learns those of
        the returns by quantile regression (Dabney et al. 2018, "Distributional reinforcement learning with quantile
        regression", algorithm 1). What follows has no value where no action is legal. With ``valueRescaling`` all these
        values are rescaled, and what follows is not while the reward is added (Pohlen et al. 2018, equation 4).
        """
        found = self._rows.valued(params[POLICY], state[TARGET], minibatch)
        chosen = _of_actions(found.heads, found.steps["action"])
        with torch.no_grad():
            values = found.following
            next_values = _of_actions(values, found.chooser[ACTION_VALUES_HEAD].argmax(dim=-1))
            next_values = torch.where(has_choice(values[ACTION_VALUES_HEAD]).unsqueeze(-1), next_values, 0.0)
            target = self._target(found.steps, next_values)
        loss = torch.dot(_regression(chosen, target, self._settings.huber_delta), found.weight)
        value = chosen.mean(dim=-1)
        error = (value - target.mean(dim=-1)).abs()
        metrics = {
            "loss": loss,
            "q": torch.dot(value, found.mean),
            "td_error": torch.dot(error, found.mean),
            ERRORS: self._rows.errors(error, minibatch),
        }
        return loss, {name: tensor.detach() for name, tensor in metrics.items()}

    def _target(self, steps: Tensors, next_values: Tensor) -> Tensor:
        """Return what the values of the chosen actions are to be, [S, K], by those that follow, [S, K]."""
        reward, discount = (steps[name].unsqueeze(-1) for name in ("reward", "discount"))
        if not self._settings.value_rescaling:
            return reward + discount * next_values
        return rescaled(reward + discount * restored(next_values))


def _rows_of(policy: TorchPolicy, settings: DqnSpec, num_ranks: int) -> ValueRows:
    """Return how drawn rows are evaluated: sequences for a recurrent network, else transitions."""
    size, double = settings.minibatch_size, settings.double
    if not policy.pure.is_recurrent:
        return TransitionRows(policy, minibatch_size=size, num_ranks=num_ranks, double=double)
    priorities = settings.replay.priorities or PrioritySpec()
    return DrawnSequences(
        policy,
        minibatch_size=size,
        num_ranks=num_ranks,
        double=double,
        largest_error_weight=priorities.largest_error_weight,
    )


def _of_actions(heads: Tensors, action: Tensor) -> Tensor:
    """Return the quantiles, [N, K], of the actions [N]; their values, [N, 1], if the network has no quantiles."""
    if (quantiles := heads.get(QUANTILES_HEAD)) is None:
        return chosen_values(heads[ACTION_VALUES_HEAD], action).unsqueeze(-1)
    index = action.reshape(-1, 1, 1).expand(-1, 1, quantiles.shape[-1])
    return quantiles.gather(1, index).squeeze(1)


def _regression(found: Tensor, target: Tensor, delta: float) -> Tensor:
    """Return the loss of each row, [N], of K quantiles found, [N, K], of a distribution of K target values, [N, K].

    Huber's loss of each pair, weighted by the distance of the quantile's fraction from 1 or 0 (Dabney et al., eq. 10),
    summed over quantiles, mean over targets. With a single one it is Huber's loss.
    """
    number = found.shape[-1]
    if number == 1:
        return huber_loss(found, target, reduction="none", delta=delta).squeeze(-1)
    fraction = (torch.arange(number, dtype=found.dtype, device=found.device) + 0.5) / number
    pairs = (found.unsqueeze(2).expand(-1, -1, number), target.unsqueeze(1).expand(-1, number, -1))
    losses = huber_loss(*pairs, reduction="none", delta=delta) / delta
    is_below = (pairs[1] < pairs[0]).detach().to(found.dtype)
    return ((fraction.reshape(1, -1, 1) - is_below).abs() * losses).mean(dim=2).sum(dim=1)
