"""Finding a run on this machine, by its folder or by its name."""

from __future__ import annotations

from pathlib import Path

from rlsrl.cli.errors import UserError
from rlsrl.local.run_folder import RUNS
from rlsrl.runtime.errors import did_you_mean


def find_run(run: Path, *marks: str) -> Path:
    """Return the folder ``run``, or the run of that name in runs/. A run folder contains one of the files ``marks``.

    Raises:
        UserError: the run does not exist; with the nearest match.
    """
    for folder in (run, RUNS / run):
        if any((folder / mark).exists() for mark in marks):
            return folder
    if run.exists():
        problem = f"{run} is not a run folder: it has no {' or '.join(marks)}"
    else:
        problem = f"run {run} does not exist, neither here nor in {RUNS}/"
    raise UserError(
        problem + did_you_mean(run.name, [path.parent.name for mark in marks for path in RUNS.glob(f"*/{mark}")])
    )
