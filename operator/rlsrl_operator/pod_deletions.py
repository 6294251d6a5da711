"""Decide which pods to delete, and why. Pure.

The operator deletes a pod for one of three reasons:

- ``earlier attempt``: the gang was restarted, and the pod's trainer belongs to an attempt that is over. The condition
  ``GangComplete``, its Event and ``kubectl rlsrl why`` say why that attempt ended.
- ``node lost``: a pod that was deleted before, for any cause, still exists after its grace period, because its node is
  dead or unreachable. The operator force-deletes such a pod.
- ``restart back-off``: the node delays the restart of a worker that had worked. A new pod starts without a delay.

The operator's log shows each deletion as ``deleting_pod`` with its reason. No Event and no condition names it.

Kubernetes' controllers delete all other pods, after the operator has changed their Deployment or StatefulSet: for an
edit, for fewer replicas, for a suspension, and at the end of a run. Users, evictions and lost nodes delete pods, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from rlsrl.api.pods import is_evicted_by_taint, is_in_back_off, terminations, unready_since
from rlsrl.api.status import TERMINAL, ExperimentStatus
from rlsrl_operator.gang import attempt_of, parse_time
from rlsrl_operator.manifests.types import Manifest

LOST_SECONDS = 30.0
"""How long a pod may exceed its grace period before it is force-deleted: its node is dead or unreachable."""
WORKED_SECONDS = 60.0
"""A worker that ran longer than this did not fail at once, so it need not wait before it starts again."""

DeletionReason = Literal["node lost", "earlier attempt", "restart back-off"]


@dataclass(frozen=True, kw_only=True)
class PodDeletion:
    """A pod to delete, and why."""

    pod: Manifest
    reason: DeletionReason
    """``Executor.execute`` logs it."""
    grace_seconds: int | None = None
    """0: a force-delete. None: the pod's own grace period."""


def pod_deletions(status: ExperimentStatus, pods: Sequence[Manifest], now: datetime) -> tuple[PodDeletion, ...]:
    """Return the pods to delete.

    A force-delete is safe: the attempt fences trainers, and a coordinator that lost its lease ends itself. The volume
    of a buffer worker is attached to one node at a time, and one process has the ledger page on it open.
    """
    found = [
        PodDeletion(pod=pod, reason=reason, grace_seconds=0 if reason == "node lost" else None)
        for pod in pods
        if (reason := _reason(pod, status, now)) is not None
    ]
    return tuple(found)


def _reason(pod: Manifest, status: ExperimentStatus, now: datetime) -> DeletionReason | None:
    if "deletionTimestamp" in pod["metadata"]:
        return "node lost" if now > _given_up_at(pod) else None
    if status.phase in TERMINAL:
        return None
    if attempt_of(pod) not in (0, status.attempt):
        return "earlier attempt"
    return "restart back-off" if _waits_needlessly(pod) else None


def _given_up_at(pod: Manifest) -> datetime:
    """Return when to force-delete a pod that is terminating: after its grace period and ``LOST_SECONDS``.

    A pod on a node that was unreachable before the taint evicted it gets no grace: nothing can deliver SIGTERM to it.
    """
    ends_at = parse_time(pod["metadata"]["deletionTimestamp"])
    requested_at = ends_at - timedelta(seconds=pod["metadata"].get("deletionGracePeriodSeconds", 0))
    unready = unready_since(pod)
    is_lost = is_evicted_by_taint(pod) and unready is not None and parse_time(unready) < requested_at
    return (requested_at if is_lost else ends_at) + timedelta(seconds=LOST_SECONDS)


def _waits_needlessly(pod: Manifest) -> bool:
    """Return whether CrashLoopBackOff delays a worker that had worked before it ended.

    The back-off takes up to five minutes, for healthy workers as well. A new pod starts at once.
    """
    return is_in_back_off(pod) and any(_lifetime_seconds(each) > WORKED_SECONDS for each in terminations(pod))


def _lifetime_seconds(ended: Mapping[str, Any]) -> float:
    """Return how long a container ran, or 0 if its node does not know."""
    if (started := ended.get("startedAt")) is None or (finished := ended.get("finishedAt")) is None:
        return 0.0
    return (parse_time(finished) - parse_time(started)).total_seconds()
