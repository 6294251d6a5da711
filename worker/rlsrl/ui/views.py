"""What the page shows of the runs in a folder, as JSON values. Reads files alone, also those of runs that train."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from rlsrl.api.role_names import TRAINER
from rlsrl.api.spec import RLExperiment
from rlsrl.local.edits import recorded_experiment
from rlsrl.local.goals import goals, time_left
from rlsrl.local.run_folder import (
    LOCK,
    METRICS,
    RECORD,
    RESOLVED_EXPERIMENT,
    STATUS,
    SUMMARY,
    RunFolderError,
    is_running,
    read_record,
)
from rlsrl.local.run_record import RunRecord
from rlsrl.local.status_file import read_status
from rlsrl.local.worker_report import activity, mapping, number, objects, reports_of, state, troubles
from rlsrl.runtime.activity import stage_of
from rlsrl.runtime.coordination import WorkerState

LOGS = "logs"
"""The folder of the workers' logs in a run folder."""
MAX_ROWS = 5000
"""Rows of a learning curve in one answer."""
MAX_CURVE_BYTES = 8 * 1024 * 1024
"""Bytes of a curve's file that are read for one answer."""
MAX_LOG_BYTES = 256 * 1024
"""Bytes at the end of a log that are read."""
MAX_WORKERS = 2000
"""Workers that are listed of a role; of more, those that do not run come first."""
RUNNING_STATES = frozenset({*WorkerState, "starting"})
"""States of workers that run; silent workers and those that are gone do not."""
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
    """Return all of one run but its versions, its curve and its logs."""
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
        "logs": sorted(path.name for path in (run / LOGS).glob("*") if path.is_file()),
        "experiment": _text(run / RESOLVED_EXPERIMENT),
    }


def curve(run: Path, after: int, file_id: str = "") -> dict[str, Any]:
    """Return rows of the learning curve from the byte ``after`` of its file on, and where to go on.

    ``file_id`` is that of the answer before; empty in the first question. If the file is shorter or another one, the
    folder has another run by now: the answer begins anew and says so.
    """
    try:
        with (run / METRICS).open("rb") as file:
            found_id = f"{_run_uid(run)}-{os.fstat(file.fileno()).st_ino}"
            size = file.seek(0, 2)
            is_anew = not 0 <= after <= size or file_id not in ("", found_id)
            begin = 0 if is_anew else after
            file.seek(begin)
            data = file.read(MAX_CURVE_BYTES)
    except FileNotFoundError:
        return {"next": 0, "file": "", "anew": after > 0, "rows": []}
    lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)[:MAX_ROWS]
    rows = [row for line in lines if (row := _curve_row(line)) is not None]
    return {"next": begin + sum(map(len, lines)), "file": found_id, "anew": is_anew, "rows": rows}


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
    if seen.summary.get("failure"):
        return "failed"
    if seen.summary.get("finished"):
        return "finished"
    if seen.record is None:
        return "damaged"
    return "not finished" if seen.record.attempt else "not started"


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
    workers = [_worker(report) for report in (*reports, *gone)]
    if not is_live:
        ended = {"state": "ended", "runs": True, "busy": None, "waits": {}, "perSecond": None}
        workers = [{**worker, **ended} for worker in workers]
    rates = [worker["perSecond"] for worker in workers if worker["perSecond"] is not None]
    if len(workers) > MAX_WORKERS:
        workers = sorted(workers, key=lambda worker: worker["runs"])[:MAX_WORKERS]
    return {"number": len(reports), "perSecond": sum(rates) if rates else None, "workers": workers}


def _worker(report: Mapping[str, Any]) -> dict[str, Any]:
    shares = activity([report])
    waits = {name: share for name, share in shares.items() if stage_of(name) is None}
    worker_state = "gone" if report.get("state") == "gone" else state(report)
    return {
        "index": report.get("index"),
        "state": worker_state,
        "runs": worker_state in RUNNING_STATES,
        "busy": sum(share for name, share in shares.items() if name not in waits) if shares else None,
        "waits": waits,
        "waitsFor": str(report.get("waiting_for") or ""),
        "version": str(report.get("version") or ""),
        "perSecond": number(mapping(report, "stats"), "samples_per_second"),
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


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | str)
