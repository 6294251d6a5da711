"""The distribution of actions that are chosen by their values: the best one, or with a probability any. numpy only.

What a policy answers are parameters of the distribution that the action is drawn from, whatever its network computes.
So values become logits where the network is evaluated, and drawing, log-probabilities and masks need to know nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlsrl.data.specs import Arrays
from rlsrl.policies.exported import MASKED_LOGIT, SMALLEST

Floats = NDArray[np.float32]

EPSILON = "acting/epsilon"
"""The name, in ``Parameters.statistics``, of the probability of a random action, [] float32."""
GREEDY_MARGIN = np.float32(1e-5)
"""How far the best action's logit is above the others' at least: without it an evaluation, which takes the most
probable action, could not tell the best one while every action is equally probable."""


def epsilon_of(statistics: Arrays) -> float:
    """Return a version's probability of a random action; 0 if it has none."""
    return float(statistics.get(EPSILON, 0.0))


def values_to_logits(values: Floats, epsilon: float | NDArray[np.float64]) -> None:
    """Replace the values of actions, [A, N], by the logits of the epsilon-greedy distribution, in place.

    ``epsilon`` is that of all lanes, or of each, [N]. With this probability each of the n legal actions is as probable
    as another, else the best one is taken: the best one's logit is ``log(1 - epsilon + epsilon / n)``, that of others
    ``log(epsilon / n)``. Illegal actions have the value ``MASKED_LOGIT``, and keep it.
    """
    best = values.argmax(axis=0)
    legal = values != MASKED_LOGIT
    share = epsilon / np.maximum(np.count_nonzero(legal, axis=0), 1)
    values[...] = np.where(legal, np.log(np.maximum(share, SMALLEST)), np.float32(MASKED_LOGIT))
    values[best, np.arange(values.shape[1])] = np.log(np.maximum(1.0 - epsilon + share, SMALLEST)) + GREEDY_MARGIN


def raise_epsilon(logits: Floats, exponents: Floats) -> None:
    """Replace the logits, [A, N], of epsilon-greedy distributions by those of ``epsilon ** exponents``, in place.

    ``exponents`` is [N]. Illegal actions keep their logit. Where a single action is legal nothing changes.
    """
    legal = logits != MASKED_LOGIT
    least = logits.min(axis=0, where=legal, initial=0.0).astype(np.float64)  # log(epsilon / n)
    epsilon = np.minimum(np.count_nonzero(legal, axis=0) * np.exp(least), 1.0)
    values_to_logits(logits, epsilon**exponents)


def ape_x_exponents(ranks: range, num_environments: int, spread: float) -> Floats:
    """Return the exponents of epsilon of the environments with these ranks, among so many in the whole fleet.

    Environment i of N has ``1 + spread * i / (N - 1)`` (Horgan et al. 2018, "Distributed prioritized experience
    replay", section 4, where ``spread`` is 7).
    """
    place = np.arange(ranks.start, ranks.stop, dtype=np.float32) / np.float32(max(num_environments - 1, 1))
    return np.float32(1.0) + np.float32(spread) * place
