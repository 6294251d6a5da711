"""Learning curves of runs, and what several seeds of one experiment say together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from rlsrl.data.episodes import info_field, info_statistics
from rlsrl.local.metrics_log import MetricsRow, evaluation_rows, read_rows, training_rows

Axis = Literal["env-steps", "train-steps", "seconds"]
"""What a curve is drawn over: transitions trained, training steps, or seconds of training."""
AXES: tuple[Axis, ...] = get_args(Axis)
Points = tuple[tuple[float, float], ...]
"""(place on the axis, value), ascending."""
Floats64 = NDArray[np.float64]

GRID_POINTS = 200
"""Points of a band."""
RESAMPLES = 1000
"""Bootstrap samples of the seeds."""
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Series:
    """One quantity of a run."""

    points: Points = ()
    """Means over the last episodes of training: (place on the axis, mean), ascending."""
    evaluations: Points = ()
    """Means of the evaluated versions whose episodes all ended, in the same form."""
    count: float | None = None
    """Of values of ``info``: how many episodes of training had one."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The learning curve of one run."""

    label: str
    """Its name in a legend."""
    returns: Series
    """Mean returns."""
    others: Mapping[str, Series] = field(default_factory=dict)
    """Further quantities by the label of their axis: length, chosen values of ``info``, and chosen metrics."""

    @property
    def has_points(self) -> bool:
        """Whether there is anything to draw."""
        return bool(self.returns.points or self.returns.evaluations)


@dataclass(frozen=True, kw_only=True, eq=False)
class Band:
    """The learning curve of several seeds, at n places of the axis; float64 arrays."""

    x: Floats64
    """Places on the axis, [n], as far as the shortest run."""
    centre: Floats64
    """Interquartile mean over the seeds, [n]."""
    low: Floats64
    """Lower end of its bootstrap interval, [n]."""
    high: Floats64
    """Upper end, [n]."""


def curve_of(rows: Sequence[MetricsRow], label: str, axis: Axis = "env-steps", metrics: Sequence[str] = ()) -> Curve:
    """Return the curve of a run's rows, without rows that have no return: no episode had ended yet.

    ``metrics`` are names of scalars that are among the further quantities, too, if the rows have them.
    """
    keys = dict.fromkeys(key for row in rows for key in info_statistics(row.scalars))
    series = {"mean length": _series(rows, axis, "length_mean")}
    series |= {
        f"mean {key}": _series(rows, axis, f"{info_field(key)}/mean", f"{info_field(key)}/count") for key in keys
    }
    series |= {name: _series(rows, axis, name) for name in metrics}
    return Curve(
        label=label,
        returns=_series(rows, axis, "return_mean"),
        others={title: each for title, each in series.items() if each.points or each.evaluations},
    )


def read_curve(metrics: Path, label: str, axis: Axis = "env-steps") -> Curve:
    """Return the curve of a ``metrics.jsonl``; empty if the file does not exist."""
    return curve_of(read_rows(metrics), label, axis)


def smoothed(points: Points, number: int) -> Points:
    """Return the points with each value replaced by the mean of the ``number`` values around it, fewer at the ends."""
    if number <= 1 or len(points) < 2:
        return points
    values, before = np.array([value for _, value in points]), (number - 1) // 2
    sums = np.concatenate([[0.0], np.cumsum(values)])
    begin = np.arange(len(values)) - before
    first, after = np.maximum(begin, 0), np.minimum(begin + number, len(values))
    means = (sums[after] - sums[first]) / (after - first)
    return tuple((x, float(mean)) for (x, _), mean in zip(points, means, strict=True))


def interquartile_mean(values: Floats64) -> Floats64:
    """Return the mean over axis 0 without the lowest and the highest quarter, [...] of [n, ...].

    A quarter is rounded down, as in Agarwal et al. (2021), "Deep Reinforcement Learning at the Edge of the Statistical
    Precipice": with fewer than four values it is their mean.
    """
    ordered, cut = np.sort(values, axis=0), len(values) // 4
    return np.asarray(ordered[cut : len(values) - cut].mean(axis=0))


def bootstrap_interval(values: Floats64) -> tuple[Floats64, Floats64]:
    """Return the ends, [...] each, of the percentile bootstrap interval of the interquartile mean of [n, ...].

    Seeds are drawn anew with replacement. The same values give the same interval.
    """
    rng = np.random.default_rng(0)
    drawn = [interquartile_mean(values[rng.integers(len(values), size=len(values))]) for _ in range(RESAMPLES)]
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    return np.asarray(low), np.asarray(high)


def band_of(runs: Sequence[Points]) -> Band | None:
    """Return the band of several runs over the range of the axis that all of them have; None without such a range."""
    if not runs or not all(runs):
        return None
    begin, end = max(points[0][0] for points in runs), min(points[-1][0] for points in runs)
    if begin >= end:
        return None
    x = np.linspace(begin, end, GRID_POINTS)
    values = np.stack([np.interp(x, *np.array(points).T) for points in runs])
    low, high = bootstrap_interval(values)
    return Band(x=x, centre=interquartile_mean(values), low=low, high=high)


def _series(rows: Sequence[MetricsRow], axis: Axis, name: str, count: str | None = None) -> Series:
    training = training_rows(rows)
    counts = [] if count is None else [row.scalars[count] for row in training if count in row.scalars]
    return Series(
        points=tuple((place, row.scalars[name]) for row, place in _placed(training, axis) if name in row.scalars),
        evaluations=_evaluations(rows, training, axis, f"evaluation/{name}"),
        count=counts[-1] if counts else None,
    )


def _placed(training: Sequence[MetricsRow], axis: Axis) -> list[tuple[MetricsRow, float]]:
    if axis == "train-steps":
        return [(row, float(row.step)) for row in training]
    scalar = {"env-steps": "env_steps", "seconds": "train_seconds"}[axis]
    return [(row, row.scalars[scalar]) for row in training if scalar in row.scalars]


def _evaluations(rows: Sequence[MetricsRow], training: Sequence[MetricsRow], axis: Axis, name: str) -> Points:
    evaluated = [row for row in evaluation_rows(rows) if name in row.scalars]
    if axis == "train-steps":
        return tuple((float(row.step), row.scalars[name]) for row in evaluated)
    if axis == "env-steps":
        steps = "evaluation/env_steps"
        return tuple((row.scalars[steps], row.scalars[name]) for row in evaluated if steps in row.scalars)
    placed = [(float(row.step), place) for row, place in _placed(training, axis)]
    if not placed:
        return ()
    seconds = np.interp([row.step for row in evaluated], *np.array(placed).T)
    return tuple((float(place), row.scalars[name]) for row, place in zip(evaluated, seconds, strict=True))
