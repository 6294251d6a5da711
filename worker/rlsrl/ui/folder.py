"""The runs in a folder. Reads files alone, also those of runs that train."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self, TypeVar

from typing_extensions import override

from rlsrl.api.spec import RLExperiment
from rlsrl.local.edits import recorded_experiment
from rlsrl.local.run_folder import (
    LOCK,
    METRICS,
    RESOLVED_EXPERIMENT,
    STATUS,
    SUMMARY,
    RunFolderError,
    is_running,
    read_record,
)
from rlsrl.local.run_names import RECORD
from rlsrl.local.run_record import RunRecord
from rlsrl.local.status_file import read_status
from rlsrl.local.worker_report import mapping, number, troubles
from rlsrl.ui.runs import NotThere, Row, Runs
from rlsrl.ui.status_document import goals_of, ledger_of, roles_of, shown_lines, totals_of
from rlsrl.ui.versions import VersionTables
from rlsrl.workers.curve_rows import rows_after

T = TypeVar("T")

LOGS = "logs"
"""The folder of the workers' logs in a run folder."""
MAX_LOG_BYTES = 256 * 1024
"""Bytes at the end of a log that are read."""
LATE_SECONDS = 5.0
"""Age from which the status of a live run is late, as in ``rlsrl top``."""
RESUME = "Correct the cause. `rlsrl run` with the same experiment then resumes the run."
"""The cure of a worker's failure that ended a life."""


class FolderRuns(Runs):
    """The runs in one folder, which are known by the names of theirs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._version_tables = VersionTables()

    @override
    async def rows(self) -> list[Row]:
        return await asyncio.to_thread(run_list, self._folder)

    @override
    async def page(self, name: str) -> Row:
        return await self._read(name, run_page)

    @override
    async def versions(self, name: str) -> Row:
        return await self._read(name, self._version_tables.of)

    @override
    async def curve(self, name: str, after: int, file_id: str) -> Row:
        return await self._read(name, lambda run: curve(run, after, file_id))

    @override
    async def log(self, name: str, log: str) -> list[str]:
        return await self._read(name, lambda run: log_lines(run, log))

    async def _read(self, name: str, read: Callable[[Path], T]) -> T:
        """Read a run's files in a thread."""
        return await asyncio.to_thread(lambda: read(find(self._folder, name)))


def run_names(folder: Path) -> list[str]:
    """Return the names of the runs in the folder, the one that changed last first."""
    try:
        found = [path for path in folder.iterdir() if (path / RECORD).exists()]
    except OSError:
        return []
    return [path.name for path in sorted(found, key=_changed_at, reverse=True)]


def run_list(folder: Path) -> list[dict[str, Any]]:
    """Return a row for each run in the folder."""
    rows = []
    for name in run_names(folder):
        try:
            rows.append(_row_of(folder / name, _Seen.of(folder / name)))
        except (OSError, OverflowError, RecursionError, TypeError, ValueError):  # one damaged run hides no other
            rows.append({"name": name, "state": "damaged", "changedAt": 0.0})
    return rows


def find(folder: Path, name: str) -> Path:
    """Return the run of that name.

    Raises:
        NotThere: the folder has none. A name is never a path.
    """
    try:
        if name in os.listdir(folder) and (folder / name / RECORD).exists():
            return folder / name
    except OSError:
        pass  # another user's folder, or one that is being removed
    raise NotThere(f"there is no run {name!r}")


def run_page(run: Path) -> dict[str, Any]:
    """Return all of one run but its versions, its curve and its logs."""
    seen, experiment = _Seen.of(run), _experiment(run)
    document, age = seen.status if seen.status is not None else ({}, None)
    is_live, summary = seen.is_live, seen.summary
    failures = [f"FAILED: {seen.failure}"] if seen.failure else []
    problems = [*troubles(document), *_late(age)] if is_live else failures
    ledgers = (document, summary) if is_live else (summary, document)
    return {
        **_row_of(run, seen),
        "problems": problems,
        "conditions": [],
        "goals": goals_of(experiment.spec.stop, document) if is_live and experiment is not None else [],
        "goalReturn": None if experiment is None else experiment.spec.stop.return_mean,
        "totals": totals_of(document),
        "statusAge": age,
        "roles": roles_of(document, is_live=is_live),
        "ledger": ledger_of(mapping(ledgers[0], "ledger") or mapping(ledgers[1], "ledger")),
        "logs": sorted(path.name for path in (run / LOGS).glob("*") if path.is_file()),
        "experiment": _text(run / RESOLVED_EXPERIMENT),
    }


