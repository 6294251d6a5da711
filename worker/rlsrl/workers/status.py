"""Builds the status document of an experiment, one JSON object, from the newest reports of its workers. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

from rlsrl.api.role_names import ACTOR, EVALUATOR, TRAINER
from rlsrl.data.episodes import info_statistics
from rlsrl.data.version import Version
from rlsrl.parameters.resumption import resumption_text
from rlsrl.runtime.activity import CREDIT, END_OF_TRAINING, stage_of
from rlsrl.runtime.coordination import WorkerState
from rlsrl.workers.ledger_copies import LedgerCopies
from rlsrl.workers.long_calls import WorkerCall

RunPhase = Literal["starting", "training", "paused", "recovering", "finished"]
"""starting: before the first training step; paused: all workers of a role without which no step is taken are paused;
recovering: no trainer holds its lease; finished: the work is complete."""

STALE_HEARTBEATS = 3
"""A worker counts as stale after this many heartbeat intervals of silence. Its lease expires later."""
TOTALS = (
    *("env_steps", "train_steps", "return_mean", "length_mean", "policy_lag", "unstored_versions"),
    *("replay_transitions", "train_steps_behind"),
)
"""Statistics of trainer rank 0 that the document shows for the whole experiment, beside those of ``info``."""
ERRORS = "environment_errors"
"""Errors of the environments of an actor since it started."""
NON_FINITE = "non_finite_steps"
"""Steps and resets of the environments of an actor, since it started, that gave NaN or infinity."""
UNREACHABLE = "unreachable_environments"
"""Episodes of the environments of an actor, since it started, that were cut because a server did not answer."""
SERVER_WAITS = "server_waits"
"""Environments of a worker that wait for their server now, with a text of that name that says why."""
SERVER_AWAY_SINCE = "server_away_since"
"""When the first of them began to wait, in Unix seconds."""
FAILED_EVALUATIONS = "failed_evaluations"
"""The newest consecutive evaluations of an evaluator that the store failed to read or to write."""
FAILURES = {ERRORS: ACTOR, NON_FINITE: ACTOR, UNREACHABLE: ACTOR, FAILED_EVALUATIONS: EVALUATOR}
"""Failures that end no worker, with the role that reports them: their number is a statistic with this name, and a text
with the same name describes the last one. The document has both for the whole experiment."""
PAUSED_SINCE = "paused_since"
"""Statistic of a worker whose state is paused: since when, in Unix seconds."""
MAX_PAUSED = 5
"""Most paused workers that the text names."""
STORED_ON_REQUEST = "stored_on_request"
"""Text of trainer rank 0: the newest stored ``parameters.storeRequest`` and its version, parted by a space."""
TEXTS = ("unstored_reason", "late_version", "rollback", STORED_ON_REQUEST)
"""Texts of trainer rank 0 that the document shows for the whole experiment."""
RESUMED_FROM = "resumed_from"
"""Text of trainer rank 0: the version from which it resumed, or ``NO_VERSION``."""
NO_VERSION = "none"
"""The run had no stored version."""
NO_MORE_SAMPLES = "needs_no_more_samples"
"""Statistic of trainer rank 0: 1 while all lanes that training can still use are granted, else 0."""


@dataclass(frozen=True, kw_only=True)
class MemberReport:
    """A worker's last heartbeat."""

    state: WorkerState = WorkerState.CONFIGURING
    waiting_for: str = ""
    stats: Mapping[str, float] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    """Texts by name."""
    version: Version | None = None
    records_dropped: int = 0
    activity: Mapping[str, float] = field(default_factory=dict)
    """Shares of the worker's recent time, by activity (``rlsrl.runtime.activity``)."""

    @property
    def needs_no_more_samples(self) -> bool:
        """Whether this is the report of a trainer that has granted all that it can still train."""
        return self.stats.get(NO_MORE_SAMPLES) == 1


@dataclass(frozen=True, kw_only=True)
class Member:
    """A worker, present or gone."""

    role: str
    index: int
    incarnation: int
    attempt: int
    instance: str
    """UUID of the process."""
    pid: int
    host: str
    endpoints: Mapping[str, str]
    report: MemberReport
    former: MemberReport = MemberReport()
    """The last report with statistics of a process before it at that index; empty if the coordinator knows of none."""
    heard_at: float
    """The time of its last message, in seconds on the coordinator's clock."""
    present: bool
    """Whether it holds its lease."""
    waits_for: str = ""
    """``main_wait`` of its last heartbeat."""
    waiting_since: float = 0.0
    """The time of the first of the last heartbeats in a row with the same ``waits_for``."""


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A run that takes no steps, though it should."""

    seconds: float
    """The time since the last step."""
    reasons: tuple[str, ...]
    """What the workers wait for, the likely cause first."""


@dataclass(frozen=True, kw_only=True)
class ExperimentInfo:
    """Facts about the experiment that do not depend on its members."""

    name: str
    run_uid: str
    heartbeat_seconds: float
    metrics_seconds: float = 0.0
    """Seconds between a worker's metrics for trackers; 0: none."""
    endpoints: Mapping[str, str]
    """The coordinator's own addresses, by protocol."""
    done: bool
    """Whether trainer rank 0 has reported that its work is complete."""


