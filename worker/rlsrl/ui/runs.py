"""What the page needs to know of runs, whatever keeps them: a folder or a cluster."""

from __future__ import annotations

from typing import Any, Protocol

Row = dict[str, Any]
"""A JSON object."""


class NotThere(LookupError):
    """There is no such run or log."""


class Runs(Protocol):
    """The runs that the page shows. Answers are JSON values, and may hold NaN and infinity.

    Besides what the methods name, each may raise ``OSError``: what keeps the runs does not answer.
    """

    async def rows(self) -> list[Row]:
        """Return a row for each run: ``name``, ``state``, the numbers of the list and ``changedAt`` in Unix seconds."""

    async def page(self, name: str) -> Row:
        """Return all of one run but its versions, its curve and its logs: its row with further members.

        Raises:
            NotThere: there is no such run.
        """

    async def versions(self, name: str) -> Row:
        """Return ``versions``, the newest first, and the ``problem`` if they cannot be read, else None.

        Raises:
            NotThere: there is no such run.
        """

    async def curve(self, name: str, after: int, file_id: str) -> Row:
        """Return rows of the learning curve, as ``rlsrl.workers.curve_rows.rows_after`` describes.

        Raises:
            NotThere: there is no such run.
        """

    async def log(self, name: str, log: str) -> list[str]:
        """Return the last lines of one of the run's logs.

        Raises:
            NotThere: there is no such run or log.
        """
