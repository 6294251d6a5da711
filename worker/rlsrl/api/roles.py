"""The table of roles: what processes and pods of each role need. Pure.

The coordinator, ``rlsrl run``, ``python -m rlsrl.workers`` and the operator read this table.

To add a role, write

- a name in ``rlsrl.api.role_names``, a config class in ``rlsrl.api.resolved``, the function that fills it in
  ``rlsrl.api.role_configs``, and an entry here;
- the worker in ``rlsrl.workers``, and the function that builds its parts in ``rlsrl.workers.build``.

Such a role starts, joins and runs. Depending on the role, also write

- its section in ``rlsrl.api.spec.ExperimentSpec``, if users configure it;
- its name in ``rlsrl.runtime.ledger.balance.CHAIN``, if slots pass it;
- its name in ``rlsrl.api.spec.run.PausedWorkers``, if it can be paused: a unit test compares it with this table;
- its name in the ``roles`` of each metric that it sets, and its own metrics, in ``rlsrl.runtime.metrics``: a unit test
  finds a role without metrics;
- the allowed cost of its death in ``rlsrl.testing.chaos.KILLED_ROLES``: a unit test compares that table with this one;
- if ``rlsrl size`` must know its speed: its workers in ``rlsrl.sizing.workload``, its costs in ``costs`` and ``work``,
  its demand in ``demands``, its messages and bytes in ``traffic``. A unit test names the roles without a speed.

Pods, Services and NetworkPolicies follow from the entry and from the addresses in the config; ``rlsrl_operator.roles``
names the roles that need a StatefulSet. ``tests/integration/test_toy_role.py`` adds a role.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rlsrl.api.placement import COORDINATOR_PORT, STREAMS_PORT
from rlsrl.api.resolved import (
    ActorConfig,
    BufferConfig,
    CoordinatorConfig,
    EvaluatorConfig,
    PolicyWorkerConfig,
    RoleConfig,
    TrainerConfig,
)
from rlsrl.api.role_configs import (
    ResolutionContext,
    actor_config,
    buffer_config,
    coordinator_config,
    evaluator_config,
    policy_worker_config,
    trainer_config,
)
from rlsrl.api.role_names import ACTOR, BUFFER, COORDINATOR, EVALUATOR, POLICY, TRAINER
from rlsrl.api.spec import ExperimentSpec

STREAMS = "streams"
"""The name of the endpoint, and of the pod's port, where a worker serves samples or inference to other workers."""


@dataclass(frozen=True, kw_only=True)
class ServedPort:
    """The port at which a role's pods serve gRPC."""

    name: str
    number: int
    """The first rank's port; the further ranks of a pod use the following ones."""


def _if_the_network_needs_it(spec: ExperimentSpec) -> bool:
    return not spec.policy.network.acts_without_torch


@dataclass(frozen=True, kw_only=True)
class Role:
    """One kind of worker."""

    name: str
    section: str | None = None
    """The attribute of ``ExperimentSpec`` with the role's ``replicas`` and ``pod_template``. If an experiment has None
    there, it has no such role. Without a section every experiment has the role."""
    count: Callable[[ExperimentSpec], int] | None = None
    """The number of workers of an experiment that has the role. By default the ``replicas`` of its section, else 1."""
    config: type[RoleConfig]
    """The class of the role's resolved config."""
    resolve: Callable[[ResolutionContext], RoleConfig]
    """Derives the role's config, for an experiment that has the role."""
    worker: str
    """The worker's class as ``module:Class``. Only the role's own processes import it."""
    port: ServedPort | None = None
    """The port where other workers connect; None for a role to which nobody connects."""
    needs_torch: Callable[[ExperimentSpec], bool] = lambda _: False
    """Whether its pods run the learner image, which has PyTorch, rather than the actor image."""
    pods: Callable[[ExperimentSpec], int] | None = None
    """The number of pods, if it is not the number of workers."""
    grace_seconds: int = 10
    """Seconds between SIGTERM and SIGKILL of its pods. An environment or an evaluation that takes longer is lost."""
    reaches_object_store: bool = False
    """Whether its pods read and write the experiment's object store, and so get its credentials."""
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Environment variables of its processes, beside those of every worker (``rlsrl.api.process_environment``)."""

    @property
    def makes_environment(self) -> bool:
        """Whether its workers make the experiment's environment: to step it, or to learn its spaces."""
        return "environment" in self.config.model_fields

    def num_workers(self, spec: ExperimentSpec) -> int:
        """Return the number of workers that the experiment asks for; 0 if it has no such role."""
        section = None if self.section is None else getattr(spec, self.section)
        if self.section is not None and section is None:
            return 0
        if self.count is not None:
            return self.count(spec)
        return 1 if section is None else int(section.replicas)

    def num_pods(self, spec: ExperimentSpec) -> int:
        """Return the number of pods that the experiment asks for; 0 if it has no such role."""
        return self.num_workers(spec) if self.pods is None else self.pods(spec)


ROLES: tuple[Role, ...] = (
    Role(
        name=COORDINATOR,
        config=CoordinatorConfig,
        resolve=coordinator_config,
        worker="rlsrl.workers.coordinator:CoordinatorWorker",
        port=ServedPort(name=COORDINATOR, number=COORDINATOR_PORT),
        grace_seconds=30,  # A coordinator serves the trainers that exit, then stores its own records.
        reaches_object_store=True,
    ),
    Role(
        name=TRAINER,
        section="trainers",
        config=TrainerConfig,
        resolve=trainer_config,
        worker="rlsrl.workers.trainer:TrainerWorker",
        port=ServedPort(name=STREAMS, number=STREAMS_PORT),
        needs_torch=lambda _: True,
        pods=lambda spec: spec.trainers.num_pods,
        grace_seconds=60,  # A trainer stores its last checkpoint.
        reaches_object_store=True,
    ),
    Role(
        name=BUFFER,
        section="buffer_workers",
        config=BufferConfig,
        resolve=buffer_config,
        worker="rlsrl.workers.buffer:BufferWorker",
        port=ServedPort(name=STREAMS, number=STREAMS_PORT),
        grace_seconds=60,  # A shard of a replay store waits until its disk has all of it.
    ),
    Role(
        name=POLICY,
        section="policy_workers",
        config=PolicyWorkerConfig,
        resolve=policy_worker_config,
        worker="rlsrl.workers.policy:PolicyWorker",
        port=ServedPort(name=STREAMS, number=STREAMS_PORT),
        needs_torch=_if_the_network_needs_it,
    ),
    Role(
        name=ACTOR,
        section="actors",
        count=lambda spec: spec.actors.spread.num_workers,  # Fewer than the replicas if there are fewer environments.
        config=ActorConfig,
        resolve=actor_config,
        worker="rlsrl.workers.actor:ActorWorker",
        needs_torch=lambda spec: spec.policy_workers is None and _if_the_network_needs_it(spec),
        # Each message wakes only the thread that waits for it. By default it wakes any waiting thread, which passes it
        # on (0035). The price is one look at every connection per message, and an actor has few connections.
        environment={"GRPC_POLL_STRATEGY": "poll"},
    ),
    Role(
        name=EVALUATOR,
        section="evaluators",
        config=EvaluatorConfig,
        resolve=evaluator_config,
        worker="rlsrl.workers.evaluator:EvaluatorWorker",
        needs_torch=_if_the_network_needs_it,
        reaches_object_store=True,
    ),
)
"""In the order in which they are started."""


def role_named(name: str) -> Role:
    """Return the role with that name. Raises KeyError if there is none."""
    for role in ROLES:
        if role.name == name:
            return role
    raise KeyError(name)
