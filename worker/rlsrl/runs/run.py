"""A run on this machine, as a Python object: its figures and its policies, while it trains and afterwards."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlsrl.api.spec import RLExperiment
from rlsrl.local.edits import recorded_experiment
from rlsrl.local.metrics_log import MetricsRow, evaluation_rows, program_rows, read_rows, training_rows
from rlsrl.local.run_folder import METRICS, SUMMARY, find_run
from rlsrl.runs.policy import TrainedPolicy, load
from rlsrl.workers.build.run_database import RESOLVED

Table = dict[str, NDArray[np.float64]]
"""Columns of equal length by name, for example for ``pandas.DataFrame``."""


class Run:
    """A run in a run folder."""

    def __init__(self, run: str | os.PathLike[str]) -> None:
        """Open a run folder, or the run of that name in ``runs/``. Nothing in it is changed or locked.

        Raises:
            RunFolderError: the run does not exist; with the nearest match.
        """
        self.path = find_run(Path(run), RESOLVED)
        """The run folder."""

    @property
    def experiment(self) -> RLExperiment:
        """The experiment, with every default written out and all edits.

        Raises:
            RunFolderError: the folder does not have it.
        """
        return recorded_experiment(self.path)

    def metrics(self, kind: Literal["training", "evaluations", "own"] = "training") -> Table:
        """Return the learning curve: one row for each report of the trainer, for each evaluated version, or for each
        call of ``TrainingProgress.log`` (``own``).

        Columns: ``step`` (training step), ``wall`` (Unix seconds), and the metrics by name, for example ``env_steps``,
        ``return_mean``, ``train/loss``. NaN: the row has no such value. Rows of training that a resumed run has rolled
        back are left out. Empty columns before the first row.

        Raises:
            ValueError: there is no such kind.
        """
        chosen = {"training": training_rows, "evaluations": evaluation_rows, "own": program_rows}
        if kind not in chosen:
            raise ValueError(f"kind is {kind!r}; allowed: {', '.join(chosen)}")
        return _table(chosen[kind](read_rows(self.path / METRICS)))

    @property
    def summary(self) -> Mapping[str, Any] | None:
        """The summary of a run that has ended, or was interrupted; None before."""
        try:
            summary: Mapping[str, Any] = json.loads((self.path / SUMMARY).read_bytes())
        except FileNotFoundError:
            return None
        return summary

    def policy(self, *, tag: str | None = None, version: str | None = None, seed: int = 0) -> TrainedPolicy:
        """Return the policy of this run, by default its newest version; arguments and errors: see ``load``."""
        return load(self.path, tag=tag, version=version, seed=seed)


def _table(rows: Sequence[MetricsRow]) -> Table:
    names = dict.fromkeys(name for row in rows for name in row.scalars)
    table: Table = {
        "step": np.array([row.step for row in rows], np.float64),
        "wall": np.array([row.wall for row in rows], np.float64),
    }
    for name in names:
        table[name] = np.array([row.scalars.get(name, np.nan) for row in rows], np.float64)
    return table