def curve(run: Path, after: int, file_id: str = "") -> dict[str, Any]:
    """Return what ``rows_after`` returns of the run's learning curve."""
    return rows_after(run / METRICS, after, file_id, run_uid=_run_uid(run))


def log_lines(run: Path, name: str) -> list[str]:
    """Return the last lines of a log.

    Raises:
        NotThere: the run has no such log.
    """
    if name not in {path.name for path in (run / LOGS).glob("*") if path.is_file()}:
        raise NotThere(f"{run.name} has no log {name!r}")
    with (run / LOGS / name).open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - MAX_LOG_BYTES))
        return shown_lines(file.read().decode(errors="replace"))


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """The files of a run that say how it is, each read once for an answer."""

    is_live: bool
    """Read first, so that the last status of a run that ends is read."""
    record: RunRecord | None
    """None if it is damaged."""
    summary: Mapping[str, Any]
    """That of the last life; empty while the run lives, and if its last life was killed."""
    status: tuple[Mapping[str, Any], float] | None
    """The newest status document, and its age in seconds. While the run lives, not that of an earlier life."""

    @classmethod
    def of(cls, run: Path) -> Self:
        is_live, record = is_running(run), _record(run)
        status = None if is_live and _is_older(run / STATUS, run / LOCK) else _status(run)
        summary = {} if is_live else _summary(run, record)
        return cls(is_live=is_live, record=record, summary=summary, status=status)

    @property
    def failure(self) -> str:
        """Why the run failed: training itself, or a worker that ended for good. Empty if it did not, or lives."""
        if failure := self.summary.get("failure"):
            return str(failure)
        if self.is_live or self.summary.get("finished") or self.record is None or not self.record.failure:
            return ""
        return f"{self.record.failure}\n{RESUME}"


def _row_of(run: Path, seen: _Seen) -> dict[str, Any]:
    totals = mapping(seen.status[0], "totals") if seen.status is not None else {}
    figures = totals if seen.is_live or not seen.summary else seen.summary
    return {
        "name": run.name,
        "state": _state(seen),
        "returnMean": number(figures, "return_mean"),
        "envSteps": number(figures, "env_steps"),
        "trainSteps": number(figures, "train_steps"),
        "stepsPerSecond": number(figures, "env_steps_per_second"),
        "changedAt": _changed_at(run),
    }


def _state(seen: _Seen) -> str:
    if seen.is_live:
        return str(seen.status[0].get("phase") or "starting") if seen.status is not None else "starting"
    if seen.failure:
        return "failed"
    if seen.summary.get("finished"):
        return "finished"
    if seen.record is None:
        return "damaged"
    return "not finished" if seen.record.attempt else "not started"


def _late(age: float | None) -> list[str]:
    is_late = age is not None and age > LATE_SECONDS
    return [f"the status is {age:.0f} s old: the coordinator does not answer"] if is_late else []


def _experiment(run: Path) -> RLExperiment | None:
    try:
        found = (run / RESOLVED_EXPERIMENT).stat()
    except OSError:
        return None
    return _experiment_of(run, found.st_mtime_ns, found.st_ino)


@lru_cache(maxsize=64)
def _experiment_of(run: Path, changed_ns: int, inode: int) -> RLExperiment | None:
    """Return the experiment in a file that is as old as said: the page asks each second, and reading it takes long."""
    del changed_ns, inode
    try:
        return recorded_experiment(run)
    except (RunFolderError, OSError, ValueError):
        return None


def _status(run: Path) -> tuple[Mapping[str, Any], float] | None:
    try:
        return read_status(run / STATUS)
    except (OSError, ValueError):
        return None


def _record(run: Path) -> RunRecord | None:
    try:
        return read_record(run)
    except (OSError, RunFolderError):
        return None


def _run_uid(run: Path) -> str:
    record = _record(run)
    return "" if record is None else record.run_uid


def _summary(run: Path, record: RunRecord | None) -> Mapping[str, Any]:
    """Return the summary of the last life; empty without one. That of an earlier life says nothing about the run."""
    try:
        value = json.loads((run / SUMMARY).read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(value, dict):
        return {}
    is_earlier = record is not None and value.get("lives", len(record.lives)) != len(record.lives)
    return {} if is_earlier else value


def _is_older(path: Path, other: Path) -> bool:
    """Return whether both files exist, and the first was written before the other."""
    try:
        return path.stat().st_mtime_ns < other.stat().st_mtime_ns
    except OSError:
        return False


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _changed_at(run: Path) -> float:
    """Return when the run's status, curve or record was written last, in Unix seconds."""
    times = []
    for name in (STATUS, METRICS, SUMMARY, RECORD):
        try:
            times.append((run / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)
