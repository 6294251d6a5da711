"""Proximal policy optimisation (Schulman et al. 2017), as in CleanRL's ``ppo.py``, as pure functions.

It uses the decoupled objective of Hilton et al. (2022), "Batch size-invariance for policy optimization": the clip range
limits a step's distance from the policy that the step starts with, not from the older policy that acted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from rlsrl.algorithms.base import (
    INDEX,
    POLICY,
    WEIGHT,
    Algorithm,
    Batch,
    Evaluate,
    ParameterGroup,
    Reduce,
    Tensors,
)
from rlsrl.algorithms.returns import diagnostics, generalized_advantages
from rlsrl.algorithms.rows import minibatches
from rlsrl.algorithms.schedules import Scheduled, scheduled, value_at
from rlsrl.algorithms.sequences import Sequences, rows_of, sequences_of
from rlsrl.api.spec import PpoSpec
from rlsrl.data.specs import Arrays
from rlsrl.policies.distributions import log_prob_and_entropy_for, log_prob_for
from rlsrl.policies.networks import Heads
from rlsrl.policies.torch_policy import TorchPolicy


def build(settings: PpoSpec, policy: TorchPolicy, num_ranks: int, end: int | None) -> Ppo:
    """Return one of ``num_ranks`` ranks' algorithm: see ``catalog.Implementation.build``."""
    return Ppo(
        policy,
        discount=settings.discount,
        gae_lambda=settings.gae_lambda,
        clip_value_loss=settings.clip_value_loss,
        **coefficients(settings, end),
        value_coefficient=settings.value_coefficient,
        epochs=settings.epochs,
        minibatch_size=settings.minibatch_size // num_ranks,
        normalize_advantages=settings.normalize_advantages,
        sequences=sequences_of(settings),
    )


def coefficients(settings: PpoSpec, end: int | None) -> dict[str, Scheduled]:
    """Return the loss's coefficients that may change: see ``catalog.Implementation.coefficients``."""
    return {
        "clip_range": scheduled(settings.clip_range, settings.clip_range_schedule, end),
        "entropy_coefficient": scheduled(settings.entropy_coefficient, settings.entropy_coefficient_schedule, end),
    }


