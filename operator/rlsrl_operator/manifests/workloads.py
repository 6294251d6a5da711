"""The Deployments and StatefulSets of the roles, the Services, and the volume claim."""

from __future__ import annotations

from rlsrl.api.placement import COORDINATOR_PORT, HTTP_PORT
from rlsrl.api.role_names import ACTOR, BUFFER, COORDINATOR, EVALUATOR, TRAINER
from rlsrl.api.roles import Role
from rlsrl.api.spec import FilesystemStore, ReplayVolume
from rlsrl_operator.manifests.context import ExperimentContext
from rlsrl_operator.manifests.pods import STATE_VOLUME, pod_template
from rlsrl_operator.manifests.types import Manifest
from rlsrl_operator.roles import has_volumes, is_queued, roles_of, workload_of


def workloads(context: ExperimentContext) -> list[Manifest]:
    """Return one workload for each role. ``lifecycle.for_phase`` adds the trainers' attempt."""
    return [
        (_deployment if workload_of(role, context.experiment.spec) == "Deployment" else _stateful_set)(context, role)
        for role in roles_of(context.configs)
    ]


def services(context: ExperimentContext) -> list[Manifest]:
    """Return the Services: the coordinator's address, and the DNS names of the trainers' pods."""
    ports = [("coordinator", COORDINATOR_PORT), ("http", HTTP_PORT)]
    coordinator = {
        "type": "ClusterIP",
        "ports": [{"name": name, "port": port, "targetPort": name, "protocol": "TCP"} for name, port in ports],
    }
    # Ranks connect to each other before they are ready.
    trainers = {"clusterIP": "None", "publishNotReadyAddresses": True}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": context.metadata(context.name_of(role), role),
            "spec": {"selector": context.selector(role), **spec},
        }
        for role, spec in ((COORDINATOR, coordinator), (TRAINER, trainers))
    ]


def volume_claim(context: ExperimentContext) -> Manifest | None:
    """Return the claim of the experiment's volume, or None if an object store holds the weights.

    The claim outlives the experiment, unless ``whenDeleted`` is Delete.
    """
    volume = context.experiment.spec.parameters.store.filesystem
    if volume is None:
        return None
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": context.metadata(context.name_of("data"), owned=volume.when_deleted == "Delete"),
        "spec": _claim_spec(volume),
    }


def _claim_spec(volume: FilesystemStore | ReplayVolume) -> Manifest:
    return {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": volume.size}},
        **({} if volume.storage_class_name is None else {"storageClassName": volume.storage_class_name}),
    }


def _deployment(context: ExperimentContext, role: Role) -> Manifest:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": context.metadata(context.name_of(role.name), role.name),
        "spec": {
            "replicas": role.num_pods(context.experiment.spec),
            "selector": {"matchLabels": context.selector(role.name)},
            "strategy": _strategy(context, role),
            "revisionHistoryLimit": 2,
            "template": pod_template(context, role),
        },
    }


def _strategy(context: ExperimentContext, role: Role) -> Manifest:
    """Return how the pods of a role are replaced."""
    if role.name in (ACTOR, EVALUATOR) and context.experiment.spec.environment.depends_on_rank:
        # An edit may move ranks to other workers: two environments of one rank must not exist at the same time.
        return {"type": "Recreate"}
    # A worker's index is free only after the pod that holds it is gone.
    return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "25%"}}


def _stateful_set(context: ExperimentContext, role: Role) -> Manifest:
    metadata = context.metadata(context.name_of(role.name), role.name)
    if is_queued(role):
        metadata["labels"] |= context.queue_labels
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata,
        "spec": {
            "replicas": role.num_pods(context.experiment.spec),
            # Kubernetes needs a name. Only the coordinator's and the trainers' Service exists: see ``services``.
            "serviceName": context.name_of(role.name),
            "selector": {"matchLabels": context.selector(role.name)},
            # All pods of a gang start together: one that waited for its predecessor to be ready would wait for ever.
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete" if role.name == TRAINER else "RollingUpdate"},
            "revisionHistoryLimit": 2,
            "template": pod_template(context, role),
            **(_own_volumes(context, role) if has_volumes(role, context.experiment.spec) else {}),
        },
    }


def shard_claims(context: ExperimentContext) -> tuple[str, ...]:
    """Return the names of the claims that Kubernetes makes for buffer workers with a volume each, by index."""
    spec = context.experiment.spec
    num_workers = 0 if spec.buffer_workers is None or not spec.keeps_in_buffers else spec.buffer_workers.replicas
    return tuple(f"{STATE_VOLUME}-{context.name_of(BUFFER)}-{index}" for index in range(num_workers))


def _own_volumes(context: ExperimentContext, role: Role) -> Manifest:
    """Return the part of a StatefulSet that makes a claim for each pod, for its volume ``state``.

    Claims stay when pods end: a suspended experiment, or one that waits in its queue, goes on with what they hold.
    """
    workers = context.experiment.spec.buffer_workers
    assert workers is not None, "the role's section"
    volume = workers.replay_volume
    metadata = {"name": STATE_VOLUME, "labels": context.labels(role.name)}
    return {
        "volumeClaimTemplates": [{"metadata": metadata, "spec": _claim_spec(volume)}],
        "persistentVolumeClaimRetentionPolicy": {"whenDeleted": volume.when_deleted, "whenScaled": "Retain"},
    }
