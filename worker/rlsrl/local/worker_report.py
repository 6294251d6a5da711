"""One worker's report in the coordinator's status document, as text. Pure.

The document is another process's JSON: any field may be missing or have another type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlsrl.runtime.activity import stage_of

UNKNOWN = "-"
SILENT = "silent"
"""The state of a living process whose heartbeats have stopped."""
SHOWN_SHARE = 0.005
"""Smaller shares of the time are not shown."""
_ENVIRONMENT_FAULTS = {
    "environment_errors": "ENVIRONMENT ERRORS: {:,.0f}",
    "non_finite_steps": "NAN OR INFINITY: {:,.0f} steps or resets",
    "unreachable_environments": "ENVIRONMENT SERVER AWAY: {:,.0f} episodes cut",
}
"""Texts with the number of the faults of environments that the document counts, by their names there."""


def mapping(value: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    """Return a member that is an object, or an empty one."""
    member = (value or {}).get(name)
    return member if isinstance(member, Mapping) else {}


def reports_of(document: Mapping[str, Any] | None, role: str) -> list[Mapping[str, Any]]:
    """Return the reports of a role's workers, in the document's order."""
    return objects(mapping(document, "roles"), role)


def objects(value: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """Return the JSON objects in the list of that name; none if the value has no such list."""
    member = (value or {}).get(name)
    return [each for each in member if isinstance(each, Mapping)] if isinstance(member, list) else []


def number(values: Mapping[str, Any], name: str) -> float | None:
    """Return a member that is a number, or None."""
    value = values.get(name)
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:  # an integer of any length
        return None


def shown(values: Mapping[str, Any], name: str, style: str | Callable[[float], str]) -> str:
    """Return a member that is a number as text in that format; ``-`` for anything else."""
    value = number(values, name)
    if value is None:
        return UNKNOWN
    return format(value, style) if isinstance(style, str) else style(value)


def version(values: Mapping[str, Any]) -> str:
    """Return the version of the weights; ``-`` before the first."""
    return str(values.get("version") or UNKNOWN)


def troubles(document: Mapping[str, Any] | None) -> list[str]:
    """Return a text about each failure that ends no run: the urgent ones, then past ones."""
    return [*store_failures(document), *hold_ups(document), *past_failures(document)]


def store_failures(document: Mapping[str, Any] | None) -> list[str]:
    """Return a text about versions that could not be stored, or are stored late, and one about failed evaluations."""
    totals, texts = mapping(document, "totals"), []
    if num_versions := number(totals, "unstored_versions") or 0.0:
        reason = totals.get("unstored_reason") or "logs: checkpoint_failed"
        texts.append(f"NOT STORED: the newest {num_versions:.0f} versions ({reason})")
    elif late := totals.get("late_version"):
        texts.append(f"STORED LATE: {late}")
    if num_evaluations := _num_failures(document, "failed_evaluations"):
        last = mapping(document, "failed_evaluations").get("last")
        texts.append(f"EVALUATIONS FAILED: the newest {num_evaluations:,.0f}, the last of {last}")
    return texts


def past_failures(document: Mapping[str, Any] | None) -> list[str]:
    """Return a text for each kind of failure after which training went on: errors of environments, values that are not
    finite, and a resumption from an older version than the newest.
    """
    texts = [
        f"{text.format(count)}, the last of {mapping(document, name).get('last')} (logs: environment_fault)"
        for name, text in _ENVIRONMENT_FAULTS.items()
        if (count := _num_failures(document, name))
    ]
    rollback = mapping(document, "totals").get("rollback")
    return [*texts, *([f"ROLLED BACK: {rollback}"] if rollback else [])]


def _num_failures(document: Mapping[str, Any] | None, name: str) -> float:
    return number(mapping(document, name), "number") or 0.0


def hold_ups(document: Mapping[str, Any] | None) -> list[str]:
    """Return a text about paused workers, if there are any. Then one about the environments' server, if it is away, and
    one about the stall, if the run stands still; if neither, one about the longest environment call, if there is one.
    """
    paused = mapping(document, "paused").get("text")
    texts = [paused[0].upper() + paused[1:]] if isinstance(paused, str) and paused else []
    waits = mapping(document, "server_waits").get("text")
    if waits:
        return [*texts, f"ENVIRONMENT SERVER AWAY: {waits}", *_stall(document)]
    return [*texts, *(_stall(document) or _longest_call(document))]


def _stall(document: Mapping[str, Any] | None) -> list[str]:
    stall = mapping(document, "stall")
    if (seconds := number(stall, "seconds")) is not None:
        reasons = stall.get("reasons")
        texts = [str(each) for each in reasons] if isinstance(reasons, list) else []
        return [": ".join([f"NO STEP for {seconds:.0f} s", "; ".join(texts) or "no worker reports why"])]
    return []


def _longest_call(document: Mapping[str, Any] | None) -> list[str]:
    texts = [str(call["text"]) for call in objects(document, "environment_calls") if "text" in call]
    more = f" and {len(texts) - 1} more" if len(texts) > 1 else ""
    return [texts[0] + more] if texts else []


def counted(states: Sequence[str]) -> str:
    """Return each state with the number of its workers."""
    return ", ".join(f"{states.count(each)} {each}" for each in dict.fromkeys(states))


def state(report: Mapping[str, Any]) -> str:
    """Return the worker's state; ``SILENT`` if its heartbeats have stopped."""
    return SILENT if report.get("stale") else str(report.get("state") or "starting")


def activity(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return each activity's share of the last seconds, the mean over the workers that report one."""
    reported = [shares for report in reports if (shares := mapping(report, "activity"))]
    names = sorted({name for shares in reported for name in shares})
    return {name: sum(number(shares, name) or 0.0 for shares in reported) / len(reported) for name in names}


def busy(shares: Mapping[str, float]) -> str:
    """Return the share of the time without waiting."""
    return f"{sum(share for name, share in shares.items() if stage_of(name) is not None):.0%}" if shares else UNKNOWN


def works(shares: Mapping[str, float]) -> str:
    """Return the stages of the work with their shares, the largest first."""
    return _listed({stage: share for name, share in shares.items() if (stage := stage_of(name))})


def waits(shares: Mapping[str, float]) -> str:
    """Return the reasons for waiting with their shares, the largest first."""
    return _listed({name: share for name, share in shares.items() if stage_of(name) is None})


def _listed(shares: Mapping[str, float]) -> str:
    descending = sorted(((share, name) for name, share in shares.items()), reverse=True)
    return ", ".join(f"{name} {share:.0%}" for share, name in descending if share >= SHOWN_SHARE)
