"""What the page shows of the runs in a folder, as JSON values. Reads files alone, also those of runs that train."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.api.role_names import TRAINER
from rlsrl.api.spec import RLExperiment
from rlsrl.local.edits import recorded_experiment
from rlsrl.local.goals import goals, time_left
from rlsrl.local.run_folder import (
    METRICS,
    RECORD,
    RESOLVED_EXPERIMENT,
    STATUS,
    SUMMARY,
    RunFolderError,
    is_running,
    read_record,
)
from rlsrl.local.status_file import read_status
from rlsrl.local.worker_report import activity, mapping, number, objects, reports_of, state, troubles
from rlsrl.parameters.evaluations import return_mean_of
from rlsrl.parameters.protocols import ParameterError, VersionInfo
from rlsrl.runtime.activity import stage_of
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.workers.build.run_database import open_run_database

LOGS = "logs"
"""The folder of the workers' logs in a run folder."""
MAX_ROWS = 5000
"""Rows of a learning curve in one answer."""
MAX_CURVE_BYTES = 8 * 1024 * 1024
"""Bytes of a curve's file that are read for one answer."""
MAX_LOG_BYTES = 256 * 1024
"""Bytes at the end of a log that are read."""
MAX_WORKERS = 2000
"""Workers that are listed of a role."""
SHOWN_LINES = 200
"""Last lines of a log that are shown."""
LATE_SECONDS = 5.0
"""Age from which the status of a live run is late, as in ``rlsrl top``."""


class NotThere(LookupError):
    """The folder has no such run or log."""


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
    """Return all of one run but its curve and its logs."""
    seen, experiment = _Seen.of(run), _experiment(run)
    document, age = seen.status if seen.status is not None else ({}, None)
    is_live, summary = seen.is_live, seen.summary
    problems = [*troubles(document), *_late(age)] if is_live else _failure(summary)
    ledgers = (document, summary) if is_live else (summary, document)
    return {
        **_row_of(run, seen),
        "problems": problems,
        "goals": _goals(experiment, document) if is_live and experiment is not None else [],
        "goalReturn": None if experiment is None else experiment.spec.stop.return_mean,
        "totals": {name: value for name, value in mapping(document, "totals").items() if _is_plain(value)},
        "statusAge": age,
        "roles": {role: _role(document, role, is_live=is_live) for role in mapping(document, "roles")},
        "ledger": _ledger(mapping(ledgers[0], "ledger") or mapping(ledgers[1], "ledger")),
        "versions": _versions(run),
        "logs": sorted(path.name for path in (run / LOGS).glob("*") if path.is_file()),
        "experiment": _text(run / RESOLVED_EXPERIMENT),
    }


def curve(run: Path, after: int) -> dict[str, Any]:
    """Return rows of the learning curve from the byte ``after`` of its file on, and where to go on.

    If the file is shorter, it is another run's by now: the answer begins anew and says so.
    """
    try:
        with (run / METRICS).open("rb") as file:
            size = file.seek(0, 2)
            is_anew = after > size or after < 0
            begin = 0 if is_anew else after
            file.seek(begin)
            data = file.read(MAX_CURVE_BYTES)
    except FileNotFoundError:
        return {"next": 0, "anew": after > 0, "rows": []}
    lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)[:MAX_ROWS]
    rows = [row for line in lines if (row := _curve_row(line)) is not None]
    return {"next": begin + sum(map(len, lines)), "anew": is_anew, "rows": rows}


def log_lines(run: Path, name: str) -> list[str]:
    """Return the last lines of a log.

    Raises:
        NotThere: the run has no such log.
    """
    if name not in {path.name for path in (run / LOGS).glob("*") if path.is_file()}:
        raise NotThere(f"{run.name} has no log {name!r}")
    with (run / LOGS / name).open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - MAX_LOG_BYTES))
        text = file.read().decode(errors="replace")
    return [_log_line(line) for line in text.splitlines()[-SHOWN_LINES:]]


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """The files of a run that say how it is, each read once for an answer."""

    is_live: bool
    """Read first, so that the last status of a run that ends is read."""
    summary: Mapping[str, Any]
    status: tuple[Mapping[str, Any], float] | None
    """The newest status document, and its age in seconds."""

    @classmethod
    def of(cls, run: Path) -> Self:
        return cls(is_live=is_running(run), summary=_summary(run), status=_status(run))


