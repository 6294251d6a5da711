"""Learning curves as a picture: mean return against transitions trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rlsrl.local.metrics_log import MetricsRow, read_rows, without_rolled_back


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The learning curve of one run."""

    label: str
    env_steps: tuple[float, ...]
    """Transitions trained, ascending."""
    return_mean: tuple[float, ...]
    """Mean return of the last episodes at each of them."""


def curve_of(rows: Sequence[MetricsRow], label: str) -> Curve:
    """The curve in a run's rows; rows from before the first ended episode have no return and no place in it."""
    points = [
        (row.scalars["env_steps"], row.scalars["return_mean"])
        for row in without_rolled_back(rows)
        if "env_steps" in row.scalars and "return_mean" in row.scalars
    ]
    return Curve(
        label=label,
        env_steps=tuple(env_steps for env_steps, _ in points),
        return_mean=tuple(return_mean for _, return_mean in points),
    )


def read_curve(metrics: Path, label: str) -> Curve:
    """The curve in a ``metrics.jsonl``; empty if there is none."""
    return curve_of(read_rows(metrics), label)


def draw(curves: Sequence[Curve]) -> Figure:
    """One figure with all curves."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for curve in curves:
        # A run that ended within one report has a single point, which a line does not show.
        axes.plot(curve.env_steps, curve.return_mean, label=curve.label, marker="." if len(curve.env_steps) < 3 else "")
    axes.set_xlabel("env steps")
    axes.set_ylabel("mean return of the last episodes")
    axes.grid(visible=True, alpha=0.3)
    if len(curves) > 1:
        axes.legend()
    elif curves:
        axes.set_title(curves[0].label)
    return figure


def save(curves: Sequence[Curve], path: Path) -> None:
    """Draw the curves into a file; its suffix says the format.

    Raises:
        OSError: the file cannot be written.
        ValueError: there is no such format.
    """
    draw(curves).savefig(path, dpi=120)