def build_status(
    experiment: ExperimentInfo,
    members: Iterable[Member],
    copies: LedgerCopies,
    now: float,
    *,
    env_steps_per_second: float | None = None,
    long_calls: Sequence[WorkerCall] = (),
    stall: Stall | None = None,
) -> dict[str, Any]:
    """Return the status document.

    ``members`` has the newest worker of each (role, index), present or gone. The document's roles list only present
    workers. The phase and the totals depend on all members, and the ledger on the pages of all.
    ``env_steps_per_second`` is the present speed of training. ``long_calls`` are the environment calls that last long,
    also those of workers that are gone because a call holds their interpreter lock. ``stall``: whether and why the run
    takes no steps.
    """
    everyone = sorted(members, key=lambda member: (member.role, member.index))
    present = [member for member in everyone if member.present]
    return {
        "experiment": experiment.name,
        "run_uid": experiment.run_uid,
        "phase": derive_phase(everyone, done=experiment.done),
        "totals": _totals(everyone) | {"env_steps_per_second": env_steps_per_second},
        "resumption": _resumption(everyone),
        "ledger": copies.ledger(member.role for member in present),
        "roles": {
            role: [_worker(member, experiment, now) for member in present if member.role == role]
            for role in sorted({member.role for member in everyone})
        },
        "gone": [_gone(member, now) for member in everyone if not member.present],
        "environment_calls": [_call(each) for each in long_calls],
        SERVER_WAITS: server_waits(present),
        **{name: _failures(everyone, role, name) for name, role in FAILURES.items()},
        "paused": _paused(present),
        "stall": None if stall is None else {"seconds": round(stall.seconds, 1), "reasons": list(stall.reasons)},
        "endpoints": dict(experiment.endpoints),
    }


def main_wait(report: MemberReport) -> str:
    """Return what a worker waits for most of the time, or "" if it works most of the time.

    A worker that waits for the same again and again reports no wait if its heartbeat falls between two waits. Before
    the shares of its time are known, the present wait counts.
    """
    if not report.activity:
        return report.waiting_for
    return next((name for name, share in report.activity.items() if share > 0.5 and stage_of(name) is None), "")


def without_credit(report: MemberReport) -> MemberReport:
    """Return a worker's report with waits for credit renamed to waits for the end of training.

    Use it once the run needs no more samples: only the trainer knows that no credit will come.
    """
    activity = {END_OF_TRAINING if name == CREDIT else name: share for name, share in report.activity.items()}
    waiting_for = END_OF_TRAINING if report.waiting_for == CREDIT else report.waiting_for
    return replace(report, waiting_for=waiting_for, activity=activity)


def is_stale(member: Member, now: float, heartbeat_seconds: float) -> bool:
    """Return whether a worker has been silent for ``STALE_HEARTBEATS``."""
    return now - member.heard_at > STALE_HEARTBEATS * heartbeat_seconds


def paused_roles(present: Iterable[Member]) -> set[str]:
    """Return the roles of which all present workers are paused, and without which no step is taken."""
    states: dict[str, set[WorkerState]] = {}
    for member in present:
        states.setdefault(member.role, set()).add(member.report.state)
    return {role for role, found in states.items() if role != EVALUATOR and found == {WorkerState.PAUSED}}


def derive_phase(members: Sequence[Member], *, done: bool) -> RunPhase:
    """Return the phase that follows from the workers' states."""
    if done:
        return "finished"
    trainers = [member for member in members if member.role == TRAINER]
    present = [member for member in trainers if member.present]
    if trainers and not present:
        return "recovering"
    if paused_roles(each for each in members if each.present):
        return "paused"
    states = {member.report.state for member in present}
    has_trained = any(member.report.stats.get("train_steps", 0) > 0 for member in present)
    return "training" if has_trained and WorkerState.CONFIGURING not in states else "starting"


def _totals(members: Iterable[Member]) -> dict[str, Any]:
    trainers = (member.report for member in members if (member.role, member.index) == (TRAINER, 0))
    report = next(trainers, MemberReport())
    totals: dict[str, Any] = {name: _finite(report.stats.get(name)) for name in TOTALS}
    info = {
        key: {name: _finite(value) for name, value in statistics.items()}
        for key, statistics in info_statistics(report.stats).items()
    }
    texts = {name: report.texts.get(name) for name in TEXTS}
    return totals | texts | {"episode_info": info or None, "version": _text(report.version)}