def _row_of(run: Path, seen: _Seen) -> dict[str, Any]:
    totals = mapping(seen.status[0], "totals") if seen.status is not None else {}
    figures = totals if seen.is_live or not seen.summary else seen.summary
    return {
        "name": run.name,
        "state": _state(run, seen),
        "returnMean": number(figures, "return_mean"),
        "envSteps": number(figures, "env_steps"),
        "trainSteps": number(figures, "train_steps"),
        "stepsPerSecond": number(figures, "env_steps_per_second"),
        "changedAt": _changed_at(run),
    }


def _state(run: Path, seen: _Seen) -> str:
    if seen.is_live:
        return str(seen.status[0].get("phase") or "starting") if seen.status is not None else "starting"
    if seen.summary.get("failure"):
        return "failed"
    if seen.summary.get("finished"):
        return "finished"
    try:
        record = read_record(run)
    except RunFolderError:
        return "damaged"
    return "not finished" if record is not None and record.attempt else "not started"


def _ledger(counts: Mapping[str, Any]) -> dict[str, float]:
    """Return the counts by name; those with several causes as their sum."""
    numbers = {name: sum(value.values()) if isinstance(value, dict) else value for name, value in counts.items()}
    return {
        name: value for name, value in numbers.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _late(age: float | None) -> list[str]:
    is_late = age is not None and age > LATE_SECONDS
    return [f"the status is {age:.0f} s old: the coordinator does not answer"] if is_late else []


def _failure(summary: Mapping[str, Any]) -> list[str]:
    failure = summary.get("failure")
    return [f"FAILED: {failure}"] if failure else []


def _goals(experiment: RLExperiment, document: Mapping[str, Any]) -> list[dict[str, Any]]:
    totals = mapping(document, "totals")
    trained = [number(mapping(report, "stats"), "train_seconds") for report in reports_of(document, TRAINER)]
    found = goals(experiment.spec.stop, totals, next((each for each in trained if each is not None), 0.0))
    left = time_left(found)
    listed = [
        {"label": goal.label, "fraction": goal.fraction, "current": goal.current, "target": goal.target}
        for goal in found
    ]
    return [*listed, *([{"label": left}] if left else [])]


def _role(document: Mapping[str, Any], role: str, *, is_live: bool) -> dict[str, Any]:
    """Return the workers of a role, then those that have left; of a run that has ended, all have ended."""
    reports = reports_of(document, role)
    gone = [{**each, "state": "gone"} for each in objects(document, "gone") if each.get("role") == role]
    workers = [_worker(report) for report in (*reports, *gone)][:MAX_WORKERS]
    if not is_live:
        workers = [{**worker, "state": "ended", "busy": None, "waits": {}, "perSecond": None} for worker in workers]
    return {"number": len(reports), "workers": workers}


def _worker(report: Mapping[str, Any]) -> dict[str, Any]:
    shares = activity([report])
    waits = {name: share for name, share in shares.items() if stage_of(name) is None}
    return {
        "index": report.get("index"),
        "state": str(report["state"]) if report.get("state") == "gone" else state(report),
        "busy": sum(share for name, share in shares.items() if name not in waits) if shares else None,
        "waits": waits,
        "waitsFor": str(report.get("waiting_for") or ""),
        "version": str(report.get("version") or ""),
        "perSecond": number(mapping(report, "stats"), "samples_per_second"),
    }


def _versions(run: Path) -> list[dict[str, Any]]:
    try:
        db = open_run_database(run)
        infos = db.versions(POLICY_NAME) if POLICY_NAME in db.policies() else []
    except (ConfigurationError, ParameterError, OSError):
        return []
    return [_version(info) for info in reversed(infos)]


def _version(info: VersionInfo) -> dict[str, Any]:
    return {
        "version": str(info.version),
        "tags": list(info.tags),
        "createdAt": info.created_at,
        "envSteps": number(info.metadata, "env_steps"),
        "returnMean": number(info.metadata, "return_mean"),
        "evaluation": return_mean_of(info),
        "hasState": info.has_state,
    }


def _curve_row(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
        scalars = {name: each for name, each in value["scalars"].items() if isinstance(each, int | float)}
        return {"step": int(value["step"]), "role": str(value["role"]), "scalars": scalars}
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _log_line(line: str) -> str:
    """Return an event in one line; other lines as they are."""
    try:
        event = json.loads(line)
        head = f"{event.pop('timestamp', '')} {event.pop('level', '')} {event.pop('event', '')}"
    except (AttributeError, TypeError, ValueError):
        return line
    return " ".join([head.strip(), *(f"{name}={value}" for name, value in event.items())])


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


def _summary(run: Path) -> Mapping[str, Any]:
    try:
        value = json.loads((run / SUMMARY).read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


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


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | str)
