"""What a version says of exploration: actions that are uniform, or a deviation that is the same everywhere. numpy only.

Both are statistics of the version. They become parameters of the distribution where the policy is evaluated, so that
those who draw actions, also far from there, need to know nothing of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from rlsrl.data.specs import ActionPart, Arrays
from rlsrl.policies.epsilon_greedy import GREEDY_MARGIN
from rlsrl.policies.exported import MASKED_LOGIT, SMALLEST

Floats = NDArray[np.float32]

UNIFORM = "acting/uniform"
"""The name, in ``Parameters.statistics``, of whether all actions are equally probable, [] float32: 1, or 0."""
DEVIATION = "acting/deviation"
"""The name, in ``Parameters.statistics``, of the standard deviation of ``clipped`` actions, [] float32."""
UNIFORM_LOG_STD = np.float32(100.0)
"""The logarithm of a deviation that stands for a uniform distribution within [-1, 1]."""


def is_uniform(statistics: Arrays) -> bool:
    """Return whether a version's actions are all equally probable."""
    return bool(statistics.get(UNIFORM, 0.0))


def log_deviation_of(statistics: Arrays) -> np.float32:
    """Return the logarithm of a version's deviation of ``clipped`` actions; that of a tiny one if it has none."""
    return np.float32(np.log(max(float(statistics.get(DEVIATION, 0.0)), float(SMALLEST))))


def make_uniform(parameters: Floats, parts: Sequence[ActionPart]) -> None:
    """Change the distribution parameters, [A, N], of an action with those parts in place: all actions are equally
    probable. Illegal choices stay so. A ``gaussian`` part, which has no bounds, stays as it is.

    The most probable action, which evaluations take, stays the one that it was.
    """
    places = pairwise(accumulate((part.num_parameters for part in parts), initial=0))
    for part, (begin, end) in zip(parts, places, strict=True):
        of_part = parameters[begin:end]
        if part.kind == "categorical":
            best = of_part.argmax(axis=0)
            of_part[of_part != MASKED_LOGIT] = 0.0
            of_part[best, np.arange(of_part.shape[1])] += GREEDY_MARGIN
        elif part.kind == "bernoulli":
            np.multiply(np.sign(of_part), GREEDY_MARGIN, out=of_part)
        elif part.kind != "gaussian":
            of_part[part.num_outputs :] = UNIFORM_LOG_STD
