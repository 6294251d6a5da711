"""The live view of a run, as text: from the coordinator's status, the processes and the goals to lines. Pure.

The status is another process's JSON: any field may be missing or have another type. Missing values show as ``-``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlsrl.api.role_names import COORDINATOR, EVALUATOR, TRAINER
from rlsrl.api.spec import Stop
from rlsrl.api.status import return_text
from rlsrl.local.controller import ProcessState
from rlsrl.local.goals import RETURN_LABEL, SECONDS_LABEL, Goal, goals, time_left
from rlsrl.local.worker_report import (
    SILENT,
    UNKNOWN,
    activity,
    busy,
    counted,
    mapping,
    number,
    objects,
    reports_of,
    shown,
    state,
    troubles,
    version,
    waits,
)

STALE_SECONDS = 5.0
"""Age from which a status is marked as old: the coordinator is away or busy."""

MAX_ROWS_A_ROLE = 8
"""Rows of a role. Further processes share one row that counts them."""

SHOWN_STATS = 3
"""Number of a worker's statistics in its row."""


@dataclass(frozen=True, kw_only=True)
class RunView:
    """The state of a run at one moment."""

    name: str
    stop: Stop
    elapsed_seconds: float
    """Seconds since the controller started."""
    processes: Sequence[ProcessState]
    status: Mapping[str, Any] | None
    """The coordinator's newest status; None before the first."""
    status_age_seconds: float
    """Seconds since that status arrived."""

    @property
    def goals(self) -> list[Goal]:
        """The stop conditions that are set, with their progress."""
        return goals(self.stop, mapping(self.status, "totals"), self.elapsed_seconds)


@dataclass(frozen=True, kw_only=True)
class ProcessRow:
    """The row of one process, or of several that are counted."""

    name: str
    state: str
    busy: str = UNKNOWN
    """The share of the last seconds without waiting."""
    waits: str = ""
    """The reasons for waiting, with their shares."""
    version: str = ""
    stats: str = ""


def rows(view: RunView) -> list[ProcessRow]:
    """Return a row for each process, in the order of starting; of large roles the first few and a count of the rest."""
    reports = _reports(view)
    found: list[ProcessRow] = []
    for role in dict.fromkeys(process.role for process in view.processes):
        of_role = [process for process in view.processes if process.role == role]
        listed = of_role if len(of_role) <= MAX_ROWS_A_ROLE else of_role[: MAX_ROWS_A_ROLE - 1]
        found += [_row(process, view, reports) for process in listed]
        if rest := of_role[len(listed) :]:
            states = [_state(process, view, reports) for process in rest]
            found.append(ProcessRow(name=f"{len(rest)} more {role}s", state=counted(states)))
    return found


def line(view: RunView) -> str:
    """Return the view as one plain line."""
    parts = [f"{view.elapsed_seconds:7.1f} s", *(_figures(view) if _has_totals(view) else ["starting"])]
    not_running = [f"{row.name} {row.state}" for row in rows(view) if row.state not in ("running", "ending", "ended")]
    if not_running and view.status is not None:
        parts.append(", ".join(not_running))
    parts += troubles(view.status)
    if view.status_age_seconds > STALE_SECONDS:
        parts.append(f"status is {view.status_age_seconds:.0f} s old")
    return " | ".join(parts)


def _has_totals(view: RunView) -> bool:
    """Return whether the status has numbers of the trainer. Before its first report there are only actors' errors."""
    totals = mapping(view.status, "totals")
    return any(isinstance(totals.get(name), int | float) for name in ("env_steps", "train_steps"))


def _figures(view: RunView) -> list[str]:
    totals = mapping(view.status, "totals")
    found = view.goals
    texts = {goal.label: _goal_text(goal) for goal in found}
    texts.pop(SECONDS_LABEL, None)  # the line begins with the elapsed seconds
    return_mean = texts.pop(RETURN_LABEL, f"return {shown(totals, 'return_mean', return_text)}")
    env_steps = texts.pop("env steps", f"env steps {shown(totals, 'env_steps', ',.0f')}")
    return [
        return_mean,
        env_steps,
        *texts.values(),
        f"{shown(totals, 'env_steps_per_second', ',.0f')} steps/s",
        f"lag {shown(totals, 'policy_lag', 'g')}",
        f"version {version(totals)}",
        *_evaluation(view),
        *_time_left(found),
    ]


