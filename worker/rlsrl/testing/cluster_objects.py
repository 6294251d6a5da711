"""Kubernetes objects in an API server's form, for tests of code that reads them."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from rlsrl.api.pods import CONTAINER, EXPERIMENT_LABEL, ROLE_LABEL, UID_LABEL
from rlsrl.api.reasons import REASONS
from rlsrl.api.spec import API_VERSION, KIND

Object = dict[str, Any]
NAME = "cartpole"
UID = "0f5a5b0a-0000-4000-8000-000000000001"
MADE = "2026-01-01T12:00:00Z"
"""Creation time of the experiment and its objects."""
BUCKET_SECRET = "bucket-keys"
_WARNED = "2026-01-01T12:02:00Z"


def labels(role: str) -> dict[str, str]:
    """Return the labels of a role's objects."""
    return {EXPERIMENT_LABEL: NAME, UID_LABEL: UID, ROLE_LABEL: role}


def token_secret(token: str) -> Object:
    """Return the Secret with the experiment's token."""
    return {"kind": "Secret", "metadata": {"name": f"{NAME}-token", "labels": labels("")}, "data": _data(token=token)}


def bucket_secret(credentials: Mapping[str, str]) -> Object:
    """Return the Secret with the keys of the bucket of ``suspended_with_bucket``."""
    return {"kind": "Secret", "metadata": {"name": BUCKET_SECRET}, "data": _data(**credentials)}


def suspended_with_bucket(place: Mapping[str, str], fresh_attempt: int | None) -> Object:
    """Return a suspended experiment whose runs are in an object store.

    ``place``: the store's url, endpoint and region. ``fresh_attempt``: the attempt that began its present run; None:
    the first.
    """
    status: Object = {} if fresh_attempt is None else {"freshAttempt": fresh_attempt}
    spec = {
        "environment": {"id": "CartPole-v1"},
        "actors": {"environments": 8},
        "parameters": {"store": {"objectStore": {**place, "credentialsSecret": BUCKET_SECRET}}},
        "stop": {"envSteps": 1000},
    }
    return {**experiment("Suspended", **status), "spec": spec}


def experiment(phase: str | None, *conditions: Object, name: str = NAME, uid: str = UID, **status: Any) -> Object:
    """Return an experiment in a phase, with conditions; without a phase it has no status."""
    observed = {} if phase is None else {"status": {"phase": phase, "conditions": list(conditions), **status}}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name, "namespace": "research", "uid": uid, "creationTimestamp": MADE, "generation": 1},
        "spec": {
            "trainers": {"replicas": 1},
            "restarts": {"budget": 10},
            "parameters": {"store": {"filesystem": {"size": "10Gi"}}},
            "stop": {"returnMean": 475.0, "envSteps": 2_000_000},
        },
        **observed,
    }


def condition(aspect: str, reason: str, message: str, *, since: str = "2026-01-01T12:01:00Z") -> Object:
    """Return a condition with the status of its reason; False for Kubernetes' own reasons."""
    reasons = next((words for name, words in REASONS.items() if name == aspect), {})
    status = next((entry.status for word, entry in reasons.items() if word == reason), "False")
    return {"type": aspect, "status": status, "reason": reason, "message": message, "lastTransitionTime": since}


def workload(role: str, *, ready: int, replicas: int, kind: str = "Deployment") -> Object:
    """Return a role's Deployment or StatefulSet."""
    metadata = {"name": f"{NAME}-{role}", "uid": f"uid-of-{role}s", "labels": labels(role), "creationTimestamp": MADE}
    return {
        "kind": kind,
        "metadata": metadata,
        "spec": {"replicas": replicas},
        "status": {"readyReplicas": ready} if ready else {},
    }


def pod(name: str, role: str, *, index: int | None = None, **container: Any) -> Object:
    """Return a pod, ready unless its container's ``state``, ``lastState``, ``restartCount`` or ``ready`` is given."""
    ready = container.pop("ready", not container)
    pod_index = {} if index is None else {"apps.kubernetes.io/pod-index": str(index)}
    state = {"name": CONTAINER, "restartCount": 0, "state": {"running": {}}, **container}
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "uid": f"uid-of-{name}",
            "labels": {**labels(role), **pod_index},
            "creationTimestamp": MADE,
        },
        "status": {
            "phase": "Running" if ready else "Pending",
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            "containerStatuses": [state],
        },
    }


def warning(about: Object, reason: str, message: str, *, count: int = 1) -> Object:
    """Return a warning event about an object."""
    return {
        "kind": "Event",
        "metadata": {"name": f"{about['metadata']['name']}.{reason}", "creationTimestamp": _WARNED},
        "involvedObject": {"uid": about["metadata"]["uid"], "name": about["metadata"]["name"]},
        "type": "Warning",
        "reason": reason,
        "message": message,
        "lastTimestamp": _WARNED,
        "count": count,
    }


def _data(**values: str) -> dict[str, str]:
    """Return the data of a Secret."""
    return {name: base64.b64encode(value.encode()).decode() for name, value in values.items()}
