"""Experiments, settings and pods for the operator's tests, which alone import this module."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlsrl.api.load import load_text
from rlsrl.api.pods import BY_TAINT, CONTAINER, ROLE_LABEL
from rlsrl.api.role_names import TRAINER
from rlsrl_operator.manifests.context import ATTEMPT_ANNOTATION, TEMPLATE_ANNOTATION, ExperimentContext
from rlsrl_operator.manifests.kueue import GATE
from rlsrl_operator.manifests.types import Manifest
from rlsrl_operator.settings import Images, OperatorSettings

UID = "0b1e5a7c-6d0f-4a53-9f41-8f1d3f0c2a10"
"""The ``metadata.uid`` of the experiments."""
TAINTED = {"type": "DisruptionTarget", "status": "True", "reason": BY_TAINT, "message": "Taint manager: deleting"}
"""The condition of a pod whose node does not answer."""
TEMPLATE = "1"
"""The template digest of all pods."""
SETTINGS = OperatorSettings(images=Images(actor="registry.example/actor:1", learner="registry.example/learner:1"))
"""The smallest settings."""

VOLUMES_OF_THE_PROFILE = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"),
}
"""The volume types of the Pod Security profile ``restricted``."""


def context_of(
    document: Mapping[str, Any], *, settings: OperatorSettings = SETTINGS, generation: int = 1, uid: str = UID
) -> ExperimentContext:
    """Return the context of the experiment in a document."""
    return ExperimentContext(
        experiment=load_text(json.dumps(document)),
        namespace="research",
        uid=uid,
        generation=generation,
        settings=settings,
    )


def pod(
    role: str = TRAINER,
    index: int = 0,
    *,
    ready: bool | None = None,
    created: str = "2026-01-01T00:00:00Z",
    deleted: str | None = None,
    attempt: int = 1,
    template: str = TEMPLATE,
    restarts: int = 0,
    state: Manifest | None = None,
    last_state: Manifest | None = None,
    conditions: Sequence[Manifest] = (),
    held: bool = False,
    node: str | None = None,
    started: bool = False,
    unready_since: str | None = None,
    **status: Any,
) -> Manifest:
    """Return a pod as the API server shows it, ready if it runs.

    ``held``: Kueue has not admitted it. ``started``: its worker has passed the startup probe. ``unready_since``: the
    last change of its condition Ready.
    """
    is_ready = state is None if ready is None else ready
    is_trainer = role == TRAINER
    container = {"name": CONTAINER, "restartCount": restarts, "state": state or {"running": {}}, "started": started}
    readiness = {"type": "Ready", "status": "True" if is_ready else "False"}
    spec = {
        **({"schedulingGates": [{"name": GATE}]} if held else {}),
        **({"nodeName": node} if node is not None else {}),
    }
    return {
        "metadata": {
            "name": f"a-{role}-{index}",
            "labels": {ROLE_LABEL: role, **({"apps.kubernetes.io/pod-index": str(index)} if is_trainer else {})},
            "annotations": {
                TEMPLATE_ANNOTATION: template,
                **({ATTEMPT_ANNOTATION: str(attempt)} if is_trainer else {}),
            },
            "creationTimestamp": created,
            **({"deletionTimestamp": deleted} if deleted else {}),
        },
        **({"spec": spec} if spec else {}),
        "status": {
            "phase": "Running",
            "conditions": [
                {**readiness, **({"lastTransitionTime": unready_since} if unready_since is not None else {})},
                *conditions,
            ],
            "containerStatuses": [{**container, **({"lastState": last_state} if last_state else {})}],
            **status,
        },
    }


def ended(exit_code: int, message: str = "") -> Manifest:
    """Return the state of a container that ended."""
    reason = "Error" if exit_code else "Completed"
    return {"terminated": {"exitCode": exit_code, "reason": reason, **({"message": message} if message else {})}}


def waiting(reason: str, message: str = "") -> Manifest:
    """Return the state of a container that waits for its first or next start."""
    return {"waiting": {"reason": reason, **({"message": message} if message else {})}}


def faults_of_restricted(pod: Manifest) -> Iterator[str]:
    """Yield the violations of the Pod Security profile ``restricted`` in a pod's spec."""
    own = pod.get("securityContext", {})
    yield from (name for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name))
    yield from (name for name in ("sysctls", "seLinuxOptions", "windowsOptions", "appArmorProfile") if own.get(name))
    for volume in pod.get("volumes", ()):
        yield from (f"volume of type {kind}" for kind in set(volume) - {"name"} - VOLUMES_OF_THE_PROFILE)
    for each in (*pod["containers"], *pod.get("initContainers", ()), *pod.get("ephemeralContainers", ())):
        context = {**own, **each.get("securityContext", {})}
        if context.get("privileged"):
            yield "privileged"
        if context.get("procMount", "Default") != "Default":
            yield "procMount"
        if any(port.get("hostPort") for port in each.get("ports", ())):
            yield "hostPort"
        if context.get("allowPrivilegeEscalation") is not False:
            yield "allowPrivilegeEscalation"
        if context.get("runAsNonRoot") is not True or context.get("runAsUser") == 0:
            yield "runs as root"
        if context.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            yield "seccompProfile"
        capabilities = context.get("capabilities", {})
        if "ALL" not in capabilities.get("drop", ()) or set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
            yield "capabilities"
