"""The one table of roles: which object runs each, from which image, and who connects to whom. Pure.

Manifests, NetworkPolicies and status derive from it. Who connects to whom is not written here a second time: a role's
config says whom its workers look up in the roster.
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
"""Where rank 0's pod lets the gang meet."""
GRACE_SECONDS = {COORDINATOR: 30, TRAINER: 60}
"""How long a role's pods may take to end; the trainers store a last checkpoint."""
DEFAULT_GRACE_SECONDS = 30


Image = Literal["actor", "learner"]
"""``learner`` has torch."""


def _acting_image(experiment: RLExperiment) -> Image:
    """Whoever evaluates the policy needs torch, unless the policy exports an actor that does without it."""
    return "actor" if experiment.spec.policy.network.mlp is not None else "learner"


@dataclass(frozen=True, kw_only=True)
class Role:
    """A part that pods play."""

    name: str
    """Also the name of its config's file."""
    image: Callable[[RLExperiment], Image]
    """Which image its pods run."""
    workload: Literal["Deployment", "StatefulSet"]
    """What makes its pods."""
    config: Callable[[ResolvedExperiment], RoleConfig | None]
    """What its workers are configs; None where the experiment has no such role."""
    pods: Callable[[RLExperiment, ResolvedExperiment], int]
    """How many pods there should be while the experiment runs."""
    queued: bool = False
    """Whether its pods wait in the queue that the experiment names, if it names one; the others wait for them."""

    @property
    def grace_seconds(self) -> int:
        """How long its pods may take to end."""
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
"""In the order in which they are started."""
BY_NAME: Mapping[str, Role] = {role.name: role for role in ROLES}


def roles_of(configs: ResolvedExperiment) -> tuple[Role, ...]:
    """The roles that the experiment has."""
    return tuple(role for role in ROLES if role.config(configs) is not None)


@dataclass(frozen=True, order=True)
class RoleConnection:
    """Pods of one role open connections to pods of another."""

    source: str
    target: str
    ports: tuple[int, ...]
    """Empty: any port."""


def connections(experiment: RLExperiment, configs: ResolvedExperiment) -> tuple[RoleConnection, ...]:
    """Who connects to whom among the experiment's own pods.

    Ranks on several pods reduce gradients between ports that the kernel chooses: any port, among trainers alone.
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
