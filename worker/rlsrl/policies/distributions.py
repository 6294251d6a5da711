"""Action distributions as functions of their parameters, in torch. Numerically stable; plain functions compile well."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rlsrl.data.specs import ActionSpec

HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)

LogProb = Callable[[Tensor, Tensor], Tensor]
"""(distribution parameters [..., A], actions) -> log-probabilities of the actions [...]."""

LogProbAndEntropy = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(distribution parameters [..., A], actions) -> (log-probabilities of the actions [...], entropies [...])."""


def categorical_log_prob(logits: Tensor, action: Tensor) -> Tensor:
    """Return log softmax(logits)[action]: logits [..., A], action [...] int64 -> [...]."""
    return torch.log_softmax(logits, dim=-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)


def categorical_log_prob_and_entropy(logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Return log softmax(logits)[action] and the entropy -sum p log p of p = softmax(logits), from one softmax."""
    log_probs = torch.log_softmax(logits, dim=-1)
    log_prob = log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
    return log_prob, -(log_probs.exp() * log_probs).sum(-1)


def gaussian_log_prob(parameters: Tensor, action: Tensor) -> Tensor:
    """Return the logarithm of the density of N(mean, diag(std^2)) at the action, [..., D] -> [...].

    ``parameters`` [..., 2D] hold the mean, then log(std).
    """
    mean, log_std = parameters.chunk(2, dim=-1)
    deviation = (action - mean) * torch.exp(-log_std)
    return (-0.5 * deviation.square() - log_std - HALF_LOG_TWO_PI).sum(-1)


def gaussian_log_prob_and_entropy(parameters: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``gaussian_log_prob`` and the entropy, sum_i log(std_i) + (1 + log(2 pi)) / 2, both [...]."""
    _, log_std = parameters.chunk(2, dim=-1)
    return gaussian_log_prob(parameters, action), (log_std + (0.5 + HALF_LOG_TWO_PI)).sum(-1)


def log_prob_for(action: ActionSpec) -> LogProb:
    """Return the log-probability function of such actions' distribution."""
    return categorical_log_prob if action.kind == "discrete" else gaussian_log_prob


def log_prob_and_entropy_for(action: ActionSpec) -> LogProbAndEntropy:
    """Return the function that computes both for such actions' distribution."""
    return categorical_log_prob_and_entropy if action.kind == "discrete" else gaussian_log_prob_and_entropy