def _resumption(members: Iterable[Member]) -> dict[str, Any] | None:
    """Return from which version the present attempt resumed, and what is lost; None if that is unknown."""
    first = next((member for member in members if (member.role, member.index) == (TRAINER, 0)), None)
    if first is None:
        return None
    if (found := first.report.texts.get(RESUMED_FROM, "")) == NO_VERSION:
        text = f"attempt {first.attempt} began from step 0: no version was stored"
        return {"attempt": first.attempt, "version": None, "text": text}
    try:
        version = Version.parse(found)
    except ValueError:  # not there yet, or written by a user's code
        return None
    reached = first.former.stats
    text = resumption_text(
        version,
        reached=_finite(reached.get("train_steps")),
        reached_env_steps=_finite(reached.get("env_steps")),
    )
    return {"attempt": first.attempt, "version": found, "text": f"attempt {first.attempt} resumed {text}"}


def _gone(member: Member, now: float) -> dict[str, Any]:
    """Return a worker without a lease: it left, or its heartbeats stopped."""
    return {
        "role": member.role,
        "index": member.index,
        "pid": member.pid,
        "age_seconds": round(max(0.0, now - member.heard_at), 3),
    }


def _call(found: WorkerCall) -> dict[str, Any]:
    call = found.call
    return {
        "role": found.role,
        "index": found.index,
        "first_rank": call.first_rank,
        "num_environments": call.num_environments,
        "call": call.name,
        "seconds": round(call.seconds, 1),
        "text": str(found),
    }


def _failures(members: Iterable[Member], role: str, name: str) -> dict[str, Any] | None:
    """Return the number of failures of that name of all workers of the role, and the last one of the worker with most;
    None without a failure.
    """
    counts = [(_finite(each.report.stats.get(name)) or 0.0, each) for each in members if each.role == role]
    number, worst = max(counts, key=lambda each: each[0], default=(0.0, None))
    if worst is None or number <= 0:
        return None
    last = worst.report.texts.get(name, "its log has the error")
    return {"number": sum(number for number, _ in counts), "last": f"{worst.role}-{worst.index}: {last}"}


def _paused(present: Sequence[Member]) -> dict[str, Any] | None:
    """Return how many workers are paused, since when and which ones; None if none is paused."""
    paused = [each for each in present if each.report.state is WorkerState.PAUSED]
    if not paused:
        return None
    since = _utc(min(_finite(each.report.stats.get(PAUSED_SINCE)) or 0.0 for each in paused))
    named = [f"{each.role}-{each.index}" for each in paused[:MAX_PAUSED]]
    more = f" and {len(paused) - MAX_PAUSED:,} more" if len(paused) > MAX_PAUSED else ""
    text = f"paused since {since}: {', '.join(named)}{more}"
    return {"number": len(paused), "since": since, "text": text}


def server_waits(present: Iterable[Member]) -> dict[str, Any] | None:
    """Return how many environments of present workers wait for their server, since when, and why the first one does.

    None: none waits.
    """
    waits = [
        (_finite(each.report.stats.get(SERVER_AWAY_SINCE)) or 0.0, number, each)
        for each in present
        if (number := int(_finite(each.report.stats.get(SERVER_WAITS)) or 0)) > 0
    ]
    if not waits:
        return None
    since, _, first = min(waits, key=lambda wait: wait[0])
    total = sum(number for _, number, _ in waits)
    began = _utc(since)
    have_waited = "1 environment has waited" if total == 1 else f"{total:,} environments have waited"
    reason = first.report.texts.get(SERVER_WAITS, "its log has the error")
    text = f"{have_waited} since {began}: {reason} ({first.role}-{first.index})"
    return {"number": total, "since": began, "text": text}


def _utc(seconds: float) -> str:
    """Return a time in Unix seconds as text."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _worker(member: Member, experiment: ExperimentInfo, now: float) -> dict[str, Any]:
    age = max(0.0, now - member.heard_at)
    return {
        "index": member.index,
        "incarnation": member.incarnation,
        "attempt": member.attempt,
        "pid": member.pid,
        "host": member.host,
        "state": member.report.state,
        "paused_since": _paused_since(member),
        "waiting_for": member.report.waiting_for,
        "activity": {activity: round(share, 3) for activity, share in sorted(member.report.activity.items())},
        "stats": {name: _finite(value) for name, value in sorted(member.report.stats.items())},
        "version": _text(member.report.version),
        "age_seconds": round(age, 3),
        "stale": is_stale(member, now, experiment.heartbeat_seconds),
        "records_dropped": member.report.records_dropped,
        "endpoints": dict(member.endpoints),
    }


def _paused_since(member: Member) -> str | None:
    since = _finite(member.report.stats.get(PAUSED_SINCE))
    return None if since is None or member.report.state is not WorkerState.PAUSED else _utc(since)


def _text(version: Version | None) -> str | None:
    return None if version is None else str(version)


def _finite(value: float | None) -> float | None:
    """Return the value, or None for NaN and infinity, which JSON lacks."""
    return value if value is not None and math.isfinite(value) else None