class Ppo(Algorithm):
    """Several epochs of minibatches over each batch, with the probability ratio clipped around 1.

    The objective has three policies. The behaviour policy acted. The proximal policy, up to ``pacing.maxPolicyLag``
    versions newer, is the one that the step starts with. The third is the policy in training.

    The ratio is the trained policy's probability over the proximal policy's. Each advantage is weighted by the proximal
    policy's probability over the behaviour policy's (Hilton et al. 2022, eq. 3). If the ratio were clipped around the
    behaviour policy, earlier steps would use up a part of this step's range. Without lag the two are the same policy,
    all weights are 1, and this is the usual objective.

    Steps that are no transitions (``mask``) stay in the batch so that shapes are static. They weigh nothing. The
    contents of rows without transitions are never read: the schedule replaces their index by that of another.
    """

    def __init__(
        self,
        policy: TorchPolicy,
        *,
        discount: float,
        gae_lambda: float,
        clip_range: Scheduled,
        clip_value_loss: bool,
        entropy_coefficient: Scheduled,
        value_coefficient: float,
        epochs: int,
        minibatch_size: int,
        normalize_advantages: bool,
        sequences: Sequences | None = None,
    ) -> None:
        """Train the network of ``policy``, whose own weights are not used. ``api`` describes the hyperparameters."""
        self._rows = rows_of(policy, minibatch_size=minibatch_size, sequences=sequences)
        self._log_prob = log_prob_for(policy.env_spec.action)
        self._log_prob_and_entropy = log_prob_and_entropy_for(policy.env_spec.action)
        self._discount = discount
        self._gae_lambda = gae_lambda
        self._clip_range = clip_range
        self._clip_value_loss = clip_value_loss
        self._entropy_coefficient = entropy_coefficient
        self._value_coefficient = value_coefficient
        self._epochs = epochs
        self._normalize_advantages = normalize_advantages

    @property
    @override
    def groups(self) -> dict[str, ParameterGroup]:
        return {POLICY: ParameterGroup(loss=self.loss)}

    @override
    def prepare(self, params: Tensors, slots: Arrays, reduce: Reduce, evaluate: Evaluate) -> Batch:
        """Evaluate all T+1 frames and compute advantages and returns. Rows are steps or sequences (``TrainingRows``).

        Raises:
            ValueError: the number of steps is no multiple of the minibatch size.
        """
        mask = slots["mask"]
        num_steps = len(mask)
        self._rows.check(mask)
        frames = self._rows.frames(slots)
        evaluated = evaluate(params, frames)
        value = self._rows.of_frames(evaluated["value"], num_steps)
        advantage, returns = generalized_advantages(
            reward=slots["reward"],
            value=value,
            terminated=slots["terminated"],
            truncated=slots["truncated"],
            mask=mask,
            discount=self._discount,
            gae_lambda=self._gae_lambda,
        )
        proximal = self._rows.of_frames(evaluated["proximal_log_prob"], num_steps)[:-1]
        log_importance = proximal.astype(np.float64) - slots["behavior_log_prob"]
        of_steps = {"mask": mask, "advantage": advantage, "importance": np.exp(log_importance)}
        return Batch(
            rows={
                **self._rows.batch_rows(frames, evaluated, num_steps, outputs=("value", "proximal_log_prob")),
                "return": self._rows.to_device(returns),
            },
            schedule_inputs={name: self._rows.of_steps(array) for name, array in of_steps.items()},
            num_transitions=int(np.count_nonzero(mask)),
            metrics=diagnostics(value[:-1][mask], returns[mask], log_importance[mask], reduce),
        )

    @override
    def evaluate(self, params: Tensors, rows: Tensors) -> Tensors:
        """Return ``value`` [N] and the action's ``proximal_log_prob`` [N] for each observation and action."""

        def outputs(heads: Heads, steps: Tensors) -> Tensors:
            return {"value": heads["value"], "proximal_log_prob": self._log_prob(heads["policy"], steps["action"])}

        return self._rows.evaluate(params[POLICY], rows, outputs)

    @property
    @override
    def compiles_evaluation(self) -> bool:
        return self._rows.compiles_evaluation

    @override
    def schedule(self, batch: Batch, rng: np.random.Generator, reduce: Reduce) -> Tensors:
        """Cut a new permutation of all rows into minibatches, each epoch.

        ``weight`` [K, M] is 1 / (transitions of the whole minibatch, all ranks) for a transition and 0 otherwise, so a
        weighted sum is this rank's share of the mean. ``advantage`` [K, M] is normalised if the user asks for it, then
        weighted by importance: min(r A, clip(r) A) w equals min(r A w, clip(r) A w) for every w > 0. Where rows are
        sequences, both are [K, M, L].
        """
        mask, advantage = batch.schedule_inputs["mask"], batch.schedule_inputs["advantage"]
        index, found = minibatches(mask, rng, passes=self._epochs, size=self._rows.minibatch_rows)
        valid = found.reshape(len(found), -1)  # [K, steps]
        chosen = np.where(valid, advantage[index].reshape(valid.shape), 0.0).astype(np.float64)
        count, total, squares = reduce(
            np.stack([valid.sum(axis=1), chosen.sum(axis=1), np.square(chosen).sum(axis=1)]).astype(np.float64)
        )[..., np.newaxis]
        if self._normalize_advantages:
            chosen = _normalized(chosen, count, total, squares)
        chosen *= np.where(valid, batch.schedule_inputs["importance"][index].reshape(valid.shape), 0.0)
        arrays = {WEIGHT: valid / np.maximum(count, 1.0), "advantage": chosen}
        return {INDEX: torch.from_numpy(index)} | {
            name: torch.from_numpy(array.reshape(found.shape).astype(np.float32)) for name, array in arrays.items()
        }

    @override
    def coefficients(self, env_steps: int) -> Mapping[str, float]:
        return {
            "clip_range": value_at(self._clip_range, env_steps),
            "entropy_coefficient": value_at(self._entropy_coefficient, env_steps),
        }

    @override
    def adopt(self, coefficients: Mapping[str, Scheduled]) -> None:
        self._clip_range = coefficients["clip_range"]
        self._entropy_coefficient = coefficients["entropy_coefficient"]

    def loss(self, params: Tensors, state: Tensors, minibatch: Tensors) -> tuple[Tensor, Tensors]:
        """Return policy loss + value_coefficient * value loss - entropy_coefficient * entropy, as weighted sums."""
        del state
        heads, minibatch = self._rows.heads(params[POLICY], minibatch)
        weight, clip_range = minibatch[WEIGHT], minibatch["clip_range"]
        log_prob, entropies = self._log_prob_and_entropy(heads["policy"], minibatch["action"])
        log_ratio = log_prob - minibatch["proximal_log_prob"]
        ratio = log_ratio.exp()
        policy_loss = -torch.dot(clipped_surrogate(ratio, minibatch["advantage"], clip_range), weight)
        value_loss = 0.5 * torch.dot(self._value_errors(heads["value"], minibatch), weight)
        entropy = torch.dot(entropies, weight)
        # Also with a coefficient of 0: it may change while a compiled step is in use.
        loss = policy_loss + self._value_coefficient * value_loss - minibatch["entropy_coefficient"] * entropy
        with torch.no_grad():
            outside = (ratio - 1.0).abs() > clip_range
            metrics = {
                "loss": loss.detach(),
                "policy_loss": policy_loss.detach(),
                "value_loss": value_loss.detach(),
                "entropy": entropy.detach(),
                "approx_kl": torch.dot(ratio - 1.0 - log_ratio, weight),
                "clip_fraction": torch.dot(outside.to(weight.dtype), weight),
            }
        return loss, metrics

    def _value_errors(self, value: Tensor, minibatch: Tensors) -> Tensor:
        """Return the squared errors of the value, [M]."""
        target = minibatch["return"]
        if not self._clip_value_loss:
            return (value - target).square()
        return clipped_square_error(value, minibatch["value"], target, minibatch["clip_range"])


