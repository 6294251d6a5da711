"""A run on this machine, as a Python object: its figures and its policies, while it trains and afterwards."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.api.spec import RLExperiment
from rlsrl.local.curves import Axis
from rlsrl.local.edits import recorded_experiment
from rlsrl.local.metrics_log import MetricsRow, evaluation_rows, program_rows, read_rows, training_rows
from rlsrl.local.run_folder import CURVE, METRICS, SUMMARY, find_run
from rlsrl.runs.comparison import plot
from rlsrl.runs.policy import TrainedPolicy, load
from rlsrl.runs.versions import VersionRow, tag_version, version_rows
from rlsrl.workers.build.run_database import RESOLVED, open_run_database

Table = dict[str, NDArray[np.float64]]
"""Columns of equal length by name, for example for ``pandas.DataFrame``."""


class Run(os.PathLike[str]):
    """A run in a run folder. Functions that take a run folder take a ``Run``, too."""

    def __init__(self, run: str | os.PathLike[str]) -> None:
        """Open a run folder, or the run of that name in ``runs/``. Opening changes and locks nothing.

        Raises:
            RunFolderError: the run does not exist; with the nearest match.
        """
        self.path: Path = find_run(Path(run), RESOLVED)
        """The run folder."""

    @override
    def __fspath__(self) -> str:
        return str(self.path)

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

        The table is a dict of columns by name: float64 arrays, [rows] each. Columns are ``step`` (training step),
        ``wall`` (Unix seconds), and the metrics, for example ``env_steps``, ``return_mean``, ``train/loss``. NaN: the
        row has no such value. Rows of training that a resumed run has rolled back are left out. Columns are empty
        before the first row.

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

    def versions(self) -> list[VersionRow]:
        """Return a row for each stored version, oldest first, as ``rlsrl params list`` does.

        All versions are read in full, and damaged ones are marked.

        Raises:
            ConfigurationError: the parameter store cannot be used from here.
            ParameterError: no version is stored yet.
            OSError: the parameter store failed.
        """
        return version_rows(open_run_database(self.path), POLICY_NAME)

    def tag(self, version: str, name: str) -> str:
        """Tag a version, as ``rlsrl params tag`` does, and return it. A tag of another version moves to it.

        A tagged version is never pruned.

        Args:
            version: A version such as ``1.2500``, a tag, or ``latest``.
            name: The tag: 1 to 63 letters, digits and ``_``, ``.``, ``-``, with a letter or digit first.

        Raises:
            ConfigurationError: the parameter store cannot be used from here.
            ParameterError: there is no such version, with the nearest match; or its header is damaged.
            ValueError: the tag has another form, is ``latest``, or reads as a version.
            OSError: the parameter store failed.
        """
        return str(tag_version(open_run_database(self.path), POLICY_NAME, version, name).version)

    def plot(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        axis: Axis = "env-steps",
        smooth: int = 1,
        metrics: Sequence[str] = (),
    ) -> Path:
        """Draw the learning curve of this run, by default into ``curve.png`` in its folder; see ``plot``."""
        picture = self.path / CURVE if path is None else path
        return plot(self, path=picture, axis=axis, smooth=smooth, metrics=metrics)


def _table(rows: Sequence[MetricsRow]) -> Table:
    names = dict.fromkeys(name for row in rows for name in row.scalars)
    table: Table = {
        "step": np.array([row.step for row in rows], np.float64),
        "wall": np.array([row.wall for row in rows], np.float64),
    }
    for name in names:
        table[name] = np.array([row.scalars.get(name, np.nan) for row in rows], np.float64)
    return table
