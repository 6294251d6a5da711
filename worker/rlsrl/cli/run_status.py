"""What the workers of a run of this machine do, from the status that its controller keeps in the run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from rlsrl.cli.errors import UserError
from rlsrl.cli.text import span
from rlsrl.cli.top_table import top_table
from rlsrl.local.run_folder import RECORD, RUNS, STATUS, is_running
from rlsrl.local.status_file import read_status
from rlsrl.runtime.errors import did_you_mean

LATE_SECONDS = 5.0
"""A status older than this is told to be so: the coordinator is away or busy."""


class RunStatus:
    """One run folder's, looked at again and again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def find(cls, run: Path) -> Self:
        """The run in that folder, or of that name in runs/.

        Raises:
            UserError: there is none; with the nearest that there is.
        """
        for folder in (run, RUNS / run):
            if (folder / RECORD).is_file():
                return cls(folder)
        problem = f"{run} is no run folder: it has no {RECORD}" if run.exists() else f"there is no run {run}"
        near = did_you_mean(run.name, [path.parent.name for path in RUNS.glob(f"*/{RECORD}")])
        raise UserError(f"{problem}{near}")

    def draw(self, *, whole: bool) -> tuple[str, bool]:
        """The table, and whether nothing of it will change any more: the run has ended.

        Raises:
            UserError: nothing is known of the run, and nothing will be.
        """
        try:
            running = is_running(self._folder)  # first: what is written until the end is then read
            found = read_status(self._folder / STATUS)
        except (OSError, ValueError) as error:
            raise UserError(f"the status of {self._folder} cannot be read: {error}") from error
        if found is None:
            if not running:
                raise UserError(f"{self._folder} does not run, and has no {STATUS} of when it did")
            return f"{self._folder.name}: starting", False
        page, age = found
        table = top_table(page, whole=whole)
        if not running:
            return f"{table}\n\nof {span(age)} ago: the run has ended", True
        late = f"\n\nof {span(age)} ago: the coordinator does not answer" if age > LATE_SECONDS else ""
        return f"{table}{late}", False
