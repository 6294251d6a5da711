"""What one worker said of itself on the coordinator's status page, in words. Pure.

The page is another process's JSON: whatever it lacks is not known, and nothing in it is trusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlsrl.runtime.activity import stage_of

UNKNOWN = "-"
SHOWN_SHARE = 0.005
"""What takes less of the time than this is not worth a word."""


def mapping(value: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    """A member that is an object; an empty one otherwise."""
    member = (value or {}).get(name)
    return member if isinstance(member, Mapping) else {}


def reports_of(page: Mapping[str, Any] | None, role: str) -> list[Mapping[str, Any]]:
    """What a role's workers said, by their index."""
    workers = mapping(page, "roles").get(role)
    return [each for each in workers if isinstance(each, Mapping)] if isinstance(workers, list) else []


def number(values: Mapping[str, Any], name: str) -> float | None:
    """A member that is a number."""
    value = values.get(name)
    return float(value) if isinstance(value, int | float) else None


def state(report: Mapping[str, Any]) -> str:
    """What it does with its life; ``silent`` if it has not been heard of lately."""
    return "silent" if report.get("stale") else str(report.get("state") or "starting")


def activity(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How workers spent their last seconds: shares, the mean over those who said it."""
    told = [shares for report in reports if (shares := mapping(report, "activity"))]
    names = sorted({name for shares in told for name in shares})
    return {name: sum(number(shares, name) or 0.0 for shares in told) / len(told) for name in names}


def busy(shares: Mapping[str, float]) -> str:
    """The share of the time in which they waited for nothing."""
    return f"{sum(share for name, share in shares.items() if stage_of(name) is not None):.0%}" if shares else UNKNOWN


def works(shares: Mapping[str, float]) -> str:
    """What they worked on, as far as they say it, the most first."""
    return _listed({stage: share for name, share in shares.items() if (stage := stage_of(name))})


def waits(shares: Mapping[str, float]) -> str:
    """What they waited for, the longest wait first."""
    return _listed({name: share for name, share in shares.items() if stage_of(name) is None})


def _listed(shares: Mapping[str, float]) -> str:
    descending = sorted(((share, name) for name, share in shares.items()), reverse=True)
    return ", ".join(f"{name} {share:.0%}" for share, name in descending if share >= SHOWN_SHARE)