def clipped_surrogate(ratio: Tensor, advantage: Tensor, clip_range: Tensor) -> Tensor:
    """Return min(r A, clip(r, 1 - c, 1 + c) A), [M]: a ratio beyond the clip range gains nothing.

    The minimum is r A with r bounded only on the side where the objective would gain: above if A > 0, else below.
    """
    rising = advantage > 0.0
    lower = torch.where(rising, -math.inf, 1.0 - clip_range)
    upper = torch.where(rising, 1.0 + clip_range, math.inf)
    return ratio.clamp(lower, upper) * advantage


def clipped_square_error(value: Tensor, old_value: Tensor, target: Tensor, clip_range: Tensor) -> Tensor:
    """Return the larger squared error, [M]: of the value, or of the value clipped to the old value's clip range."""
    error = value - target
    with torch.no_grad():
        kept_error = value.clamp(old_value - clip_range, old_value + clip_range) - target
        stuck = kept_error.abs() > error.abs()
    return torch.where(stuck, kept_error, error).square()


def _normalized(
    advantage: NDArray[np.float64], count: NDArray[np.float64], total: NDArray[np.float64], squares: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return advantages with mean 0 and (unbiased) deviation 1 in each minibatch. The sums are [K, 1]."""
    mean = total / np.maximum(count, 1.0)
    variance = np.maximum(squares - count * mean**2, 0.0) / np.maximum(count - 1.0, 1.0)
    return (advantage - mean) / (np.sqrt(variance) + 1e-8)
