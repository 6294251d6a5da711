"""Fit the costs of ``rlsrl size`` to measured rates: least squares on the logarithm of transitions a second.

The method is Levenberg's and Marquardt's over the logarithms of the free costs, with numerical derivatives. A prior
holds each free cost near its first value, so that costs on which the points do not depend stay where they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rlsrl.sizing.costs import SPEEDS, Costs
from rlsrl.sizing.estimate import estimate
from rlsrl.sizing.workload import Workload

RATE_DEVIATION = 0.03
"""Standard deviation of a rate's logarithm: the error of a good model."""
PRIOR_DEVIATION = 0.7
"""Standard deviation of a cost's logarithm: usually within a factor of two."""
STEP = 0.05
"""Of a logarithm, for derivatives: large against the model's kinks, small against a factor."""
ROUNDS = 25
FIRST_DAMPING, MOST_DAMPING = 1e-2, 1e6
"""More damping makes smaller moves. Large moves may fail, because the model has kinks where another part saturates."""
LEAST_GAIN = 1e-3

Vector = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class MeasuredRate:
    """One point: a workload and its measured rate."""

    workload: Workload
    env_steps_a_second: float


def fit(points: Sequence[MeasuredRate], start: Costs, free: Sequence[str]) -> Costs:
    """Return ``start`` with the costs named in ``free`` changed such that the model agrees best with the points.

    Raises:
        ValueError: there are no points, or a name in ``free`` is not a cost.
    """
    if not points:
        raise ValueError("no points to fit costs to")
    if unknown := sorted(set(free) - set(Costs.__dataclass_fields__)):
        raise ValueError(f"{', '.join(unknown)}: no such cost")
    first = np.log([getattr(start, name) for name in free])
    return _costs_at(start, free, least_squares(lambda x: _residuals(points, start, free, first, x), first))


def least_squares(residuals: Callable[[Vector], Vector], x: Vector) -> Vector:
    """Return the minimum of the sum of squares of ``residuals``, searched from ``x``. It may have small ripples."""
    error, damping = residuals(x), FIRST_DAMPING
    for _ in range(ROUNDS):
        jacobian = _jacobian(residuals, x, error)
        normal = jacobian.T @ jacobian
        while damping < MOST_DAMPING:
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -jacobian.T @ error)
            tried = x + np.clip(move, -1.0, 1.0)
            tried_error = residuals(tried)
            if tried_error @ tried_error < error @ error:
                break
            damping *= 4
        else:
            break
        gain = 1 - (tried_error @ tried_error) / (error @ error)
        x, error, damping = tried, tried_error, damping / 10
        if gain < LEAST_GAIN:
            break
    return x


def _costs_at(start: Costs, free: Sequence[str], x: Vector) -> Costs:
    values = dict(zip(free, np.exp(x).tolist(), strict=True))
    values |= {name: min(1.0, values[name]) for name in SPEEDS if name in values}
    return replace(start, **values)


def _residuals(points: Sequence[MeasuredRate], start: Costs, free: Sequence[str], first: Vector, x: Vector) -> Vector:
    """Return [points + free costs]: the model's errors, then the distances of the costs from their first values."""
    costs = _costs_at(start, free, x)
    rates = [estimate(point.workload, costs).env_steps_a_second for point in points]
    off = np.log(rates) - np.log([point.env_steps_a_second for point in points])
    return np.concatenate([off / RATE_DEVIATION, (x - first) / PRIOR_DEVIATION])


def _jacobian(residuals: Callable[[Vector], Vector], x: Vector, error: Vector) -> Vector:
    columns = []
    for number in range(len(x)):
        moved = x.copy()
        moved[number] -= STEP  # downwards: a speed may be at its bound
        columns.append((error - residuals(moved)) / STEP)
    return np.stack(columns, axis=1)
