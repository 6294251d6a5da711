"""Compares runs and draws their curves. Runs that differ in the seed alone are one group, with figures over seeds."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from rlsrl.api.edits import edits
from rlsrl.api.spec import RLExperiment
from rlsrl.local.curves import AXES, Axis, Band, Curve, band_of, bootstrap_interval, curve_of, interquartile_mean
from rlsrl.local.edits import recorded_experiment
from rlsrl.local.metrics_log import evaluation_rows, read_rows, training_rows
from rlsrl.local.run_folder import METRICS, RunFolderError, find_run
from rlsrl.local.run_names import RECORD
from rlsrl.runs.text_table import UNKNOWN, columns
from rlsrl.runtime.errors import did_you_mean
from rlsrl.runtime.extras import extras_named

SEED = "spec.seed"
EVALUATED = "evaluation/return_mean"
_HEADER = ("EXPERIMENT", "RUNS", "RETURN", "EVALUATION", "ENV STEPS", "SECONDS", "GOAL", "STEPS TO GOAL")


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What the files of one run say."""

    path: Path
    """The run folder."""
    experiment: RLExperiment | None
    """The experiment, with every default written out; None: the folder has metrics alone."""
    curve: Curve
    """Its learning curve."""
    env_steps: float
    """Transitions trained."""
    seconds: float
    """Seconds of training."""
    return_mean: float | None
    """Mean return of the last episodes at the end."""
    evaluation: float | None
    """Mean return of the last evaluated version."""
    steps_to_goal: float | None
    """Env steps until the mean return reached ``stop.returnMean``; None: it did not, or there is no goal."""

    @property
    def goal(self) -> float | None:
        """``stop.returnMean``."""
        return None if self.experiment is None else self.experiment.spec.stop.return_mean


@dataclass(frozen=True, kw_only=True)
class SeedEstimate:
    """An interquartile mean over seeds, with its 95 % bootstrap interval."""

    value: float
    """The mean without the lowest and the highest quarter of the values; of fewer than four values their mean."""
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end of the interval."""

    @classmethod
    def of(cls, values: Sequence[float]) -> SeedEstimate:
        """Return the estimate of one value or more."""
        found = np.array(values, np.float64)
        low, high = bootstrap_interval(found)
        return cls(value=float(interquartile_mean(found)), low=float(low), high=float(high))


@dataclass(frozen=True, kw_only=True)
class ComparedGroup:
    """Runs of one experiment, which differ in the seed alone."""

    label: str
    """The experiment's name, or the folder's if that has metrics alone. If groups share a name, the fields that differ
    from the first of them follow."""
    runs: Sequence[RunResult]
    """One for each seed, at least one."""

    @property
    def goal(self) -> float | None:
        """The mean return at which the runs end (``stop.returnMean``), or None."""
        return self.runs[0].goal

    @property
    def num_reached(self) -> int:
        """Runs that reached the goal."""
        return sum(run.steps_to_goal is not None for run in self.runs)

    @property
    def return_mean(self) -> SeedEstimate | None:
        """Mean return of the last episodes at the end; None: no episode has ended in any run."""
        return _estimate([run.return_mean for run in self.runs])

    @property
    def evaluation(self) -> SeedEstimate | None:
        """Mean return of the last evaluated version; None without any."""
        return _estimate([run.evaluation for run in self.runs])

    @property
    def env_steps(self) -> SeedEstimate:
        """Transitions trained."""
        return SeedEstimate.of([run.env_steps for run in self.runs])

    @property
    def seconds(self) -> SeedEstimate:
        """Seconds of training."""
        return SeedEstimate.of([run.seconds for run in self.runs])

    @property
    def steps_to_goal(self) -> SeedEstimate | None:
        """Env steps until the goal, over the runs that reached it; None: none did, or there is no goal."""
        return _estimate([run.steps_to_goal for run in self.runs])

    @property
    def band(self) -> Band | None:
        """The curve of the mean return over the seeds; None without a range of the axis that all runs have."""
        return band_of([run.curve.returns.points for run in self.runs])


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs side by side. ``print`` shows the table of ``rlsrl compare``: a row for each experiment."""

    groups: Sequence[ComparedGroup]
    """One for each experiment, in the order of their first runs."""
    axis: Axis
    """What curves and bands are over: ``env-steps``, ``train-steps``, or ``seconds`` of training."""

    @override
    def __str__(self) -> str:
        return columns([_HEADER, *(_row(group) for group in self.groups)])

    def plot(self, path: str | os.PathLike[str], *, smooth: int = 1) -> Path:
        """Draw the curves of all groups into one picture, or replace it. Several seeds are one band.

        Args:
            path: The picture; its suffix selects the format, for example ``.png`` or ``.svg``.
            smooth: Number of neighbouring points whose mean is drawn.

        Returns:
            The picture's path.

        Raises:
            ValueError: the suffix is not a known format, or ``smooth`` is below 1.
            NotInstalled: matplotlib is missing.
            OSError: the picture cannot be written.
        """
        if smooth < 1:
            raise ValueError(f"smooth is {smooth}; allowed: 1 or more")
        with extras_named():
            from rlsrl.local.plot import DrawnGroup, draw, save
        drawn = [DrawnGroup(label=group.label, curves=[run.curve for run in group.runs]) for group in self.groups]
        goals = sorted({group.goal for group in self.groups if group.goal is not None})
        save(draw(drawn, axis=self.axis, smooth=smooth, goals=goals), Path(path))
        return Path(path)


