"""The pod template of each role: not root, read-only root file system, no API token, Pod Security ``restricted``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

from pydantic import JsonValue

from rlsrl.api.placement import HEALTH_PORT, HTTP_PORT
from rlsrl.api.pods import CONTAINER, SOURCE_FOLDER_VARIABLE, STARTS_FROM_LABEL, TOKEN_KEY, certified_name
from rlsrl.api.process_environment import process_environment
from rlsrl.api.quantities import amount_of
from rlsrl.api.replay_memory import assumed_store_bytes
from rlsrl.api.role_names import COORDINATOR, TRAINER
from rlsrl.api.roles import Role
from rlsrl_operator.manifests.context import (
    ATTEMPT_ANNOTATION,
    DATA_FOLDER,
    SETTINGS_FOLDER,
    STATE_FOLDER,
    TEMPLATE_ANNOTATION,
    ExperimentContext,
)
from rlsrl_operator.manifests.source import SourceName
from rlsrl_operator.manifests.templates import merged_template, resources_in, template_of_role
from rlsrl_operator.manifests.types import Manifest, digest
from rlsrl_operator.roles import MASTER_PORT, has_pod_index, has_volumes
from rlsrl_operator.settings import Identity

USER = 10001
CONFIG_FOLDER = "/etc/rlsrl/config"
TOKEN_FOLDER = "/etc/rlsrl/token"
TLS_FOLDER = "/etc/rlsrl/tls"
SOURCE_FOLDER = "/etc/rlsrl/source"
SOURCE_VOLUME = "parameters-source"
"""The volume with the way to the experiment from whose weights this one starts."""
TLS_KEYS = ("tls.crt", "tls.key", "ca.crt")
RESULT_FILE = "/dev/termination-log"
FROZEN_GRACE_SECONDS = 5
"""Seconds between SIGTERM and SIGKILL of a process that fails its liveness probe."""
EVICTED_AFTER_SECONDS = 30
"""How long pods stay on an unreachable node."""
_MEBIBYTE = 2**20
STATE_VOLUME = "state"
"""The volume with what outlives a container; for some roles it outlives the pod, too (``roles.has_volumes``)."""
_COORDINATOR_MOUNTS: tuple[Manifest, ...] = (
    {"name": "data", "mountPath": DATA_FOLDER},
    {"name": "settings", "mountPath": SETTINGS_FOLDER, "readOnly": True},
)


def pod_template(context: ExperimentContext, role: Role) -> Manifest:
    """Return metadata and spec of a role's pods."""
    labels = context.labels(role.name)
    if (source := _source(context, role)) is not None:
        labels[STARTS_FROM_LABEL] = source.name
    rendered = {"metadata": {"labels": labels}, "spec": _spec(context, role)}
    whole = merged_template(rendered, template_of_role(context.experiment, role.name))
    metadata, spec = whole["metadata"], whole["spec"]
    marked = [metadata["labels"], spec, *([metadata["annotations"]] if "annotations" in metadata else [])]
    annotations = {**metadata.get("annotations", {}), TEMPLATE_ANNOTATION: digest(marked)[:10]}
    return {"metadata": {**metadata, "annotations": annotations}, "spec": spec}


def _spec(context: ExperimentContext, role: Role) -> Manifest:
    defaults = context.settings.defaults_of(role.name)
    images = context.settings.images
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # Process 1 of a PID namespace ignores signals without a handler: here that is the pause container.
        "shareProcessNamespace": True,
        "terminationGracePeriodSeconds": role.grace_seconds,
        "securityContext": {
            "runAsNonRoot": True,
            **_identity(defaults.security_context),
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": [*_eviction_tolerations(), *defaults.tolerations],
        "containers": [_container(context, role)],
        "volumes": _volumes(context, role),
        **({"imagePullSecrets": [{"name": name} for name in images.pull_secrets]} if images.pull_secrets else {}),
        **({"nodeSelector": defaults.node_selector} if defaults.node_selector else {}),
        **({"affinity": defaults.affinity} if defaults.affinity else {}),
        **({"priorityClassName": defaults.priority_class_name} if defaults.priority_class_name else {}),
    }


def _identity(chosen: Mapping[Identity, int | None]) -> Manifest:
    """Return a pod's user and groups: 10001, or the chosen numbers. None leaves the choice to the cluster."""
    ids = {"runAsUser": USER, "runAsGroup": USER, "fsGroup": USER, **chosen}
    return {name: number for name, number in ids.items() if number is not None}


