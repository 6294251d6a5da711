"""The tables of versions of the runs in a folder."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from rlsrl.api.placement import PARAMETERS
from rlsrl.parameters.protocols import ParameterError
from rlsrl.runtime.clock import Clock, SystemClock
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.workers.build.run_database import RESOLVED, open_run_database
from rlsrl.workers.version_table import Stamp, VersionTable, stamp_of

KEPT_TABLES = 16
"""Runs whose tables are kept: those that were asked for last."""


class VersionTables:
    """The tables of the runs that the page shows. Any thread may call ``of``."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._tables = lru_cache(maxsize=KEPT_TABLES)(self._open)

    def of(self, run: Path) -> dict[str, Any]:
        """Return the run's versions, the newest first, and the problem if the store cannot be read, else None."""
        try:
            return {"versions": self._tables(run, stamp_of(run / RESOLVED)).rows(), "problem": None}
        except (ConfigurationError, ParameterError, OSError) as error:
            return {"versions": [], "problem": f"the versions cannot be read: {error}"}

    def _open(self, run: Path, stamp: Stamp) -> VersionTable:
        """Open the store that the file of that stamp names."""
        del stamp
        return VersionTable(open_run_database(run), folder=run / PARAMETERS, clock=self._clock)
