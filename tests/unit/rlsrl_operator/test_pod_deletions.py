"""Which pods the operator deletes, and why: a table."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rlsrl.api.pods import BY_TAINT
from rlsrl.api.status import ExperimentStatus, Phase
from rlsrl_operator.manifests import Manifest
from rlsrl_operator.pod_deletions import LOST_SECONDS, WORKED_SECONDS, pod_deletions
from rlsrl_operator.status import stamp
from rlsrl_operator.testing import pod, waiting

NOW = datetime(2026, 1, 1, 0, 10, tzinfo=UTC)
GRACE_SECONDS = 3600
BACK_OFF = waiting("CrashLoopBackOff")


def terminating(seconds_over: float, *, grace: float = 0, **about: Any) -> Manifest:
    """A pod whose grace period has been over for so long."""
    made = pod("actor", deleted=stamp(NOW - timedelta(seconds=seconds_over)), **about)
    made["metadata"]["deletionGracePeriodSeconds"] = grace
    return made


def evicted(*, unready_for: float, reason: str, requested_ago: float) -> Manifest:
    """A pod with a long grace period on a node that became unreachable so long before the pod was evicted."""
    unready = {"type": "Ready", "status": "False"}
    since = NOW - timedelta(seconds=requested_ago + unready_for)
    disrupted = {"type": "DisruptionTarget", "status": "True", "reason": reason}
    made = terminating(requested_ago - GRACE_SECONDS, grace=GRACE_SECONDS)
    made["status"]["conditions"] = [{**unready, "lastTransitionTime": stamp(since)}, disrupted]
    return made


def crashed(lived: float | None, state: Manifest = BACK_OFF) -> Manifest:
    """A pod whose worker ended after so many seconds; None: its node does not know."""
    end: Manifest = {"exitCode": 137, "startedAt": None, "finishedAt": None}
    if lived is not None:
        end |= {"startedAt": stamp(NOW - timedelta(seconds=lived)), "finishedAt": stamp(NOW)}
    return pod("actor", restarts=1, state=state, last_state={"terminated": end})


CASES: dict[str, tuple[Manifest, Phase, str | None]] = {
    "a healthy pod": (pod(), "Running", None),
    "a pod of an earlier attempt": (pod(attempt=1), "Starting", "earlier attempt"),
    "a pod of an earlier attempt once all is over": (pod(attempt=1), "Failed", None),
    "a pod within its grace period": (terminating(-1), "Running", None),
    "a pod soon after its grace period": (terminating(LOST_SECONDS), "Running", None),
    "a pod that its node does not end": (terminating(LOST_SECONDS + 1), "Running", "node lost"),
    "a pod that its node does not end once all is over": (terminating(LOST_SECONDS + 1), "Succeeded", "node lost"),
    "evicted from an unreachable node": (
        evicted(unready_for=1, reason=BY_TAINT, requested_ago=LOST_SECONDS + 1),
        "Running",
        "node lost",
    ),
    "evicted from an unreachable node a moment ago": (
        evicted(unready_for=1, reason=BY_TAINT, requested_ago=LOST_SECONDS),
        "Running",
        None,
    ),
    "evicted from a node that answered": (
        evicted(unready_for=-1, reason=BY_TAINT, requested_ago=LOST_SECONDS + 1),
        "Running",
        None,
    ),
    "evicted by a person": (
        evicted(unready_for=1, reason="EvictionByEvictionAPI", requested_ago=LOST_SECONDS + 1),
        "Running",
        None,
    ),
    "a worker in back-off that failed at once": (crashed(WORKED_SECONDS), "Running", None),
    "a worker in back-off of which nothing is known": (crashed(None), "Running", None),
    "a worker in back-off that had worked": (crashed(WORKED_SECONDS + 1), "Running", "restart back-off"),
    "a worker that runs again": (crashed(WORKED_SECONDS + 1, state={"running": {}}), "Running", None),
}


@pytest.mark.parametrize(("found", "phase", "expected"), CASES.values(), ids=CASES)
def test_a_pod_is_deleted_for_a_reason(found: Manifest, phase: Phase, expected: str | None) -> None:
    attempt = 2 if found["metadata"]["name"] == "a-trainer-0" and phase != "Running" else 1
    status = ExperimentStatus(phase=phase, attempt=attempt)
    deletions = pod_deletions(status, [found], NOW)
    assert [each.reason for each in deletions] == ([] if expected is None else [expected])
    assert [each.grace_seconds for each in deletions] == [
        0 if each.reason == "node lost" else None for each in deletions
    ]
