"""What ``/status`` says of an experiment: one JSON object, built from what the workers last reported. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlsrl.api.role_names import TRAINER
from rlsrl.data.version import Version
from rlsrl.runtime.coordination import WorkerState
from rlsrl.workers.ledger_copies import LedgerCopies

RunPhase = Literal["starting", "training", "paused", "recovering", "finished"]
"""Where the experiment stands: before its first training step; training; told to pause; without a trainer that it had;
at its end."""

STALE_HEARTBEATS = 3
"""A worker that is silent for longer than this many heartbeats is shown as stale; its lease runs out later."""
TOTALS = ("env_steps", "train_steps", "env_steps_per_second", "return_mean", "policy_lag", "unstored_versions")
"""Statistics of trainer rank 0 that speak for the experiment."""


@dataclass(frozen=True, kw_only=True)
class MemberReport:
    """A worker's last heartbeat."""

    state: WorkerState = WorkerState.CONFIGURING
    waiting_for: str = ""
    stats: Mapping[str, float] = field(default_factory=dict)
    version: Version | None = None
    records_dropped: int = 0
    activity: Mapping[str, float] = field(default_factory=dict)
    """Shares of the last seconds, by what was done or waited for (``rlsrl.runtime.activity``)."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A worker, present or gone."""

    role: str
    index: int
    incarnation: int
    attempt: int
    pid: int
    host: str
    endpoints: Mapping[str, str]
    report: MemberReport
    heard_at: float
    """When it last gave a sign of life, in seconds on the coordinator's clock."""
    present: bool
    """Whether it holds its lease."""


@dataclass(frozen=True, kw_only=True)
class ExperimentInfo:
    """What the coordinator knows apart from its members."""

    name: str
    run_uid: str
    heartbeat_seconds: float
    endpoints: Mapping[str, str]
    """Where the coordinator itself serves what."""
    done: bool
    """Whether trainer rank 0 said that its work is complete."""


def build_status(
    experiment: ExperimentInfo, members: Iterable[Member], copies: LedgerCopies, now: float
) -> dict[str, Any]:
    """The status document.

    ``members`` holds for each (role, index) the one that was there last, present or gone. Gone ones are not listed;
    they count for the phase, and their ``copies`` in the ledger, since what they counted stays true.
    """
    everyone = sorted(members, key=lambda member: (member.role, member.index))
    present = [member for member in everyone if member.present]
    return {
        "experiment": experiment.name,
        "run_uid": experiment.run_uid,
        "phase": derive_phase(everyone, done=experiment.done),
        "totals": _totals(everyone),
        "ledger": copies.books(member.role for member in present),
        "roles": {
            role: [_worker(member, experiment, now) for member in present if member.role == role]
            for role in sorted({member.role for member in everyone})
        },
        "endpoints": dict(experiment.endpoints),
    }


def derive_phase(members: Iterable[Member], *, done: bool) -> RunPhase:
    """The phase, from the trainers' states."""
    if done:
        return "finished"
    trainers = [member for member in members if member.role == TRAINER]
    present = [member for member in trainers if member.present]
    if trainers and not present:
        return "recovering"
    states = {member.report.state for member in present}
    if states == {WorkerState.PAUSED}:
        return "paused"
    has_trained = any(member.report.stats.get("train_steps", 0) > 0 for member in present)
    return "training" if has_trained and WorkerState.CONFIGURING not in states else "starting"


def _totals(members: Iterable[Member]) -> dict[str, float | str | None]:
    report = next((member.report for member in members if (member.role, member.index) == (TRAINER, 0)), MemberReport())
    totals: dict[str, float | str | None] = {name: _finite(report.stats.get(name)) for name in TOTALS}
    return totals | {"version": _text(report.version)}


def _worker(member: Member, experiment: ExperimentInfo, now: float) -> dict[str, Any]:
    age = max(0.0, now - member.heard_at)
    return {
        "index": member.index,
        "incarnation": member.incarnation,
        "attempt": member.attempt,
        "pid": member.pid,
        "host": member.host,
        "state": member.report.state,
        "waiting_for": member.report.waiting_for,
        "activity": {what: round(share, 3) for what, share in sorted(member.report.activity.items())},
        "stats": {name: _finite(value) for name, value in sorted(member.report.stats.items())},
        "version": _text(member.report.version),
        "age_seconds": round(age, 3),
        "stale": age > STALE_HEARTBEATS * experiment.heartbeat_seconds,
        "records_dropped": member.report.records_dropped,
        "endpoints": dict(member.endpoints),
    }


def _text(version: Version | None) -> str | None:
    return None if version is None else str(version)


def _finite(value: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if value is not None and math.isfinite(value) else None
