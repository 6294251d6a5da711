"""What the coordinator shows over HTTP besides its status: learning curve, versions and logs, to those who may look.

Each answer is JSON about files that only the coordinator mounts. Readers have the experiment's token, or the viewing
token, which opens these pages and nothing else.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rlsrl.api.placement import CURVE_PAGE, LOG_PAGE, LOGS_PAGE, VERSIONS_PAGE
from rlsrl.parameters.protocols import ParameterError
from rlsrl.runtime.exposition import GuardedPageHandler, Query
from rlsrl.workers.curve_rows import rows_after
from rlsrl.workers.kept_logs import KeptLogs, LogName
from rlsrl.workers.learning_curve import METRICS_FILE
from rlsrl.workers.version_table import VersionTable

MAX_PAGES = 4
"""Pages that are read at a time. A disk or a store that hangs must not take the threads that answer the kubelet."""
LOG_BYTES = 64 * 1024
"""Bytes at the end of a log that are shown."""


class CoordinatorPages:
    """The pages of one run. Any thread may call their handlers."""

    def __init__(self, folder: Path, *, run_uid: str, logs: KeptLogs, versions: VersionTable) -> None:
        """``folder`` has the learning curve."""
        self._curve_path = folder / METRICS_FILE
        self._run_uid = run_uid
        self._kept_logs = logs
        self._version_table = versions
        self._free = threading.BoundedSemaphore(MAX_PAGES)

    def by_path(self) -> Mapping[str, GuardedPageHandler]:
        """Return each page's handler."""
        pages = {
            CURVE_PAGE: self._curve,
            VERSIONS_PAGE: self._versions,
            LOGS_PAGE: self._logs,
            LOG_PAGE: self._log,
        }
        return {path: partial(self._read, page) for path, page in pages.items()}

    def _read(self, page: GuardedPageHandler, query: Query) -> tuple[str, bytes]:
        if not self._free.acquire(blocking=False):
            raise OSError(f"{MAX_PAGES} others are being read; try again")
        try:
            return page(query)
        finally:
            self._free.release()

    def _curve(self, query: Query) -> tuple[str, bytes]:
        """``after`` and ``file`` are those of ``rows_after``."""
        after = query.get("after", "0")
        if not (after.isascii() and after.isdigit()):
            raise ValueError(f"after: {after!r}; allowed: a number of bytes")
        return _json(rows_after(self._curve_path, int(after), query.get("file", ""), run_uid=self._run_uid))

    def _versions(self, query: Query) -> tuple[str, bytes]:
        del query
        try:
            return _json(self._version_table.rows())
        except ParameterError as error:
            raise OSError(str(error)) from error

    def _logs(self, query: Query) -> tuple[str, bytes]:
        del query
        return _json(sorted(self._logs_by_name()))

    def _log(self, query: Query) -> tuple[str, bytes]:
        """``name`` is one of ``LOGS_PAGE``. It is looked up among those that exist, and is never a path."""
        name = query.get("name", "")
        by_name = self._logs_by_name()
        if name not in by_name:
            raise LookupError(f"name: {name!r}; allowed: {', '.join(sorted(by_name)) or 'none yet'}")
        return _json(self._kept_logs.read(by_name[name])[-LOG_BYTES:].decode(errors="replace"))

    def _logs_by_name(self) -> dict[str, LogName]:
        return {f"{each.role}-{each.index}": each for each in self._kept_logs.names()}


def _json(value: Any) -> tuple[str, bytes]:
    return "application/json", json.dumps(value, separators=(",", ":")).encode()
