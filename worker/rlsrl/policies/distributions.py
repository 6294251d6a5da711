"""Action distributions as functions of their parameters, in torch. Stable and free of classes, so that they compile."""

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
    """log softmax(logits)[action]: logits [..., A], action [...] int64 -> [...]."""
    return torch.log_softmax(logits, dim=-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)


def categorical_entropy(logits: Tensor) -> Tensor:
    """-sum p log p of p = softmax(logits): [..., A] -> [...]."""
    log_probs = torch.log_softmax(logits, dim=-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def categorical_log_prob_and_entropy(logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Both at once, from one softmax."""
    log_probs = torch.log_softmax(logits, dim=-1)
    log_prob = log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
    return log_prob, -(log_probs.exp() * log_probs).sum(-1)


def gaussian_log_prob(parameters: Tensor, action: Tensor) -> Tensor:
    """Logarithm of the density of N(mean, diag(std^2)) at the action, [..., D] -> [...].

    ``parameters`` are mean and log(std), one after the other: [..., 2D].
    """
    mean, log_std = parameters.chunk(2, dim=-1)
    deviation = (action - mean) * torch.exp(-log_std)
    return (-0.5 * deviation.square() - log_std - HALF_LOG_TWO_PI).sum(-1)


def gaussian_entropy(parameters: Tensor) -> Tensor:
    """sum_i log(std_i) + (1 + log(2 pi)) / 2 of those parameters: [..., 2D] -> [...]."""
    _, log_std = parameters.chunk(2, dim=-1)
    return (log_std + (0.5 + HALF_LOG_TWO_PI)).sum(-1)


def gaussian_log_prob_and_entropy(parameters: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Both at once."""
    return gaussian_log_prob(parameters, action), gaussian_entropy(parameters)


def log_prob_for(action: ActionSpec) -> LogProb:
    """The function of the distribution over such actions."""
    return categorical_log_prob if action.kind == "discrete" else gaussian_log_prob


def log_prob_and_entropy_for(action: ActionSpec) -> LogProbAndEntropy:
    """Both functions of that distribution."""
    return categorical_log_prob_and_entropy if action.kind == "discrete" else gaussian_log_prob_and_entropy
