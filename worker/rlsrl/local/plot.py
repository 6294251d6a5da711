"""Draws learning curves over transitions trained: what episodes report, and the results of evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rlsrl.data.episodes import info_field, info_statistics
from rlsrl.local.metrics_log import MetricsRow, evaluation_rows, read_rows, training_rows

PANEL_INCHES = 2.5
"""Height of each panel below the first."""

Points = tuple[tuple[float, float], ...]
"""(transitions trained, value), ascending."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One quantity of a run."""

    points: Points
    """Means over the last episodes of training."""
    evaluations: Points
    """Means of the evaluated versions."""
    count: float | None = None
    """Of values of ``info``: how many episodes of training had one."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The learning curve of one run."""

    label: str
    env_steps: tuple[float, ...]
    """Transitions trained, ascending."""
    return_mean: tuple[float, ...]
    """Mean return of the last episodes, one value for each of ``env_steps``."""
    evaluations: Points = ()
    """(transitions trained, mean return) of each evaluated version whose episodes all ended, ascending."""
    others: Mapping[str, Series] = field(default_factory=dict)
    """Further quantities by the label of their axis: length, and chosen values of ``info``."""

    @property
    def has_points(self) -> bool:
        """Whether there is anything to draw."""
        return bool(self.env_steps or self.evaluations)


def curve_of(rows: Sequence[MetricsRow], label: str) -> Curve:
    """Return the curve of a run's rows, without rows that have no return: no episode had ended yet."""
    returns = _series(rows, "return_mean")
    keys = dict.fromkeys(key for row in rows for key in info_statistics(row.scalars))
    series = {"mean length": _series(rows, "length_mean")}
    series |= {f"mean {key}": _series(rows, f"{info_field(key)}/mean", f"{info_field(key)}/count") for key in keys}
    return Curve(
        label=label,
        env_steps=tuple(env_steps for env_steps, _ in returns.points),
        return_mean=tuple(return_mean for _, return_mean in returns.points),
        evaluations=returns.evaluations,
        others={title: each for title, each in series.items() if each.points or each.evaluations},
    )


def _series(rows: Sequence[MetricsRow], name: str, count: str | None = None) -> Series:
    counts = [] if count is None else _points(training_rows(rows), "env_steps", count)
    return Series(
        points=_points(training_rows(rows), "env_steps", name),
        evaluations=_points(evaluation_rows(rows), "evaluation/env_steps", f"evaluation/{name}"),
        count=counts[-1][1] if counts else None,
    )


def _points(rows: Sequence[MetricsRow], x: str, y: str) -> Points:
    return tuple((row.scalars[x], row.scalars[y]) for row in rows if x in row.scalars and y in row.scalars)


def read_curve(metrics: Path, label: str) -> Curve:
    """Return the curve of a ``metrics.jsonl``; empty if the file does not exist."""
    return curve_of(read_rows(metrics), label)


def draw(curves: Sequence[Curve]) -> Figure:
    """Return a figure with all curves: a panel for the return, and one for each further quantity.

    The legends of panels of ``info`` say how many episodes had a value.
    """
    titles = list(dict.fromkeys(title for curve in curves for title in curve.others))
    figure = Figure(figsize=(8, 5 + PANEL_INCHES * len(titles)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1 + len(titles), 1, sharex=True, squeeze=False, height_ratios=[2, *[1] * len(titles)])
    first, *others = panels[:, 0]
    for number, curve in enumerate(curves):
        points = tuple(zip(curve.env_steps, curve.return_mean, strict=True))
        _draw(first, Series(points=points, evaluations=curve.evaluations), curve.label, f"C{number}")
        for axes, title in zip(others, titles, strict=True):
            if (series := curve.others.get(title)) is not None:
                count = "" if series.count is None else f", {series.count:,.0f} episodes"
                _draw(axes, series, f"{curve.label}{count}", f"C{number}")
                if count:
                    axes.legend()
    for axes, title in zip((first, *others), ("mean return of the last episodes", *titles), strict=True):
        axes.set_ylabel(title)
        axes.grid(visible=True, alpha=0.3)
    panels[-1, 0].set_xlabel("env steps")
    if len(curves) > 1 or any(curve.evaluations for curve in curves):
        first.legend()
    if len(curves) == 1:
        first.set_title(curves[0].label)
    return figure


def _draw(axes: Axes, series: Series, label: str, color: str) -> None:
    # A short run has a single point, which a line does not show.
    marker = "." if len(series.points) < 3 else ""
    axes.plot(*_coordinates(series.points), label=label, marker=marker, color=color)
    if series.evaluations:
        x, y = _coordinates(series.evaluations)
        axes.scatter(x, y, label=f"{label}, evaluated", color=color, edgecolors="black", zorder=3)


def _coordinates(points: Points) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def save(curves: Sequence[Curve], path: Path) -> None:
    """Draw the curves into a file; its suffix selects the format.

    Raises:
        OSError: the file cannot be written.
        ValueError: the suffix is not a known format.
    """
    draw(curves).savefig(path, dpi=120)
