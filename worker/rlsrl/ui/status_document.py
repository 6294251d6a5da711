"""What the page shows of a coordinator's status document, of the ledger in it, and of logs. Pure.

They are other processes' data: any field may be missing or have another type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlsrl.api.role_names import TRAINER
from rlsrl.api.spec import Stop
from rlsrl.local.goals import goals, time_left
from rlsrl.local.worker_report import SILENT, activity, mapping, number, objects, reports_of, state
from rlsrl.runtime.activity import stage_of
from rlsrl.ui.runs import Row

MAX_REPORTS = 10_000
"""Workers of a role that are read: more than a run can have."""
MAX_WORKERS = 2000
"""Workers that are listed of a role; of more, those that do not run come first."""
MARKS = ("bad", "alive", "ended")
"""How the page marks a worker, in the order of a list that is cut: it is silent or gone, it runs, it has ended with its
run."""
GONE = "gone"
"""The state of a worker that has left."""
ENDED = "ended"
"""The state of a worker that has ended with its run."""
SHOWN_LINES = 200
"""Last lines of a log that are shown."""


def totals_of(document: Mapping[str, Any]) -> Row:
    """Return the totals that are numbers or texts."""
    return {name: value for name, value in mapping(document, "totals").items() if isinstance(value, int | float | str)}


def goals_of(stop: Stop, document: Mapping[str, Any]) -> list[Row]:
    """Return the stop conditions with their progress, then the time that is left if it can be told."""
    totals = mapping(document, "totals")
    trained = [number(mapping(report, "stats"), "train_seconds") for report in reports_of(document, TRAINER)]
    found = goals(stop, totals, next((each for each in trained if each is not None), 0.0))
    left = time_left(found)
    listed = [
        {"label": goal.label, "fraction": goal.fraction, "current": goal.current, "target": goal.target}
        for goal in found
    ]
    return [*listed, *([{"label": left}] if left else [])]


def ledger_of(counts: Mapping[str, Any]) -> dict[str, float]:
    """Return the counts by name; those with several causes as their sum."""
    causes = {name: value if isinstance(value, Mapping) else {"": value} for name, value in counts.items()}
    numbers = {name: [each for each in by_cause.values() if _is_number(each)] for name, by_cause in causes.items()}
    return {name: sum(found) for name, found in numbers.items() if found}


def roles_of(document: Mapping[str, Any], *, is_live: bool) -> Row:
    """Return each role's workers. Of a run that has ended, all have ended."""
    return {role: _role(document, role, is_live=is_live) for role in mapping(document, "roles")}


def shown_lines(text: str) -> list[str]:
    """Return the last lines of a log. Each event is one line."""
    return [_log_line(line) for line in text.splitlines()[-SHOWN_LINES:]]


def _role(document: Mapping[str, Any], role: str, *, is_live: bool) -> dict[str, Any]:
    """Return the workers of a role, then those that have left; of a run that has ended, all have ended."""
    reports = reports_of(document, role)[:MAX_REPORTS]
    gone = [each for each in objects(document, "gone")[:MAX_REPORTS] if each.get("role") == role]
    # Workers leave at the end of training. Evaluators may still play the last version then.
    left = ENDED if document.get("phase") == "finished" else GONE
    found = [*((each, state(each)) for each in reports), *((each, left) for each in gone)]
    workers = [_worker(report, worker_state if is_live else ENDED) for report, worker_state in found]
    num_present = sum(worker["state"] != GONE for worker in workers)
    rates = [worker["perSecond"] for worker in workers if worker["perSecond"] is not None]
    if len(workers) > MAX_WORKERS:
        workers = sorted(workers, key=lambda worker: MARKS.index(worker["mark"]))[:MAX_WORKERS]
    return {"number": num_present, "perSecond": sum(rates) if rates else None, "workers": workers}


def _worker(report: Mapping[str, Any], worker_state: str) -> dict[str, Any]:
    has_ended = worker_state == ENDED
    shares = {} if has_ended else activity([report])
    works = {stage: share for name, share in shares.items() if (stage := stage_of(name))}
    waits = {name: share for name, share in shares.items() if stage_of(name) is None}
    return {
        "index": index if isinstance(index := report.get("index"), int) else None,
        "state": worker_state,
        "mark": "ended" if has_ended else "bad" if worker_state in (SILENT, GONE) else "alive",
        "busy": sum(works.values()) if shares else None,
        "works": works,
        "waits": waits,
        "waitsFor": "" if has_ended else str(report.get("waiting_for") or ""),
        "version": str(report.get("version") or ""),
        "perSecond": None if has_ended else number(mapping(report, "stats"), "samples_per_second"),
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _log_line(line: str) -> str:
    """Return an event in one line; other lines as they are."""
    try:
        event = json.loads(line)
        head = f"{event.pop('timestamp', '')} {event.pop('level', '')} {event.pop('event', '')}"
        return " ".join([head.strip(), *(f"{name}={value}" for name, value in event.items())])
    except (AttributeError, RecursionError, TypeError, ValueError):
        return line
