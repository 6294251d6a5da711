"""The text of ``top`` for a run on this machine, from the status file in its run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlsrl.cli.errors import UserError
from rlsrl.cli.text import span
from rlsrl.cli.top_table import top_table
from rlsrl.local.run_folder import STATUS, RunFolderError, is_running, read_record
from rlsrl.local.status_file import read_status
from rlsrl.local.worker_report import mapping, reports_of

LATE_SECONDS = 5.0
"""Age from which the status is shown as old: the coordinator does not answer."""

KILLED = "the run was killed before it could end; the command that started it resumes it"


def run_status(folder: Path, *, whole: bool) -> tuple[str, bool]:
    """Return the table of the run in that folder, and whether the run has ended.

    Raises:
        UserError: the run does not run and has no status, or a file of it is damaged.
    """
    try:
        running = is_running(folder)  # first, so that the last status of an ended run is read
        found = read_status(folder / STATUS)
        record = None if running else read_record(folder)
    except RunFolderError as error:
        raise UserError(str(error)) from error
    except (OSError, ValueError) as error:
        raise UserError(f"the status of {folder} cannot be read: {error}") from error
    if found is None:
        if not running:
            raise UserError(f"{folder} is not running and has no {STATUS} of an earlier life")
        return f"{folder.name}: starting", False
    document, age = found
    if not running:
        killed = record is not None and record.was_killed
        end = KILLED if killed else "the run has ended"
        table = top_table(_without_processes(document, "killed" if killed else "ended"), whole=whole)
        return f"{table}\n\n{span(age)} old: {end}", True
    table = top_table(document, whole=whole)
    late = f"\n\n{span(age)} old: the coordinator does not answer" if age > LATE_SECONDS else ""
    return f"{table}{late}", False


def _without_processes(document: Mapping[str, Any], end: str) -> dict[str, Any]:
    """Return the last status of a run without processes: each worker's state is ``end``, and so is an open phase."""
    roles = {
        role: [{**report, "state": end, "stale": False} for report in reports_of(document, role)]
        for role in mapping(document, "roles")
    }
    phase = document.get("phase")
    return {**document, "roles": roles, "phase": phase if phase == "finished" else end}
