"""Tables of the versions that runs store, for those who look. They ask often: a store is read again only where it may
have changed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.parameters.evaluations import return_mean_of
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.parameters.protocols import ParameterDB, ParameterError, VersionInfo
from rlsrl.runtime.clock import Clock

STORE_SECONDS = 30.0
"""Time between two reads of an object store: each read is a request over a network."""
SETTLE_SECONDS = 2.0
"""Age from which a folder's time of change differs from that of every later change. File systems round times."""
FOLDERS = ("versions", "states", "tags")
"""Folders of a policy in which every change adds, replaces or removes a file."""

Row = dict[str, Any]
Stamp = tuple[int, int, int] | None
"""Inode, time of the last change in nanoseconds, and size; None without the file."""


class VersionTable:
    """The table of one run. Any thread may call ``rows``."""

    def __init__(self, db: ParameterDB, *, folder: Path, clock: Clock) -> None:
        """Show the versions in ``db``.

        If it is a ``FilesystemParameterDB``, they are in ``folder``, which is looked at for changes. Another store is
        read every ``STORE_SECONDS``.
        """
        self._db = db
        is_folder = isinstance(db, FilesystemParameterDB)
        self._folders = [folder / POLICY_NAME / name for name in FOLDERS] if is_folder else []
        self._clock = clock
        self._lock = threading.Lock()
        self._next = clock.monotonic()
        """When an object store is read again."""
        self._stamps: list[Stamp] | None = None
        """Those of the folders at the last read; None if they may have changed since."""
        self._found: list[Row] | ParameterError | OSError | None = None
        """What the last read found; None before the first."""

    def rows(self) -> list[Row]:
        """Return a row for each version, the newest first.

        Raises:
            ParameterError, OSError: the store could not be read.
        """
        # While another thread reads, the last table is shown: a store may take long.
        if not self._lock.acquire(blocking=self._found is None):
            return self._shown()
        try:
            stamps = [stamp_of(folder) for folder in self._folders]
            is_due = stamps != self._stamps if stamps else self._clock.monotonic() >= self._next
            if is_due:
                self._found = self._read()
                self._stamps = stamps if self._have_settled(stamps) else None
                self._next = self._clock.monotonic() + STORE_SECONDS
            return self._shown()
        finally:
            self._lock.release()

    def _shown(self) -> list[Row]:
        found = self._found
        if isinstance(found, Exception):
            raise found
        return found or []

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
        "envSteps": _number(info, "env_steps"),
        "returnMean": _number(info, "return_mean"),
        "evaluation": return_mean_of(info),
        "hasState": info.has_state,
    }


def _number(info: VersionInfo, name: str) -> float | None:
    value = info.metadata.get(name)
    return float(value) if isinstance(value, int | float) else None


def stamp_of(path: Path) -> Stamp:
    """Return the file's stamp, which differs after a change."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