def compare(*runs: str | os.PathLike[str], axis: Axis = "env-steps") -> Comparison:
    """Compare runs over their seeds, as ``rlsrl compare`` does. Runs may still train.

    Runs that differ in the seed alone are one group. Its figures are interquartile means over the seeds, with 95 %
    bootstrap intervals.

    Args:
        runs: Run folders, names of runs in ``runs/``, or ``Run`` objects.
        axis: What curves and bands are over: ``env-steps``, ``train-steps``, or ``seconds`` of training.

    Raises:
        RunFolderError: a run does not exist; with the nearest match.
        ValueError: no run is given, or there is no such axis.
        OSError: a file cannot be read.
    """
    return Comparison(groups=grouped(_results(runs, axis)), axis=axis)


def plot(
    *runs: str | os.PathLike[str],
    path: str | os.PathLike[str],
    axis: Axis = "env-steps",
    smooth: int = 1,
    seeds: bool = False,
    metrics: Sequence[str] = (),
) -> Path:
    """Draw the learning curves of runs into one picture, as ``rlsrl plot`` does, or replace it.

    A line marks ``stop.returnMean``, and points the results of evaluations. Episodes' length and each chosen value of
    ``info`` have a panel of their own. Runs may still train.

    Args:
        runs: Run folders, names of runs in ``runs/``, or ``Run`` objects.
        path: The picture; its suffix selects the format, for example ``.png`` or ``.svg``.
        axis: What the curves are over: ``env-steps``, ``train-steps``, or ``seconds`` of training.
        smooth: Number of neighbouring points whose mean is drawn.
        seeds: Whether to draw runs that differ in the seed alone as one band: a line for their interquartile mean
            within its 95 % bootstrap interval.
        metrics: Names of metrics that have a panel of their own, too, for example ``train/entropy``: keys of
            ``Run.metrics()``.

    Returns:
        The picture's path.

    Raises:
        RunFolderError: a run does not exist, with the nearest match; or no episode of it has ended yet.
        ValueError: no run is given, there is no such axis, no run has such a metric, the suffix is not a known format,
            or ``smooth`` is below 1.
        NotInstalled: matplotlib is missing.
        OSError: a file cannot be read, or the picture cannot be written.
    """
    results = _results(runs, axis, metrics)
    for result in results:
        if not result.curve.has_points:
            raise RunFolderError(f"{result.path}: {METRICS} has no returns: no episode has ended yet")
    for name in metrics:
        if not any(name in result.curve.others for result in results):
            raise ValueError(_unknown_metric(name, results))
    alone = [ComparedGroup(label=result.curve.label, runs=[result]) for result in results]
    return Comparison(groups=grouped(results) if seeds else alone, axis=axis).plot(path, smooth=smooth)


def _unknown_metric(name: str, results: Sequence[RunResult]) -> str:
    rows = [row for result in results for row in training_rows(read_rows(result.path / METRICS))]
    known = sorted({key for row in rows for key in row.scalars})
    return f"no run has a metric {name!r}{did_you_mean(name, known)}; allowed: {', '.join(known)}"


