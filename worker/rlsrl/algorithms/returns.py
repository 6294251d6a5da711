"""Returns and advantages in numpy, without a loop over lanes or time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsrl.algorithms.base import Reduce

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


def generalized_advantages(
    *,
    reward: Floats,
    value: Floats,
    terminated: Flags,
    truncated: Flags,
    mask: Flags,
    discount: float,
    gae_lambda: float,
) -> tuple[Floats, Floats]:
    """Return (advantage, return), [T, B], by generalised advantage estimation (Schulman et al. 2016).

    ``delta_t = r_t + discount * V(s_{t+1}) - V(s_t)`` and ``A_t = delta_t + discount * gae_lambda * A_{t+1}``;
    ``return = A + V(s_t)``. ``value`` is [T+1, B], the other arrays are [T, B]. With NEXT_STEP autoreset a step always
    leads to the next frame, so:

    - a step that terminated is worth its reward alone; no later value flows back into it;
    - a step that was truncated bootstraps from its episode's final frame, ``value[t + 1]``; no later advantage flows
      back into it;
    - where ``mask`` is False there is no transition: advantage and return are 0, nothing flows through, and the other
      arrays are not used.
    """
    nothing = np.float32(0.0)
    following = np.where(terminated, nothing, value[1:])
    advantage = np.where(mask, reward + np.float32(discount) * following - value[:-1], nothing)
    decay = np.where(~mask | terminated | truncated, nothing, np.float32(discount * gae_lambda))
    accumulate_backwards(advantage, decay)
    return advantage, np.where(mask, advantage + value[:-1], nothing)


def accumulate_backwards(value: Floats, decay: Floats) -> None:
    """Compute ``value_t += decay_t * value_{t+1}`` for t = T-2 to 0, in place; overwrite ``decay``. Both [T, B].

    By doubling (Hillis and Steele 1986): after a pass each entry includes the contributions of the next ``span`` steps,
    and ``decay`` is the product over them. log2(T) passes over the array take a tenth of the time of T row operations.
    """
    span = 1
    while span < len(value):
        # A decay of 0 must block values that are not finite, too: 0 times infinity would be NaN.
        flows = decay[:-span] > 0.0
        value[:-span] += np.multiply(decay[:-span], value[span:], where=flows, out=np.zeros_like(value[span:]))
        decay[:-span] *= decay[span:]
        span *= 2


def explained_variance_sums(prediction: Floats, target: Floats) -> NDArray[np.float64]:
    """Return the sums for ``explained_variance``, [5], of one rank's entries. The sums of several ranks add up."""
    target64 = target.astype(np.float64)
    error = target64 - prediction
    sums = [target64.size, target64.sum(), np.square(target64).sum(), error.sum(), np.square(error).sum()]
    return np.array(sums, np.float64)


def explained_variance(sums: NDArray[Any]) -> float:
    """Return 1 - Var(target - prediction) / Var(target): 1 is perfect, 0 equals a constant; 0 if Var(target) is 0."""
    count, total, squares, error_total, error_squares = sums.tolist()
    variance = squares / max(count, 1.0) - (total / max(count, 1.0)) ** 2
    error_variance = error_squares / max(count, 1.0) - (error_total / max(count, 1.0)) ** 2
    return 1.0 - error_variance / variance if variance > 0.0 else 0.0


def divergence_sums(log_importance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [count, sum] of the finite w - 1 - log w, whose mean estimates KL(behaviour || trained): [N] -> [2].

    ``log_importance`` is log w, w the probability of an action under the policy in training over that under the policy
    that acted. The sums of several ranks add up.
    """
    divergence = np.expm1(log_importance) - log_importance
    finite = np.isfinite(divergence)
    return np.array([np.count_nonzero(finite), np.sum(divergence, where=finite)])


def diagnostics(
    prediction: Floats, target: Floats, log_importance: NDArray[np.float64], reduce: Reduce
) -> dict[str, float]:
    """Return ``explained_variance`` and ``behavior_kl`` of all ranks; the arguments are one rank's transitions, [N]."""
    sums = reduce(np.append(explained_variance_sums(prediction, target), divergence_sums(log_importance)))
    return {
        "explained_variance": explained_variance(sums[:-2]),
        "behavior_kl": float(sums[-1] / max(sums[-2], 1.0)),
    }
