"""Costs from measured rates: least squares on the logarithm of transitions a second.

Levenberg's and Marquardt's method over the logarithms of the costs that are free, with derivatives by differences. Each
free cost is held near its first value by a prior, so that what the points say nothing of stays where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rlsrl.sizing.costs import Costs
from rlsrl.sizing.simulation import simulate
from rlsrl.sizing.workload import Workload

RATE_DEVIATION = 0.03
"""Of a measured rate's logarithm: what a good model is wrong by."""
PRIOR_DEVIATION = 0.7
"""Of a cost's logarithm: within a factor of two, usually."""
STEP = 0.05
"""Of a logarithm, for derivatives: large against what the order of events may change, small against a factor."""
ROUNDS = 25
FIRST_DAMPING, MOST_DAMPING = 1e-2, 1e6
"""Of the moves: the more, the smaller. The model is not smooth, for events change places: large moves may fail."""
NUM_BATCHES = 24
"""Training steps of a simulation while fitting."""
_ENOUGH = 1e-3

Vector = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One point: a workload, and the rate that was measured."""

    workload: Workload
    env_steps_a_second: float


def fit(points: Sequence[Measured], start: Costs, free: Sequence[str]) -> Costs:
    """``start`` with the costs named in ``free`` such that the model says of the points what was measured.

    Raises:
        ValueError: there are no points, or a name in ``free`` is no cost.
    """
    if not points:
        raise ValueError("no points to fit costs to")
    if unknown := sorted(set(free) - set(Costs.__dataclass_fields__)):
        raise ValueError(f"{', '.join(unknown)}: no such cost")
    first = np.log([getattr(start, name) for name in free])
    return _costs_at(start, free, least_squares(lambda place: _residuals(points, start, free, first, place), first))


def least_squares(residuals: Callable[[Vector], Vector], place: Vector) -> Vector:
    """Where the squares of ``residuals``, which may have steps and ripples, have the least sum; from ``place`` on."""
    error, damping = residuals(place), FIRST_DAMPING
    for _ in range(ROUNDS):
        jacobian = _jacobian(residuals, place, error)
        normal = jacobian.T @ jacobian
        while damping < MOST_DAMPING:
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -jacobian.T @ error)
            tried = place + np.clip(move, -1.0, 1.0)
            tried_error = residuals(tried)
            if tried_error @ tried_error < error @ error:
                break
            damping *= 4
        else:
            break
        gain = 1 - (tried_error @ tried_error) / (error @ error)
        place, error, damping = tried, tried_error, damping / 10
        if gain < _ENOUGH:
            break
    return place


def _costs_at(start: Costs, free: Sequence[str], place: Vector) -> Costs:
    values = dict(zip(free, np.exp(place).tolist(), strict=True))
    if "full_load_speed" in values:
        values["full_load_speed"] = min(1.0, values["full_load_speed"])
    return replace(start, **values)


def _residuals(points: Sequence[Measured], start: Costs, free: Sequence[str], first: Vector, place: Vector) -> Vector:
    """[points, then free costs]: how far the model is off, and how far costs are from where they began."""
    costs = _costs_at(start, free, place)
    rates = [simulate(point.workload, costs, num_batches=NUM_BATCHES).env_steps_a_second for point in points]
    off = np.log(rates) - np.log([point.env_steps_a_second for point in points])
    return np.concatenate([off / RATE_DEVIATION, (place - first) / PRIOR_DEVIATION])


def _jacobian(residuals: Callable[[Vector], Vector], place: Vector, error: Vector) -> Vector:
    columns = []
    for number in range(len(place)):
        moved = place.copy()
        moved[number] -= STEP  # downwards: a speed may be at its bound
        columns.append((error - residuals(moved)) / STEP)
    return np.stack(columns, axis=1)
