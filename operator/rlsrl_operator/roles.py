"""What the operator adds to the table of roles (``rlsrl.api.roles``), and which roles connect to which. Pure.

Manifests, NetworkPolicies and status derive from it. The connections follow from the roles' configs, which hold the
addresses that workers connect to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlsrl.api.placement import COORDINATOR_PORT, STREAMS_PORT
from rlsrl.api.resolve import ResolvedExperiment
from rlsrl.api.role_names import BUFFER, COORDINATOR, TRAINER
from rlsrl.api.roles import ROLES, Role
from rlsrl.api.spec import ExperimentSpec, RLExperiment

MASTER_PORT = 29500
"""The port of rank 0's pod at which torchrun's rendezvous listens."""

_STATEFUL_SETS = (COORDINATOR, TRAINER)
"""Roles whose pods keep their names, by which others find them."""


def workload_of(role: Role, spec: ExperimentSpec) -> Literal["Deployment", "StatefulSet"]:
    """Return the kind of object that makes the role's pods. No edit changes it."""
    return "StatefulSet" if role.name in _STATEFUL_SETS or has_volumes(role, spec) else "Deployment"


def has_volumes(role: Role, spec: ExperimentSpec) -> bool:
    """Return whether each pod of the role has a volume of its own, with what its worker keeps."""
    return role.name == BUFFER and spec.keeps_in_buffers


def has_pod_index(role: Role, spec: ExperimentSpec) -> bool:
    """Return whether the index of a pod decides on the indices of its workers."""
    return role.name == TRAINER or has_volumes(role, spec)


def is_queued(role: Role) -> bool:
    """Return whether the role's pods wait in the experiment's queue, if it names one. Other roles wait for them."""
    return role.name == TRAINER


def roles_of(configs: ResolvedExperiment) -> tuple[Role, ...]:
    """Return the roles that the experiment has, in the order in which they are started."""
    return tuple(role for role in ROLES if role.name in configs.configs)


@dataclass(frozen=True, order=True)
class RoleConnection:
    """Pods of one role connect to pods of another."""

    source: str
    target: str
    ports: tuple[int, ...]
    """Empty: any port."""


def connections(experiment: RLExperiment, configs: ResolvedExperiment) -> tuple[RoleConnection, ...]:
    """Return which roles of the experiment connect to which.

    Trainer ranks on several pods reduce gradients over ports that the kernel chooses: any port, among trainers alone.
    """
    stream_ports = {TRAINER: tuple(STREAMS_PORT + rank for rank in range(experiment.spec.trainers.ranks_per_pod))}
    found = []
    for role, config in configs.configs.items():
        if role != COORDINATOR:
            found.append(RoleConnection(role, COORDINATOR, (COORDINATOR_PORT,)))
        targets = {address.removeprefix("roster:").partition("/")[0] for address in config.connects_to}
        found += [RoleConnection(role, target, stream_ports.get(target, (STREAMS_PORT,))) for target in targets]
    if experiment.spec.trainers.num_pods > 1:
        found.append(RoleConnection(TRAINER, TRAINER, ()))
    return tuple(sorted(found))