def render(view: RunView) -> RenderableType:
    """Return the view for a terminal."""
    totals = mapping(view.status, "totals")
    found = view.goals
    times = [f"{view.elapsed_seconds:.1f} s", *_time_left(found)]
    head = Text.assemble((view.name, "bold"), f"  {_phase(view)}  {', '.join(times)}")
    progress = Table.grid(padding=(0, 2))
    for goal in found:
        bar = ProgressBar(total=1.0, completed=goal.fraction, width=30)
        progress.add_row(goal.label, bar, _goal_text(goal).removeprefix(goal.label).strip())
    numbers = Text(
        f"{shown(totals, 'env_steps', ',.0f')} env steps   {shown(totals, 'env_steps_per_second', ',.0f')} steps/s   "
        f"return {shown(totals, 'return_mean', return_text)}   lag {shown(totals, 'policy_lag', 'g')}   "
        f"version {version(totals)}" + "".join(f"   {text}" for text in _evaluation(view))
    )
    bold = [Text(text, "bold") for text in troubles(view.status)]
    table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="dim", expand=True)
    for title in ("process", "state", "busy", "waits for", "version"):
        table.add_column(title, overflow="ellipsis", no_wrap=True, max_width=32)
    table.add_column("statistics", overflow="ellipsis", no_wrap=True, ratio=1)  # gets the remaining width
    for row in rows(view):
        table.add_row(*map(Text, (row.name, row.state, row.busy, row.waits, row.version, row.stats)))
    return Group(head, progress, numbers, *bold, table)


def _time_left(found: Sequence[Goal]) -> list[str]:
    """Return one text, or nothing if the time that is left is unknown."""
    return [left] if (left := time_left(found)) else []


def _evaluation(view: RunView) -> list[str]:
    """Return the newest evaluation, and the results of fixed versions; nothing before the first."""
    stats = [mapping(report, "stats") for report in reports_of(view.status, EVALUATOR)]
    fixed = [
        f"fixed version {attempt:.0f}.{step:.0f}: {return_text(mean)}"
        for each in stats
        if (attempt := number(each, "version_attempt")) is not None
        and (step := number(each, "version_step")) is not None
        and (mean := number(each, "fixed_return_mean")) is not None
    ]
    found = [
        (step, mean)
        for each in stats
        if (step := number(each, "step")) is not None and (mean := number(each, "return_mean")) is not None
    ]
    newest = [f"evaluated {return_text(max(found)[1])} at step {max(found)[0]:.0f}"] if found else []
    return [*newest, *fixed]


def _phase(view: RunView) -> str:
    if view.status is None:
        return "starting"
    if view.status_age_seconds > STALE_SECONDS:
        return f"status is {view.status_age_seconds:.0f} s old"
    phase = str(view.status.get("phase", "running"))
    trainers = [process.state for process in view.processes if process.role == TRAINER]
    # The coordinator knows only that no trainer holds a lease, and not that none is to come.
    is_ending = bool(trainers) and {"ending", "ended"}.issuperset(trainers)
    return "ending" if phase == "recovering" and is_ending else phase


def _row(process: ProcessState, view: RunView, reports: Mapping[int, Mapping[str, Any]]) -> ProcessRow:
    report = reports.get(process.pid, {}) if process.pid is not None else {}
    stats = {name: value for name, value in mapping(report, "stats").items() if isinstance(value, int | float)}
    figures = [
        f"{name} {format(value, ',.0f' if abs(value) >= 1000 else '.4g')}"
        for name, value in sorted(stats.items())[:SHOWN_STATS]
    ]
    shares = activity([report])
    return ProcessRow(
        name=f"{process.role}-{process.number}",
        state=_state(process, view, reports) + _since(report, view),
        busy=busy(shares),
        waits=waits(shares),
        version=str(report.get("version") or ""),
        stats="  ".join(figures),
    )


def _state(process: ProcessState, view: RunView, reports: Mapping[int, Mapping[str, Any]]) -> str:
    if process.state != "running":
        return process.state
    report = reports.get(process.pid) if process.pid is not None else None
    if report is None:
        return "starting" if _phase(view) != "finished" else "ending"
    return state(report)


def _since(report: Mapping[str, Any], view: RunView) -> str:
    """Return how long a silent worker has been silent, else nothing."""
    age = number(report, "age_seconds")
    return f" for {age + view.status_age_seconds:.0f} s" if report.get("stale") and age is not None else ""


def _reports(view: RunView) -> dict[int, Mapping[str, Any]]:
    """Return each worker process's report by pid. The coordinator has none: it runs if it answers."""
    fresh = view.status is not None and view.status_age_seconds <= STALE_SECONDS
    reports: dict[int, Mapping[str, Any]] = {
        process.pid: {"state": "running" if fresh else SILENT}
        for process in view.processes
        if process.role == COORDINATOR and process.pid is not None and view.status is not None
    }
    for role in mapping(view.status, "roles"):
        for report in reports_of(view.status, role):
            if isinstance(pid := report.get("pid"), int):
                reports[pid] = report
    gone = [{**report, "stale": True} for report in objects(view.status, "gone")]
    reports |= {pid: report for report in gone if isinstance(pid := report.get("pid"), int)}
    for process in view.processes:
        of_role = [*reports_of(view.status, process.role), *(each for each in gone if each.get("role") == process.role)]
        if process.is_gang and process.pid is not None and of_role:
            reports[process.pid] = of_role[0]  # rank 0 stands for the gang
    return reports


def _goal_text(goal: Goal) -> str:
    style = return_text if goal.label == RETURN_LABEL else "{:,.0f}".format
    current = UNKNOWN if goal.current is None else style(goal.current)
    target = format(goal.target, ",.0f" if goal.target.is_integer() else ",g")
    return f"{goal.label} {current} of {target}"
