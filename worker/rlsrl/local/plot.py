"""Draws learning curves: mean return over transitions trained, and the results of evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rlsrl.local.metrics_log import MetricsRow, evaluation_rows, read_rows, training_rows


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The learning curve of one run."""

    label: str
    env_steps: tuple[float, ...]
    """Transitions trained, ascending."""
    return_mean: tuple[float, ...]
    """Mean return of the last episodes, one value for each of ``env_steps``."""
    evaluations: tuple[tuple[float, float], ...] = ()
    """(transitions trained, mean return) of each evaluated version, ascending."""

    @property
    def has_points(self) -> bool:
        """Whether there is anything to draw."""
        return bool(self.env_steps or self.evaluations)


def curve_of(rows: Sequence[MetricsRow], label: str) -> Curve:
    """Return the curve of a run's rows, without rows that have no return: no episode had ended yet."""
    points = _points(training_rows(rows), "env_steps", "return_mean")
    return Curve(
        label=label,
        env_steps=tuple(env_steps for env_steps, _ in points),
        return_mean=tuple(return_mean for _, return_mean in points),
        evaluations=tuple(_points(evaluation_rows(rows), "evaluation/env_steps", "evaluation/return_mean")),
    )


def _points(rows: Sequence[MetricsRow], x: str, y: str) -> list[tuple[float, float]]:
    return [(row.scalars[x], row.scalars[y]) for row in rows if x in row.scalars and y in row.scalars]


def read_curve(metrics: Path, label: str) -> Curve:
    """Return the curve of a ``metrics.jsonl``; empty if the file does not exist."""
    return curve_of(read_rows(metrics), label)


def draw(curves: Sequence[Curve]) -> Figure:
    """Return a figure with all curves."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for curve in curves:
        # A short run has a single point, which a line does not show.
        marker = "." if len(curve.env_steps) < 3 else ""
        (line,) = axes.plot(curve.env_steps, curve.return_mean, label=curve.label, marker=marker)
        if curve.evaluations:
            x, y = zip(*curve.evaluations, strict=True)
            axes.scatter(x, y, label=f"{curve.label}, evaluated", color=line.get_color(), edgecolors="black", zorder=3)
    axes.set_xlabel("env steps")
    axes.set_ylabel("mean return of the last episodes")
    axes.grid(visible=True, alpha=0.3)
    if len(curves) > 1 or any(curve.evaluations for curve in curves):
        axes.legend()
    if len(curves) == 1:
        axes.set_title(curves[0].label)
    return figure


def save(curves: Sequence[Curve], path: Path) -> None:
    """Draw the curves into a file; its suffix selects the format.

    Raises:
        OSError: the file cannot be written.
        ValueError: the suffix is not a known format.
    """
    draw(curves).savefig(path, dpi=120)
