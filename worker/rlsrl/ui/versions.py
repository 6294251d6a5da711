"""Tables of the versions that runs store. The page asks often: a store is read again only where it may have changed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlsrl.api.placement import PARAMETERS
from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.local.worker_report import number
from rlsrl.parameters.evaluations import return_mean_of
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.parameters.protocols import ParameterDB, ParameterError, VersionInfo
from rlsrl.runtime.clock import Clock, SystemClock
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.workers.build.run_database import RESOLVED, open_run_database

KEPT_TABLES = 16
"""Runs whose tables are kept: those that were asked for last."""
STORE_SECONDS = 30.0
"""Time between two reads of an object store: each read is a request over a network."""
SETTLE_SECONDS = 2.0
"""Age from which a folder's time of change differs from that of every later change. File systems round times."""
FOLDERS = ("versions", "states", "tags")
"""Folders of a policy in which every change adds, replaces or removes a file."""

Row = dict[str, Any]
Stamp = tuple[int, int, int] | None
"""Inode, time of the last change in nanoseconds, and size; None without the file."""


class VersionTables:
    """The tables of the runs that the page shows. Any thread may call ``of``."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._tables = lru_cache(maxsize=KEPT_TABLES)(self._open)

    def of(self, run: Path) -> dict[str, Any]:
        """Return the run's versions, the newest first, and the problem if the store cannot be read, else None."""
        try:
            return {"versions": self._tables(run, _stamp(run / RESOLVED)).rows(), "problem": None}
        except (ConfigurationError, ParameterError, OSError) as error:
            return {"versions": [], "problem": f"the versions cannot be read: {error}"}

    def _open(self, run: Path, stamp: Stamp) -> VersionTable:
        """Open the store that the file of that stamp names."""
        del stamp
        db, folder = open_run_database(run), run / PARAMETERS / POLICY_NAME
        is_folder = isinstance(db, FilesystemParameterDB)
        return VersionTable(db, folders=[folder / name for name in FOLDERS] if is_folder else (), clock=self._clock)


class VersionTable:
    """The table of one run. Any thread may call ``rows``."""

    def __init__(self, db: ParameterDB, *, folders: Sequence[Path] = (), clock: Clock) -> None:
        """Show what ``db`` stores in ``folders``: it is read after they change, else every ``STORE_SECONDS``."""
        self._db = db
        self._folders = folders
        self._clock = clock
        self._lock = threading.Lock()
        self._next = clock.monotonic()
        """When an object store is read again."""
        self._stamps: list[Stamp] | None = None
        """Those of the folders at the last read; None if they may have changed since."""
        self._found: list[Row] | ParameterError | OSError = []

    def rows(self) -> list[Row]:
        """Return a row for each version, the newest first.

        Raises:
            ParameterError, OSError: the store could not be read.
        """
        with self._lock:
            stamps = [_stamp(folder) for folder in self._folders]
            is_due = stamps != self._stamps if stamps else self._clock.monotonic() >= self._next
            if is_due:
                self._found = self._read()
                self._stamps = stamps if self._have_settled(stamps) else None
                self._next = self._clock.monotonic() + STORE_SECONDS
            if isinstance(self._found, Exception):
                raise self._found
            return self._found

    def _have_settled(self, stamps: Sequence[Stamp]) -> bool:
        newest = max((stamp[1] for stamp in stamps if stamp is not None), default=0)
        return newest / 1e9 < self._clock.time() - SETTLE_SECONDS

    def _read(self) -> list[Row] | ParameterError | OSError:
        try:
            # The store lists its objects for `policies`, but not for `versions`, which reads one object if it changed.
            return [_row(info) for info in reversed(self._db.versions(POLICY_NAME))]
        except (ParameterError, OSError) as error:
            return error


def _row(info: VersionInfo) -> Row:
    return {
        "version": str(info.version),
        "tags": list(info.tags),
        "createdAt": info.created_at,
        "envSteps": number(info.metadata, "env_steps"),
        "returnMean": number(info.metadata, "return_mean"),
        "evaluation": return_mean_of(info),
        "hasState": info.has_state,
    }


def _stamp(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