def _container(context: ExperimentContext, role: Role) -> Manifest:
    images = context.settings.images
    return {
        "name": CONTAINER,
        "image": images.learner if role.needs_torch(context.experiment.spec) else images.actor,
        "imagePullPolicy": images.pull_policy,
        "command": _command(context, role),
        "env": _environment(context, role),
        "ports": _ports(context, role),
        "resources": _resources(context, role),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePath": RESULT_FILE,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
            {"name": "token", "mountPath": TOKEN_FOLDER, "readOnly": True},
            *([{"name": "tls", "mountPath": TLS_FOLDER, "readOnly": True}] if _tls_secret(context) else []),
            *(
                [{"name": SOURCE_VOLUME, "mountPath": SOURCE_FOLDER, "readOnly": True}]
                if _source(context, role)
                else []
            ),
            {"name": STATE_VOLUME, "mountPath": STATE_FOLDER},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a mount point
            *(_COORDINATOR_MOUNTS if role.name == COORDINATOR else ()),
        ],
        **_credentials(context, role),
        **_probes(role),
    }


def _command(context: ExperimentContext, role: Role) -> list[str]:
    worker = ["--role", role.name, "--config", f"{CONFIG_FOLDER}/{role.name}.json"]
    if role.name != TRAINER:
        index = ["--index", "$(RLSRL_POD_INDEX)"] if has_pod_index(role, context.experiment.spec) else []
        return ["python", "-m", "rlsrl.workers", *worker, *index]
    trainers = context.experiment.spec.trainers
    name = context.name_of(TRAINER)
    launcher = ["python", "-m", "rlsrl.workers.gang_launcher", "--ranks", str(trainers.ranks_per_pod)]
    machines = ["--machines", str(trainers.num_pods), "--machine", "$(RLSRL_POD_INDEX)"]
    meeting = ["--meet-at", f"{name}-0.{name}:{MASTER_PORT}", "--once", f"{STATE_FOLDER}/started"]
    health = ["--health-at", str(HEALTH_PORT)]
    return [*launcher, *machines, *meeting, *health, *worker, "--attempt", "$(RLSRL_ATTEMPT)"]


