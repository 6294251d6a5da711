"""The table of ``top``, from the coordinator's status document. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlsrl.api.status import return_text
from rlsrl.cli.text import printable
from rlsrl.local.worker_report import (
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
    works,
)
from rlsrl.runs.text_table import columns

MAX_WORKERS_A_ROLE = 8
"""Workers shown of a role. Further workers appear in the role's own line only."""
HEADER = ("ROLE", "INDEX", "HOST", "STATE", "BUSY", "VERSION", "PER SECOND", "SKIPPED", "WAITS FOR", "WORK")

RATE = "samples_per_second"
"""The worker's statistic under PER SECOND."""
SKIPPED = "minibatches_skipped"
"""The trainers' statistic under SKIPPED: minibatches whose loss or gradient was not finite, over the whole run."""
RATE_UNITS = {"policy": "requests"}
"""The unit of a role's rate; by default transitions."""

StatusDocument = Mapping[str, Any]


def top_table(document: StatusDocument, *, whole: bool = False) -> str:
    """Return the experiment in a line, then each role and its workers; ``whole`` shows every worker."""
    rows: list[tuple[str, ...]] = []
    for role in mapping(document, "roles"):
        reports = [*reports_of(document, role), *_gone(document, role)]
        rows.append(_role(role, reports))
        listed = reports if whole or len(reports) <= MAX_WORKERS_A_ROLE else reports[: MAX_WORKERS_A_ROLE - 1]
        rows += [_worker(report) for report in listed]
        if rest := len(reports) - len(listed):
            rows.append(("", "", f"and {rest} more", *[""] * (len(HEADER) - 3)))
    head = "\n".join([_experiment(document), *troubles(document)])
    return printable(f"{head}\n\n{columns([HEADER, *rows])}")


def _gone(document: StatusDocument, role: str) -> list[StatusDocument]:
    """Return the role's workers that have left or lost their lease."""
    return [{**each, "state": "gone"} for each in objects(document, "gone") if each.get("role") == role]


def _experiment(document: StatusDocument) -> str:
    totals = mapping(document, "totals")
    labels: dict[str, tuple[str, str | Callable[[float], str]]] = {
        "env steps": ("env_steps", ",.0f"),
        "train steps": ("train_steps", ",.0f"),
        "env steps/s": ("env_steps_per_second", ",.0f"),
        "return": ("return_mean", return_text),
        "lag": ("policy_lag", "g"),
    }
    replay = {"replayed from": ("replay_transitions", ",.0f"), "updates behind": ("train_steps_behind", ",.0f")}
    labels |= {label: figure for label, figure in replay.items() if number(totals, figure[0]) is not None}
    figures = [f"{label} {shown(totals, name, style)}" for label, (name, style) in labels.items()]
    figures.append(f"version {version(totals)}")
    return f"{document.get('experiment', '')}: {document.get('phase', UNKNOWN)}, {', '.join(figures)}"


def _role(role: str, reports: Sequence[StatusDocument]) -> tuple[str, ...]:
    """Return a role's row: number of workers by state, mean activity, sum of rates."""
    states = [state(report) for report in reports]
    shares = activity(reports)
    rates = [rate for report in reports if (rate := number(mapping(report, "stats"), RATE)) is not None]
    return (
        role,
        "",
        "",
        counted(states) or "none",
        busy(shares),
        "",
        f"{sum(rates):,.0f} {RATE_UNITS.get(role, 'transitions')}" if rates else UNKNOWN,
        "",
        waits(shares),
        works(shares),
    )


def _worker(report: StatusDocument) -> tuple[str, ...]:
    shares = activity([report])
    return (
        "",
        str(report.get("index", UNKNOWN)),
        str(report.get("host") or UNKNOWN),
        state(report),
        busy(shares),
        version(report),
        shown(mapping(report, "stats"), RATE, ",.0f"),
        "" if number(mapping(report, "stats"), SKIPPED) is None else shown(mapping(report, "stats"), SKIPPED, ",.0f"),
        waits(shares),
        works(shares),
    )
