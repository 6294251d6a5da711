"""An experiment's pods: labels and container that the operator sets, and the state that it and commands read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EXPERIMENT_LABEL = "rlsrl.dev/experiment"
UID_LABEL = "rlsrl.dev/uid"
"""Distinguishes an experiment from an earlier one of the same name, whose pods may still be terminating."""
ROLE_LABEL = "rlsrl.dev/role"
CONTAINER = "worker"
"""The worker's container."""
STARTS_FROM_LABEL = "rlsrl.dev/starts-from"
"""Label of trainers' pods: the experiment of ``parameters.from.experiment``, whose coordinator they reach."""
SOURCE_FOLDER_VARIABLE = "RLSRL_SOURCE_FOLDER"
"""Environment variable of trainers: the folder of the Secret with the way to that experiment's coordinator. Its keys
follow."""
SOURCE_TOKEN_KEY = "reading-token"
"""The token that reads that experiment's stored weights; not ``TOKEN_KEY``, by which commands find the experiment's."""
SOURCE_ADDRESS_KEY = "address"
"""The address of the coordinator."""
SOURCE_TLS_NAME_KEY = "tls-name"
"""The name in the coordinator's certificate. The key is missing if it has none."""
TOKEN_KEY = "token"
"""The key in the experiment's Secret of the token that workers present to each other."""
VIEWING_TOKEN_KEY = "viewing-token"
"""The key in that Secret of the token that opens the coordinator's pages."""

BY_TAINT = "DeletionByTaintManager"
"""The reason of the condition DisruptionTarget if a taint of the pod's node evicts the pod."""

REMOVED_CONDITION = "TerminationTarget"
"""Condition of a pod that Kueue evicts."""
_DISRUPTION_CONDITIONS = frozenset({"DisruptionTarget", REMOVED_CONDITION})
_DISRUPTION_REASONS = frozenset({"Evicted", "Preempted", "NodeShutdown", "Terminated", "DisruptionTarget"})

Pod = Mapping[str, Any]
"""A pod as the API server returns it."""


def certified_name(experiment: str, namespace: str) -> str:
    """Return the DNS name that the certificates of an experiment's workers carry: that of its coordinator's Service."""
    return f"{experiment}-coordinator.{namespace}.svc"


def is_ready(pod: Pod) -> bool:
    """Return whether a pod is ready and not terminating."""
    conditions = pod.get("status", {}).get("conditions", ())
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


def unready_since(pod: Pod) -> str | None:
    """Return the time since which a pod is not ready, as Kubernetes writes it; None if it is ready or unknown.

    The pods of an unreachable node become unready.
    """
    conditions = pod.get("status", {}).get("conditions", ())
    return next(
        (each.get("lastTransitionTime") for each in conditions if each["type"] == "Ready" and each["status"] != "True"),
        None,
    )


def is_evicted_by_taint(pod: Pod) -> bool:
    """Return whether a taint of its node evicts the pod."""
    conditions = pod.get("status", {}).get("conditions", ())
    return any(each["type"] == "DisruptionTarget" and each.get("reason") == BY_TAINT for each in conditions)


def disruption(pod: Pod) -> str | None:
    """Return where and why an eviction, a preemption or a queue disrupts a pod, in Kubernetes' words; else None.

    For example ``was disrupted on node n1: EvictionByEvictionAPI: Eviction API: evicting``.
    """
    status = pod.get("status", {})
    found = [
        each
        for each in status.get("conditions", ())
        if each["type"] in _DISRUPTION_CONDITIONS and each["status"] == "True"
    ]
    found += [status] if status.get("reason") in _DISRUPTION_REASONS else []
    if not found:
        return None
    words = [str(found[0][part]) for part in ("reason", "message") if found[0].get(part)]
    node = pod.get("spec", {}).get("nodeName")
    return ": ".join([f"was disrupted on node {node}" if node else "was disrupted", *words])


def _containers(pod: Pod) -> list[Mapping[str, Any]]:
    """Return the status of the worker's container; nothing before the pod is on a node."""
    statuses = pod.get("status", {}).get("containerStatuses", ())
    return [container for container in statuses if container["name"] == CONTAINER]


def terminations(pod: Pod) -> list[dict[str, Any]]:
    """Return the last terminations of the worker's container: the current one and the one before."""
    states = [container.get(name, {}) for container in _containers(pod) for name in ("state", "lastState")]
    return [state["terminated"] for state in states if state.get("terminated")]


def is_in_back_off(pod: Pod) -> bool:
    """Return whether the worker's container is in CrashLoopBackOff."""
    waiting = [container.get("state", {}).get("waiting", {}) for container in _containers(pod)]
    return any(each.get("reason") == "CrashLoopBackOff" for each in waiting)


def restarts(pod: Pod) -> int:
    """Return the restarts of the worker's container within this pod; a pod that replaces another begins at 0."""
    return sum(int(container.get("restartCount", 0)) for container in _containers(pod))