def _environment(context: ExperimentContext, role: Role) -> list[Manifest]:
    known: list[Manifest] = [
        *({"name": name, "value": value} for name, value in process_environment(role.name).items()),
        {"name": "RLSRL_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "RLSRL_POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": "RLSRL_TOKEN_FILE", "value": f"{TOKEN_FOLDER}/{TOKEN_KEY}"},
    ]
    if _tls_secret(context):
        known += [
            {"name": "RLSRL_TLS_FOLDER", "value": TLS_FOLDER},
            {"name": "RLSRL_TLS_NAME", "value": certified_name(context.name, context.namespace)},
        ]
    if has_pod_index(role, context.experiment.spec):
        index = "metadata.labels['apps.kubernetes.io/pod-index']"
        known.append({"name": "RLSRL_POD_INDEX", "valueFrom": {"fieldRef": {"fieldPath": index}}})
    if role.name == TRAINER:
        attempt = f"metadata.annotations['{ATTEMPT_ANNOTATION}']"
        known += [
            {"name": "RLSRL_ATTEMPT", "valueFrom": {"fieldRef": {"fieldPath": attempt}}},
            {"name": "RLSRL_RESULT_FILE", "value": RESULT_FILE},
        ]
    if _source(context, role):
        known.append({"name": SOURCE_FOLDER_VARIABLE, "value": SOURCE_FOLDER})
    return [*known, *context.settings.defaults_of(role.name).extra_env]


def _source(context: ExperimentContext, role: Role) -> SourceName | None:
    """Return the experiment whose weights the role's pods read at the start, or None."""
    return context.source if role.name == TRAINER else None


def _tls_secret(context: ExperimentContext) -> str | None:
    return context.experiment.spec.security.tls_secret


def _credentials(context: ExperimentContext, role: Role) -> Manifest:
    store = context.experiment.spec.parameters.store.object_store
    if store is None or store.credentials_secret is None or not role.reaches_object_store:
        return {}
    return {"envFrom": [{"secretRef": {"name": store.credentials_secret}}]}


def _ports(context: ExperimentContext, role: Role) -> list[Manifest]:
    ranks = context.experiment.spec.trainers.ranks_per_pod if role.name == TRAINER else 1
    served = {"http": HTTP_PORT}
    if (port := role.port) is not None:
        served[port.name] = port.number
    health = [{"name": "health", "containerPort": HEALTH_PORT, "protocol": "TCP"}] if role.name == TRAINER else []
    return health + [
        {"name": name if rank == 0 else f"{name}-{rank}", "containerPort": port + rank, "protocol": "TCP"}
        for rank in range(ranks)
        for name, port in served.items()
    ]


def _resources(context: ExperimentContext, role: Role) -> Manifest:
    """Return the administrator's resources, and the GPUs of the spec, which also sets the number of ranks in a pod."""
    resources = dict(context.settings.defaults_of(role.name).resources) or _default_resources(context, role)
    trainers = context.experiment.spec.trainers
    if role.name == TRAINER and trainers.gpus_per_pod:
        limits = resources.get("limits") or {}
        assert isinstance(limits, dict), "Kubernetes has no other"
        resources["limits"] = {**limits, trainers.gpu_resource: str(trainers.gpus_per_pod)}
    return resources


def _default_resources(context: ExperimentContext, role: Role) -> Manifest:
    """Return the settings' requests and limits of a role without those that the experiment's ``podTemplate`` names.

    Beside a default limit, a larger request of the template alone would be refused. A pod with replay stores requests
    their memory, too: they are mapped files, and draws wait for the disk where the node has no room to keep them. Nodes
    short of memory evict first the pods that use more than they request, mapped files included.
    """
    named = resources_in(template_of_role(context.experiment, role.name))
    ranks = context.experiment.spec.trainers.ranks_per_pod if role.name == TRAINER else 1
    amounts = {
        kind: {name: _times(quantity, ranks) for name, quantity in given.items() if name not in named}
        for kind, given in context.settings.resources.get(role.name, {}).items()
        if isinstance(given, dict)
    }
    stores = ranks * assumed_store_bytes(context.experiment.spec, role.name)
    if stores and "memory" in amounts.get("requests", {}):
        limit = amounts.get("limits", {}).get("memory")
        amounts["requests"]["memory"] = _with_bytes(amounts["requests"]["memory"], stores, at_most=limit)
    return {kind: given for kind, given in amounts.items() if given}


def _with_bytes(quantity: JsonValue, num_bytes: int, *, at_most: JsonValue) -> JsonValue:
    """Return a Kubernetes quantity with so many bytes more, or ``at_most`` if that is less and no null."""
    before, limit = amount_of(quantity), amount_of(at_most)
    if before is None:
        return quantity  # The API server says what is wrong with it.
    mebibytes = -(-(before + num_bytes) // _MEBIBYTE)
    return at_most if limit is not None and limit < mebibytes * _MEBIBYTE else f"{mebibytes}Mi"


def _times(quantity: JsonValue, factor: int) -> JsonValue:
    """Return a Kubernetes quantity such as ``512Mi``, multiplied."""
    found = re.match(r"[0-9.]+", str(quantity))
    if factor == 1 or found is None:
        return quantity
    return f"{Decimal(found[0]) * factor:f}{str(quantity)[found.end() :]}"


def _probes(role: Role) -> Manifest:
    """Return the probes. A trainer's launcher answers the liveness probe for all its ranks; a launcher that waits for
    the next attempt is not ready, and must not be restarted.

    A process that does not answer ignores SIGTERM as well, so it is killed soon after its liveness probe fails.
    """

    def get(path: str, port: str, **options: int) -> Manifest:
        return {"httpGet": {"path": path, "port": port, "scheme": "HTTP"}, "timeoutSeconds": 5, **options}

    health = "health" if role.name == TRAINER else "http"
    killed = {"terminationGracePeriodSeconds": FROZEN_GRACE_SECONDS}
    return {
        "readinessProbe": get("/readyz", "http", periodSeconds=2, failureThreshold=5, successThreshold=1),
        "startupProbe": get("/healthz", health, periodSeconds=1, failureThreshold=120, successThreshold=1),
        "livenessProbe": get("/healthz", health, periodSeconds=10, failureThreshold=3, successThreshold=1, **killed),
    }


def _volumes(context: ExperimentContext, role: Role) -> list[Manifest]:
    volumes: list[Manifest] = [
        {"name": "config", "configMap": {"name": context.config_name(role.name), "defaultMode": 0o444}},
        {"name": "token", "secret": {"secretName": context.token_name, "defaultMode": 0o440}},
        *([] if has_volumes(role, context.experiment.spec) else [{"name": STATE_VOLUME, "emptyDir": {}}]),
        {"name": "tmp", "emptyDir": {}},
    ]
    if (secret := _tls_secret(context)) is not None:
        # Keys are listed so that a Secret without one of them stops the pod early, not the worker's connections.
        items = [{"key": key, "path": key} for key in TLS_KEYS]
        volumes.append({"name": "tls", "secret": {"secretName": secret, "items": items, "defaultMode": 0o440}})
    if _source(context, role):
        # Once the first version is stored, pods start without it.
        secret_volume = {"secretName": context.source_secret_name, "defaultMode": 0o440, "optional": True}
        volumes.append({"name": SOURCE_VOLUME, "secret": secret_volume})
    if role.name == COORDINATOR:
        stays = context.experiment.spec.parameters.store.filesystem is not None
        claim = {"persistentVolumeClaim": {"claimName": context.name_of("data")}}
        volumes.append({"name": "data", **(claim if stays else {"emptyDir": {}})})
        volumes.append({"name": "settings", "configMap": {"name": context.settings_name, "defaultMode": 0o444}})
    return volumes


def _eviction_tolerations() -> list[Manifest]:
    return [
        {
            "key": f"node.kubernetes.io/{state}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": EVICTED_AFTER_SECONDS,
        }
        for state in ("not-ready", "unreachable")
    ]
