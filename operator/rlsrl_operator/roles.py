"""The operator's facts of each role: its workload, image, pods and network connections. Pure.

Manifests, NetworkPolicies and status derive from this table. The connections derive from each role's config, which
names the roles that its workers look up in the roster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from rlsrl.api.placement import COORDINATOR_PORT, STREAMS_PORT
from rlsrl.api.resolved import ResolvedExperiment, RoleConfig
from rlsrl.api.spec import RLExperiment

COORDINATOR = "coordinator"
TRAINER = "trainer"
ACTOR = "actor"
EVALUATOR = "evaluator"

MASTER_PORT = 29500
"""The port in rank 0's pod where the ranks of a gang meet."""
GRACE_SECONDS = {COORDINATOR: 30, TRAINER: 60}
"""The grace period of a role's pods; the trainers store a last checkpoint in it."""
DEFAULT_GRACE_SECONDS = 30


Image = Literal["actor", "learner"]
"""``learner`` includes torch."""


def _acting_image(experiment: RLExperiment) -> Image:
    """Return the image of a role that evaluates the policy. Only an exported policy needs no torch."""
    return "actor" if experiment.spec.policy.network.mlp is not None else "learner"


@dataclass(frozen=True, kw_only=True)
class Role:
    """What the operator needs to know of one role."""

    name: str
    """The role's name, and the name of its config file."""
    image: Callable[[RLExperiment], Image]
    """The image of its pods."""
    workload: Literal["Deployment", "StatefulSet"]
    """The kind of the object that creates its pods."""
    config: Callable[[ResolvedExperiment], RoleConfig | None]
    """The config of its workers; None if the experiment does not have the role."""
    pods: Callable[[RLExperiment, ResolvedExperiment], int]
    """The number of its pods while the experiment runs."""
    queued: bool = False
    """Whether its pods wait in the experiment's queue, if it has one. The other roles wait for these pods."""

    @property
    def grace_seconds(self) -> int:
        """The grace period of its pods."""
        return GRACE_SECONDS.get(self.name, DEFAULT_GRACE_SECONDS)


ROLES: tuple[Role, ...] = (
    Role(
        name=COORDINATOR,
        image=lambda _: "actor",
        workload="StatefulSet",
        config=lambda configs: configs.coordinator,
        pods=lambda _, __: 1,
    ),
    Role(
        name=TRAINER,
        image=lambda _: "learner",
        workload="StatefulSet",
        config=lambda configs: configs.trainer,
        pods=lambda experiment, _: experiment.spec.trainers.num_pods,
        queued=True,
    ),
    Role(
        name="buffer",
        image=lambda _: "actor",
        workload="Deployment",
        config=lambda configs: configs.buffer,
        pods=lambda _, configs: configs.coordinator.num_buffer_workers,
    ),
    Role(
        name="policy",
        image=_acting_image,
        workload="Deployment",
        config=lambda configs: configs.policy,
        pods=lambda _, configs: configs.coordinator.num_policy_workers,
    ),
    Role(
        name=ACTOR,
        image=lambda experiment: "actor" if experiment.spec.policy_workers is not None else _acting_image(experiment),
        workload="Deployment",
        config=lambda configs: configs.actor,
        pods=lambda _, configs: configs.num_actors,
    ),
    Role(
        name=EVALUATOR,
        image=_acting_image,
        workload="Deployment",
        config=lambda configs: configs.evaluator,
        pods=lambda _, configs: configs.coordinator.num_evaluators,
    ),
)
"""In the order in which they start."""
BY_NAME: Mapping[str, Role] = {role.name: role for role in ROLES}


def roles_of(configs: ResolvedExperiment) -> tuple[Role, ...]:
    """Return the roles that the experiment has."""
    return tuple(role for role in ROLES if role.config(configs) is not None)


@dataclass(frozen=True, order=True)
class RoleConnection:
    """Pods of the role ``source`` connect to pods of the role ``target``."""

    source: str
    target: str
    ports: tuple[int, ...]
    """Empty: every port."""


def connections(experiment: RLExperiment, configs: ResolvedExperiment) -> tuple[RoleConnection, ...]:
    """Return the connections between the experiment's own pods.

    Ranks on several pods reduce gradients over ports that the kernel chooses, so trainers reach each other on any port.
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
