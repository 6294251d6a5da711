"""Draws learning curves: what episodes report, and the results of evaluations, of single runs or bands of seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rlsrl.local.curves import AXES, Axis, Curve, Points, Series, band_of, smoothed

PANEL_INCHES = 2.5
"""Height of each panel below the first."""
AXIS_LABELS: Mapping[Axis, str] = dict(zip(AXES, ("env steps", "training steps", "seconds of training"), strict=True))


@dataclass(frozen=True, kw_only=True)
class DrawnGroup:
    """Runs of one experiment that are drawn as one band, or one run that is drawn as a line."""

    label: str
    curves: Sequence[Curve]

    def series(self, title: str | None) -> list[Series]:
        """Return the series of that title of all runs that have it; None: the returns."""
        if title is None:
            return [curve.returns for curve in self.curves]
        return [curve.others[title] for curve in self.curves if title in curve.others]


def draw(
    groups: Sequence[DrawnGroup], *, axis: Axis = "env-steps", smooth: int = 1, goals: Sequence[float] = ()
) -> Figure:
    """Return a figure with all groups: a panel for the return, and one for each further quantity.

    The legends of panels of ``info`` say how many episodes had a value.

    Args:
        groups: A run, or runs with other seeds, each.
        axis: What the curves are drawn over.
        smooth: Number of neighbouring points whose mean is drawn.
        goals: Returns that are marked by a line across the panel of the return.
    """
    titles = list(dict.fromkeys(title for group in groups for curve in group.curves for title in curve.others))
    figure = Figure(figsize=(8, 5 + PANEL_INCHES * len(titles)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1 + len(titles), 1, sharex=True, squeeze=False, height_ratios=[2, *[1] * len(titles)])
    first, *others = panels[:, 0]
    for number, group in enumerate(groups):
        color = f"C{number}"
        _draw(first, group.series(None), group.label, color, smooth)
        for axes, title in zip(others, titles, strict=True):
            if series := group.series(title):
                counts = [each.count for each in series if each.count is not None]
                _draw(
                    axes,
                    series,
                    f"{group.label}, {sum(counts):,.0f} episodes" if counts else group.label,
                    color,
                    smooth,
                )
                if counts:
                    axes.legend()
    for goal in goals:
        first.axhline(goal, color="0.4", linestyle="--", linewidth=1, label=f"goal {goal:g}")
    for axes, title in zip((first, *others), ("mean return of the last episodes", *titles), strict=True):
        axes.set_ylabel(title)
        axes.grid(visible=True, alpha=0.3)
    panels[-1, 0].set_xlabel(AXIS_LABELS[axis])
    if len(groups) > 1 or goals or any(each.evaluations for group in groups for each in group.series(None)):
        first.legend()
    if len(groups) == 1:
        first.set_title(groups[0].label)
    return figure


def _draw(axes: Axes, series: Sequence[Series], label: str, color: str, smooth: int) -> None:
    series = [replace(each, points=smoothed(each.points, smooth)) for each in series]
    band = None if len(series) == 1 else band_of([each.points for each in series])
    if band is not None:
        axes.plot(band.x, band.centre, label=f"{label}, {len(series)} seeds", color=color)
        axes.fill_between(band.x, band.low, band.high, color=color, alpha=0.2, linewidth=0)
    for each in series:
        # A short run has a single point, which a line does not show.
        marker = "." if len(each.points) < 3 else ""
        style: dict[str, Any] = {"label": label, "marker": marker} if band is None else {"alpha": 0.3, "linewidth": 0.7}
        axes.plot(*_coordinates(each.points), color=color, **style)
        if each.evaluations and band is None:
            x, y = _coordinates(each.evaluations)
            axes.scatter(x, y, label=f"{label}, evaluated", color=color, edgecolors="black", zorder=3)


def _coordinates(points: Points) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def save(figure: Figure, path: Path) -> None:
    """Write the figure into a file; its suffix selects the format.

    Raises:
        OSError: the file cannot be written.
        ValueError: the suffix is not a known format; the text lists these.
    """
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