def _estimate(values: Sequence[float | None]) -> SeedEstimate | None:
    """Return the estimate of the values that are there; None without any."""
    known = [value for value in values if value is not None]
    return SeedEstimate.of(known) if known else None


def run_with_metrics(run: str | os.PathLike[str]) -> Path:
    """Return the folder of a run that may have metrics alone.

    Raises:
        RunFolderError: the run does not exist; with the nearest match.
    """
    return find_run(Path(run), RECORD, METRICS)


def _results(runs: Sequence[str | os.PathLike[str]], axis: Axis, metrics: Sequence[str] = ()) -> list[RunResult]:
    if not runs:
        raise ValueError("no run is given; name at least one")
    if axis not in AXES:
        raise ValueError(f"axis is {axis!r}; allowed: {', '.join(AXES)}")
    return [read_result(run_with_metrics(run), axis, metrics) for run in runs]


def read_result(path: Path, axis: Axis = "env-steps", metrics: Sequence[str] = ()) -> RunResult:
    """Return the result of a run folder, also of a run that trains. Its curve has these ``metrics``, too."""
    try:
        experiment = recorded_experiment(path)
    except RunFolderError:
        experiment = None
    rows = read_rows(path / METRICS)
    curve = curve_of(rows, path.absolute().name, axis, metrics)
    returns = [row for row in training_rows(rows) if "return_mean" in row.scalars]
    newest = training_rows(rows)[-1].scalars if training_rows(rows) else {}
    goal = None if experiment is None else experiment.spec.stop.return_mean
    evaluated = [row.scalars[EVALUATED] for row in evaluation_rows(rows) if EVALUATED in row.scalars]
    reached = [row.scalars["env_steps"] for row in returns if goal is not None and row.scalars["return_mean"] >= goal]
    return RunResult(
        path=path,
        experiment=experiment,
        curve=curve,
        env_steps=newest.get("env_steps", 0.0),
        seconds=newest.get("train_seconds", 0.0),
        return_mean=returns[-1].scalars["return_mean"] if returns else None,
        evaluation=evaluated[-1] if evaluated else None,
        steps_to_goal=reached[0] if reached else None,
    )


def grouped(results: Sequence[RunResult]) -> list[ComparedGroup]:
    """Return the groups, in the order of their first runs.

    A group is named by its experiment. If groups share the name, the fields that differ from the first group follow.
    """
    groups: dict[str, list[RunResult]] = {}
    for result in results:
        groups.setdefault(_key(result), []).append(result)
    first_of: dict[str, RLExperiment] = {}
    return [ComparedGroup(label=_label(runs, first_of), runs=runs) for runs in groups.values()]


def _key(result: RunResult) -> str:
    if result.experiment is None:
        return str(result.path.absolute())
    return json.dumps([result.experiment.metadata.name, _without_seed(result.experiment)], sort_keys=True)


def _without_seed(experiment: RLExperiment) -> dict[str, Any]:
    return experiment.spec.model_dump(mode="json", by_alias=True, exclude={"seed"})


def _label(runs: Sequence[RunResult], first_of: dict[str, RLExperiment]) -> str:
    experiment = runs[0].experiment
    if experiment is None:
        return runs[0].curve.label
    name = experiment.metadata.name
    if name not in first_of:
        first_of[name] = experiment
        return name
    changed = [
        f"{edit.path.removeprefix('spec.')}={json.dumps(edit.after)}"
        for edit in edits(first_of[name], experiment)
        if edit.path != SEED
    ]
    return f"{name}, {', '.join(changed)}"


def _row(group: ComparedGroup) -> tuple[str, ...]:
    goal = UNKNOWN if group.goal is None else f"{group.goal:g} ({group.num_reached} of {len(group.runs)})"
    return (
        group.label,
        str(len(group.runs)),
        _shown(group.return_mean, ".4g"),
        _shown(group.evaluation, ".4g"),
        _shown(group.env_steps, ",.0f"),
        _shown(group.seconds, ",.1f"),
        goal,
        _shown(group.steps_to_goal, ",.0f"),
    )


def _shown(estimate: SeedEstimate | None, style: str) -> str:
    if estimate is None:
        return UNKNOWN
    if estimate.low == estimate.high:
        return format(estimate.value, style)
    return f"{estimate.value:{style}} ({estimate.low:{style}} to {estimate.high:{style}})"
