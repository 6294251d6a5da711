"""An experiment's pods, as the operator makes them and as commands find and read them: labels, container, state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EXPERIMENT_LABEL = "rlsrl.dev/experiment"
UID_LABEL = "rlsrl.dev/uid"
"""Tells an experiment from an earlier one of the same name, whose pods may still be ending."""
ROLE_LABEL = "rlsrl.dev/role"
CONTAINER = "worker"
"""The container in which the worker runs."""
TOKEN_KEY = "token"  # noqa: S105 - a key's name
"""Of the experiment's Secret: the word by which its workers know each other."""

BY_TAINT = "DeletionByTaintManager"
"""The reason of the condition DisruptionTarget."""

Pod = Mapping[str, Any]
"""As the API server shows it."""


def certified_name(experiment: str, namespace: str) -> str:
    """The DNS name on the certificates of an experiment's workers, where they have any: its coordinator's, which nobody
    else in the cluster may have.
    """
    return f"{experiment}-coordinator.{namespace}.svc"


def is_ready(pod: Pod) -> bool:
    """Whether a pod is ready, and not on its way out."""
    conditions = pod.get("status", {}).get("conditions", ())
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


def unready_since(pod: Pod) -> str | None:
    """Since when a pod is not ready, as Kubernetes writes it; None if it is, or nothing is known. A node that is not
    heard of makes its pods unready.
    """
    conditions = pod.get("status", {}).get("conditions", ())
    return next(
        (each.get("lastTransitionTime") for each in conditions if each["type"] == "Ready" and each["status"] != "True"),
        None,
    )


def is_driven_out(pod: Pod) -> bool:
    """Whether a pod is to go for a taint of its node."""
    conditions = pod.get("status", {}).get("conditions", ())
    return any(each["type"] == "DisruptionTarget" and each.get("reason") == BY_TAINT for each in conditions)


def terminations(pod: Pod) -> list[dict[str, Any]]:
    """How the worker's container ended, now and the time before."""
    states = [
        state.get("terminated")
        for container in pod.get("status", {}).get("containerStatuses", ())
        if container["name"] == CONTAINER
        for state in (container.get("state", {}), container.get("lastState", {}))
    ]
    return [state for state in states if state]


def is_held_back(pod: Pod) -> bool:
    """Whether the worker's container ended too often for its node to start it again at once."""
    return any(
        container.get("state", {}).get("waiting", {}).get("reason") == "CrashLoopBackOff"
        for container in pod.get("status", {}).get("containerStatuses", ())
        if container["name"] == CONTAINER
    )


def restarts(pod: Pod) -> int:
    """How often the worker's container was started again."""
    statuses = pod.get("status", {}).get("containerStatuses", ())
    return sum(int(each.get("restartCount", 0)) for each in statuses if each["name"] == CONTAINER)
