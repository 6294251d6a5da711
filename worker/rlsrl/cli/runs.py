"""Finding a run on this machine, for commands."""

from __future__ import annotations

from pathlib import Path

from rlsrl.cli.errors import UserError
from rlsrl.local import run_folder


def find_run(run: Path, *marks: str) -> Path:
    """Return the run folder, as ``run_folder.find_run`` does.

    Raises:
        UserError: the run does not exist; with the nearest match.
    """
    try:
        return run_folder.find_run(run, *marks)
    except run_folder.RunFolderError as error:
        raise UserError(str(error)) from error
