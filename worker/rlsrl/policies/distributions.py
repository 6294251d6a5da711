"""Action distributions as functions of their parameters, in torch. Numerically stable; plain functions compile well.

The parts of a joint action are independent: log-probabilities and entropies are sums over its parts. ``sampling`` has
the same distributions in numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus

from rlsrl.data.specs import ActionPart, ActionSpec, PartKind
from rlsrl.policies.exported import LOG_STD_RANGE
from rlsrl.runtime.errors import ConfigurationError

HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)
LOG_TWO = math.log(2.0)

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


def bernoulli_log_prob(logits: Tensor, action: Tensor) -> Tensor:
    """Return the sum of log sigmoid(l_i) for flags that are 1 and log(1 - sigmoid(l_i)) for others, [..., D] -> [...].

    ``action`` [..., D] holds 0 and 1, of any dtype.
    """
    return logsigmoid((2.0 * action - 1.0) * logits).sum(-1)


def bernoulli_log_prob_and_entropy(logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``bernoulli_log_prob`` and the entropy, sum_i log(1 + exp(l_i)) - l_i sigmoid(l_i), both [...]."""
    return bernoulli_log_prob(logits, action), (softplus(logits) - logits * torch.sigmoid(logits)).sum(-1)


def squashed_sample(parameters: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return tanh(u) and the logarithm of its density, of u from N(mean, diag(std^2)).

    ``parameters`` [..., 2D] hold the mean, then log(std), which is cut to ``LOG_STD_RANGE``. With ``noise`` [..., D]
    u is ``mean + std * noise``, through which gradients flow. Returns [..., D] and [...]. The density is that within
    [-1, 1]^D (Haarnoja et al. 2018, equation 21), with ``log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u))``, which
    loses no digits where the tanh is close to 1.
    """
    mean, log_std = parameters.chunk(2, dim=-1)
    log_std = log_std.clamp(*LOG_STD_RANGE)
    before = mean + log_std.exp() * noise
    slope = 2.0 * (LOG_TWO - before - softplus(-2.0 * before))
    return torch.tanh(before), (-0.5 * noise.square() - log_std - HALF_LOG_TWO_PI - slope).sum(-1)


LOG_PROBS: Mapping[PartKind, LogProb] = {
    "categorical": categorical_log_prob,
    "bernoulli": bernoulli_log_prob,
    "gaussian": gaussian_log_prob,
}
"""Log-probability functions by kind of part. The others' densities are infinite or not defined at the bounds."""

LOG_PROBS_AND_ENTROPIES: Mapping[PartKind, LogProbAndEntropy] = {
    "categorical": categorical_log_prob_and_entropy,
    "bernoulli": bernoulli_log_prob_and_entropy,
    "gaussian": gaussian_log_prob_and_entropy,
}
"""Functions that compute both by kind of part."""


def _check_has_density(action: ActionSpec) -> None:
    if (kind := action.parts[0].kind) not in LOG_PROBS:
        raise ConfigurationError(
            f"the log-probability of {kind} actions does not follow from the actions: at a bound it is not known "
            "(rlsrl.policies.distributions.squashed_sample draws squashed ones with theirs)"
        )


def log_prob_for(action: ActionSpec) -> LogProb:
    """Return the log-probability function of such actions' distribution.

    Raises:
        ConfigurationError: they are vectors within bounds.
    """
    _check_has_density(action)
    if action.kind != "joint":
        return LOG_PROBS[action.parts[0].kind]

    def joint_log_prob(parameters: Tensor, actions: Tensor) -> Tensor:
        parts = [LOG_PROBS[kind](of_part, chosen) for kind, of_part, chosen in _split(action, parameters, actions)]
        return torch.stack(parts).sum(0)

    return joint_log_prob


def log_prob_and_entropy_for(action: ActionSpec) -> LogProbAndEntropy:
    """Return the function that computes both for such actions' distribution.

    Raises:
        ConfigurationError: they are vectors within bounds.
    """
    _check_has_density(action)
    if action.kind != "joint":
        return LOG_PROBS_AND_ENTROPIES[action.parts[0].kind]

    def joint_log_prob_and_entropy(parameters: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        parts = [
            LOG_PROBS_AND_ENTROPIES[kind](of_part, chosen)
            for kind, of_part, chosen in _split(action, parameters, actions)
        ]
        log_probs, entropies = zip(*parts, strict=True)
        return torch.stack(log_probs).sum(0), torch.stack(entropies).sum(0)

    return joint_log_prob_and_entropy


def _split(spec: ActionSpec, parameters: Tensor, actions: Tensor) -> Iterator[tuple[PartKind, Tensor, Tensor]]:
    """Yield (kind, parameters [..., P], actions) of each part; the actions are those that the kind's functions take."""
    of_parts = torch.split(parameters, [part.num_parameters for part in spec.parts], dim=-1)
    chosen = torch.split(actions, [part.num_entries for part in spec.parts], dim=-1)
    for part, of_part, of_actions in zip(spec.parts, of_parts, chosen, strict=True):
        is_choice = part.kind == "categorical"
        yield part.kind, of_part, of_actions.squeeze(-1).to(torch.int64) if is_choice else of_actions


def constant_deviations(action: ActionSpec) -> nn.Parameter | None:
    """Return the logarithms of the action's standard deviations as one parameter of zeros, or None if it has none."""
    number = action.num_constant_deviations
    return nn.Parameter(torch.zeros(number)) if number else None


def policy_head(action: ActionSpec, outputs: Tensor, log_std: Tensor | None) -> Tensor:
    """Return the head ``policy`` [N, head_size] of a last layer's ``outputs`` [N, num_layer_outputs].

    ``log_std``: the network's ``constant_deviations``.
    """
    if action.kind == "continuous" and action.vectors == "clipped":
        return torch.tanh(outputs)
    return with_deviations(action.parts, outputs, log_std)


def with_deviations(parts: tuple[ActionPart, ...], outputs: Tensor, log_std: Tensor | None) -> Tensor:
    """Return the distribution parameters [N, A] of ``outputs`` [N, num_outputs] with ``constant_deviations``."""
    if log_std is None:
        return outputs
    of_parts = torch.split(outputs, [part.num_outputs for part in parts], dim=-1)
    deviations = torch.split(log_std, [part.num_deviations for part in parts])
    columns: list[Tensor] = []
    for part, of_part, of_deviations in zip(parts, of_parts, deviations, strict=True):
        columns += [of_part, of_deviations.expand_as(of_part)] if part.num_deviations else [of_part]
    return torch.cat(columns, dim=-1)
