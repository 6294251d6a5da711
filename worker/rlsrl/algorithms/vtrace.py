"""The actor-critic of IMPALA with V-trace (Espeholt et al. 2018), as pure functions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from rlsrl.algorithms.base import POLICY, WEIGHT, Algorithm, Batch, Evaluate, ParameterGroup, Reduce, Tensors
from rlsrl.algorithms.returns import Flags, Floats, accumulate_backwards, diagnostics
from rlsrl.algorithms.rows import mean_schedule
from rlsrl.algorithms.schedules import Scheduled, scheduled, value_at
from rlsrl.algorithms.sequences import rows_of, sequences_of
from rlsrl.api.spec import VtraceSpec
from rlsrl.data.specs import Arrays
from rlsrl.policies.distributions import log_prob_and_entropy_for, log_prob_for
from rlsrl.policies.networks import Heads
from rlsrl.policies.torch_policy import TorchPolicy


def build(settings: VtraceSpec, policy: TorchPolicy, num_ranks: int, end: int | None) -> Vtrace:
    """Return one of ``num_ranks`` ranks' algorithm: see ``catalog.Implementation.build``."""
    return Vtrace(policy, settings, minibatch_size=settings.minibatch_size // num_ranks, **coefficients(settings, end))


def coefficients(settings: VtraceSpec, end: int | None) -> dict[str, Scheduled]:
    """Return the loss's coefficients that may change: see ``catalog.Implementation.coefficients``."""
    return {"entropy_coefficient": scheduled(settings.entropy_coefficient, settings.entropy_coefficient_schedule, end)}


class Vtrace(Algorithm):
    """One pass over each batch, with targets and advantages corrected for the policy that acted.

    The policy that acted is up to ``pacing.maxPolicyLag`` versions older than the one that the step starts with. The
    correction is computed once, with the weights at the step's start; all minibatches of the batch use it.
    """

    def __init__(
        self, policy: TorchPolicy, settings: VtraceSpec, *, minibatch_size: int, entropy_coefficient: Scheduled
    ) -> None:
        """Train the network of ``policy``, whose own weights are not used; ``minibatch_size`` is this rank's share."""
        self._rows = rows_of(policy, minibatch_size=minibatch_size, sequences=sequences_of(settings))
        self._log_prob = log_prob_for(policy.env_spec.action)
        self._log_prob_and_entropy = log_prob_and_entropy_for(policy.env_spec.action)
        self._settings = settings
        self._entropy_coefficient = entropy_coefficient

    @property
    @override
    def groups(self) -> dict[str, ParameterGroup]:
        return {POLICY: ParameterGroup(loss=self.loss)}

    @override
    def prepare(self, params: Tensors, slots: Arrays, reduce: Reduce, evaluate: Evaluate) -> Batch:
        """Evaluate all T+1 frames and compute targets and advantages. Rows are steps or sequences (``TrainingRows``).

        Raises:
            ValueError: the number of steps is no multiple of the minibatch size.
        """
        mask = slots["mask"]
        num_steps = len(mask)
        self._rows.check(mask)
        frames = self._rows.frames(slots)
        evaluated = evaluate(params, frames)
        value, of_frames = (self._rows.of_frames(evaluated[name], num_steps) for name in ("value", "log_prob"))
        log_prob = of_frames[:-1]
        log_importance = log_prob.astype(np.float64) - slots["behavior_log_prob"]
        advantage, target = vtrace_targets(
            reward=slots["reward"],
            value=value,
            importance=np.exp(log_importance).astype(np.float32),
            terminated=slots["terminated"],
            truncated=slots["truncated"],
            mask=mask,
            discount=self._settings.discount,
            trace_decay=self._settings.trace_decay,
            rho_clip=self._settings.rho_clip,
            c_clip=self._settings.c_clip,
        )
        computed = {"advantage": advantage, "target": target}
        return Batch(
            rows={
                **self._rows.batch_rows(frames, evaluated, num_steps),
                **{name: self._rows.to_device(array) for name, array in computed.items()},
            },
            schedule_inputs={"mask": self._rows.of_steps(mask)},
            num_transitions=int(np.count_nonzero(mask)),
            metrics=diagnostics(value[:-1][mask], target[mask], log_importance[mask], reduce),
        )

    @override
    def evaluate(self, params: Tensors, rows: Tensors) -> Tensors:
        """Return ``value`` [N] and the action's ``log_prob`` [N] for each observation and action."""

        def outputs(heads: Heads, steps: Tensors) -> Tensors:
            return {"value": heads["value"], "log_prob": self._log_prob(heads["policy"], steps["action"])}

        return self._rows.evaluate(params[POLICY], rows, outputs)

    @property
    @override
    def compiles_evaluation(self) -> bool:
        return self._rows.compiles_evaluation

    @override
    def schedule(self, batch: Batch, rng: np.random.Generator, reduce: Reduce) -> Tensors:
        """Cut a permutation of all rows into minibatches; each transition weighs 1 / (transitions of all ranks)."""
        return mean_schedule(batch.schedule_inputs["mask"], rng, reduce, passes=1, size=self._rows.minibatch_rows)

    @override
    def coefficients(self, env_steps: int) -> Mapping[str, float]:
        return {"entropy_coefficient": value_at(self._entropy_coefficient, env_steps)}

    @override
    def adopt(self, coefficients: Mapping[str, Scheduled]) -> None:
        self._entropy_coefficient = coefficients["entropy_coefficient"]

    def loss(self, params: Tensors, state: Tensors, minibatch: Tensors) -> tuple[Tensor, Tensors]:
        """Return policy loss + value_coefficient * value loss - entropy_coefficient * entropy, as weighted sums."""
        del state
        heads, minibatch = self._rows.heads(params[POLICY], minibatch)
        weight = minibatch[WEIGHT]
        log_prob, entropies = self._log_prob_and_entropy(heads["policy"], minibatch["action"])
        policy_loss = -torch.dot(log_prob * minibatch["advantage"], weight)
        value_loss = 0.5 * torch.dot((heads["value"] - minibatch["target"]).square(), weight)
        entropy = torch.dot(entropies, weight)
        loss = policy_loss + self._settings.value_coefficient * value_loss - minibatch["entropy_coefficient"] * entropy
        metrics = {"loss": loss, "policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        return loss, {name: tensor.detach() for name, tensor in metrics.items()}


def vtrace_targets(
    *,
    reward: Floats,
    value: Floats,
    importance: Floats,
    terminated: Flags,
    truncated: Flags,
    mask: Flags,
    discount: float,
    trace_decay: float,
    rho_clip: float,
    c_clip: float,
) -> tuple[Floats, Floats]:
    """Return (advantage, target), [T, B], by V-trace (Espeholt et al. 2018).

    ``importance`` [T, B] is the probability of the action under the policy in training over that under the policy that
    acted. With ``rho = min(rho_clip, importance)`` and ``c = trace_decay * min(c_clip, importance)``:

    - ``delta_t = rho_t * (r_t + discount * V(s_{t+1}) - V(s_t))``;
    - ``target_t = V(s_t) + delta_t + discount * c_t * (target_{t+1} - V(s_{t+1}))`` (eq. 1, remark 2);
    - ``advantage_t = rho_t * (r_t + discount * target_{t+1} - V(s_t))`` (section 4.2).

    Ends of episodes, ``value`` and steps without a transition are as in ``generalized_advantages``: beyond a truncation
    and beyond the last step ``target_{t+1}`` is ``V(s_{t+1})``.
    """
    nothing, gamma = np.float32(0.0), np.float32(discount)
    following = np.where(terminated, nothing, value[1:])
    flows = mask & ~terminated & ~truncated
    rho = np.where(mask, np.minimum(importance, np.float32(rho_clip)), nothing)
    correction = np.where(mask, rho * (reward + gamma * following - value[:-1]), nothing)
    decay = np.where(flows, gamma * np.float32(trace_decay) * np.minimum(importance, np.float32(c_clip)), nothing)
    accumulate_backwards(correction, decay)
    following[:-1] += np.where(flows[:-1], correction[1:], nothing)
    advantage = np.where(mask, rho * (reward + gamma * following - value[:-1]), nothing)
    return advantage, np.where(mask, correction + value[:-1], nothing)
