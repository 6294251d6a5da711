"""Action distributions as functions of their parameters, in torch. Stable and free of classes, so that they compile."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlsrl.data.specs import ActionSpec
from rlsrl.runtime.errors import ConfigurationError

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


def log_prob_and_entropy_for(action: ActionSpec) -> LogProbAndEntropy:
    """The functions of the distribution over such actions.

    Raises:
        ConfigurationError: there is none for this kind of action.
    """
    if action.kind != "discrete":
        raise ConfigurationError(f"policies choose discrete actions; the environment takes {action.kind} ones")
    return categorical_log_prob_and_entropy
