"""Compares runs: those that differ in the seed alone are one group, with figures over its seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlsrl.api.edits import edits
from rlsrl.api.spec import RLExperiment
from rlsrl.local.curves import Axis, Curve, bootstrap_interval, curve_of, interquartile_mean
from rlsrl.local.edits import recorded_experiment
from rlsrl.local.metrics_log import evaluation_rows, read_rows, training_rows
from rlsrl.local.run_folder import METRICS, RunFolderError

SEED = "spec.seed"
EVALUATED = "evaluation/return_mean"


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What the files of one run say."""

    path: Path
    experiment: RLExperiment | None
    """None: the folder has metrics alone."""
    curve: Curve
    env_steps: float
    """Transitions trained."""
    seconds: float
    """Of training."""
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
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> SeedEstimate | None:
        """Return the estimate of the values that are there; None without any."""
        found = np.array([value for value in values if value is not None], np.float64)
        if not len(found):
            return None
        low, high = bootstrap_interval(found)
        return cls(value=float(interquartile_mean(found)), low=float(low), high=float(high))


@dataclass(frozen=True, kw_only=True)
class ComparedGroup:
    """Runs of one experiment, which differ in the seed alone."""

    label: str
    runs: Sequence[RunResult]

    @property
    def goal(self) -> float | None:
        """The mean return at which the runs end, or None."""
        return self.runs[0].goal

    @property
    def num_reached(self) -> int:
        """Runs that reached the goal."""
        return sum(run.steps_to_goal is not None for run in self.runs)

    def estimate(self, name: str) -> SeedEstimate | None:
        """Return the estimate of a field of ``RunResult``; None if no run has it."""
        return SeedEstimate.of([getattr(run, name) for run in self.runs])


def read_result(path: Path, axis: Axis = "env-steps") -> RunResult:
    """Return the result of a run folder, also of a run that trains."""
    try:
        experiment = recorded_experiment(path)
    except RunFolderError:
        experiment = None
    rows = read_rows(path / METRICS)
    curve = curve_of(rows, path.absolute().name, axis)
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
