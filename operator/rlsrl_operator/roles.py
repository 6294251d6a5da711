"""What the operator adds to the table of roles (``rlsrl.api.roles``), and which roles connect to which. Pure.

Manifests, NetworkPolicies and status derive from it. The connections follow from the roles' configs, which hold the
addresses that workers connect to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rlsrl.api import roles
from rlsrl.api.placement import COORDINATOR_PORT, STREAMS_PORT
from rlsrl.api.resolve import ResolvedExperiment
from rlsrl.api.resolved import RoleConfig
from rlsrl.api.role_names import COORDINATOR, TRAINER
from rlsrl.api.spec import RLExperiment

MASTER_PORT = 29500
"""The port of rank 0's pod at which torchrun's rendezvous listens."""

Image = Literal["actor", "learner"]
"""``learner`` has PyTorch."""


@dataclass(frozen=True, kw_only=True)
class PodRole:
    """A role of the table, with the Kubernetes objects that run it."""

    role: roles.Role
    workload: Literal["Deployment", "StatefulSet"]
    """The kind of object that makes its pods."""
    queued: bool
    """Whether its pods wait in the experiment's queue, if it names one. The other roles wait for them."""

    @property
    def name(self) -> str:
        """The role's name, also of its config's file."""
        return self.role.name

    @property
    def grace_seconds(self) -> int:
        """Seconds between SIGTERM and SIGKILL of its pods."""
        return self.role.grace_seconds

    def image(self, experiment: RLExperiment) -> Image:
        """Return the image that its pods run."""
        return "learner" if self.role.needs_torch(experiment.spec) else "actor"

    def pods(self, experiment: RLExperiment) -> int:
        """Return the number of its pods while the experiment runs."""
        return self.role.num_pods(experiment.spec)

    def config(self, configs: ResolvedExperiment) -> RoleConfig | None:
        """Return its config, or None if the experiment has no such role."""
        return configs.configs.get(self.name)


_STATEFUL_SETS = (COORDINATOR, TRAINER)
"""Roles whose pods keep their names, by which others find them. Pods of other roles are made by Deployments."""
ROLES: tuple[PodRole, ...] = tuple(
    PodRole(
        role=role,
        workload="StatefulSet" if role.name in _STATEFUL_SETS else "Deployment",
        queued=role.name == TRAINER,
    )
    for role in roles.ROLES
)
"""In the order in which they are started."""
BY_NAME: Mapping[str, PodRole] = {role.name: role for role in ROLES}
OBJECT_STORE_ROLES = tuple(role.name for role in roles.ROLES if role.reaches_object_store)
"""Roles whose pods read and write an object store."""


def roles_of(configs: ResolvedExperiment) -> tuple[PodRole, ...]:
    """Return the roles that the experiment has."""
    return tuple(role for role in ROLES if role.config(configs) is not None)


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
    for role in roles_of(configs):
        config = role.config(configs)
        assert config is not None, "the experiment has the role"
        if role.name != COORDINATOR:
            found.append(RoleConnection(role.name, COORDINATOR, (COORDINATOR_PORT,)))
        targets = {address.removeprefix("roster:").partition("/")[0] for address in config.connects_to}
        found += [RoleConnection(role.name, target, stream_ports.get(target, (STREAMS_PORT,))) for target in targets]
    if experiment.spec.trainers.num_pods > 1:
        found.append(RoleConnection(TRAINER, TRAINER, ()))
    return tuple(sorted(found))
