"""The text of ``top`` for a run on this machine, from the status file in its run folder."""

from __future__ import annotations

from pathlib import Path

from rlsrl.cli.errors import UserError
from rlsrl.cli.text import span
from rlsrl.cli.top_table import top_table
from rlsrl.local.run_folder import STATUS, is_running
from rlsrl.local.status_file import read_status

LATE_SECONDS = 5.0
"""Age from which the status is shown as old: the coordinator does not answer."""


def run_status(folder: Path, *, whole: bool) -> tuple[str, bool]:
    """Return the table of the run in that folder, and whether the run has ended.

    Raises:
        UserError: the run does not run and has no status.
    """
    try:
        running = is_running(folder)  # first, so that the last status of an ended run is read
        found = read_status(folder / STATUS)
    except (OSError, ValueError) as error:
        raise UserError(f"the status of {folder} cannot be read: {error}") from error
    if found is None:
        if not running:
            raise UserError(f"{folder} is not running and has no {STATUS} of an earlier life")
        return f"{folder.name}: starting", False
    document, age = found
    table = top_table(document, whole=whole)
    if not running:
        return f"{table}\n\n{span(age)} old: the run has ended", True
    late = f"\n\n{span(age)} old: the coordinator does not answer" if age > LATE_SECONDS else ""
    return f"{table}{late}", False
