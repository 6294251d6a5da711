"""Derives the config of every role from one experiment and where it runs. Pure: it reads nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self, TypeVar

from rlsrl.api.placement import Placement
from rlsrl.api.resolved import (
    ActorConfig,
    CoordinatorConfig,
    RoleConfig,
    TrainerConfig,
)
from rlsrl.api.role_configs import ResolutionContext
from rlsrl.api.role_names import ACTOR, COORDINATOR, TRAINER
from rlsrl.api.roles import ROLES
from rlsrl.api.spec import ExperimentSpec, RLExperiment

RoleConfigT = TypeVar("RoleConfigT", bound=RoleConfig)


@dataclass(frozen=True, kw_only=True)
class ResolvedExperiment:
    """The configs of one experiment's roles."""

    configs: Mapping[str, RoleConfig]
    """By role, in the order of ``ROLES``. A role that the experiment does not have is absent."""
    warnings: tuple[str, ...] = ()
    """For the user."""

    @property
    def coordinator(self) -> CoordinatorConfig:
        """The coordinator's config."""
        return _of_type(self.configs[COORDINATOR], CoordinatorConfig)

    @property
    def trainer(self) -> TrainerConfig:
        """The trainers' config."""
        return _of_type(self.configs[TRAINER], TrainerConfig)

    @property
    def actor(self) -> ActorConfig:
        """The actors' config."""
        return _of_type(self.configs[ACTOR], ActorConfig)

    def to_json(self) -> str:
        """Return a JSON document that ``from_json`` reads."""
        configs = {role.name: self.configs.get(role.name) for role in ROLES}
        document = {
            **{name: None if config is None else json.loads(config.to_json()) for name, config in configs.items()},
            "num_actors": self.coordinator.num_actors,
            "warnings": self.warnings,
        }
        return json.dumps(document, indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read a document of ``to_json``.

        Raises:
            ValueError: the text is not such a document; a pydantic.ValidationError names every wrong field.
        """
        document = json.loads(text)
        if not isinstance(document, dict) or not {COORDINATOR, TRAINER, ACTOR} <= document.keys():
            raise ValueError(f"not an object with the configs of {COORDINATOR}, {TRAINER} and {ACTOR}")
        present = [role for role in ROLES if document.get(role.name) is not None]
        configs = {role.name: role.config.from_json(json.dumps(document[role.name])) for role in present}
        return cls(configs=configs, warnings=tuple(document.get("warnings", ())))


def resolve(experiment: RLExperiment, placement: Placement) -> ResolvedExperiment:
    """Return the config of each role of ``experiment`` when it runs at ``placement``.

    Without shared memory, or with ``transport: grpc``, samples travel over gRPC and weights through the coordinator.
    """
    spec = experiment.spec
    num_workers = {role.name: role.num_workers(spec) for role in ROLES}
    context = ResolutionContext(experiment=experiment, placement=placement, num_workers=num_workers)
    return ResolvedExperiment(
        configs={role.name: role.resolve(context) for role in ROLES if num_workers[role.name]},
        warnings=(*spec.actors.spread.warnings, *_unused_values(spec), *_evaluation_warnings(spec)),
    )


def _of_type(config: RoleConfig, kind: type[RoleConfigT]) -> RoleConfigT:
    assert isinstance(config, kind), "the table of roles says so"
    return config


def _unused_values(spec: ExperimentSpec) -> tuple[str, ...]:
    by_rank, total = spec.environment.kwargs_by_rank, spec.actors.num_environments
    return tuple(
        f"environment.kwargsByRank.cycle: {name!r} has {len(values)} values, and all actors together have {total} "
        f"environments: training uses the first {total} values"
        for name, values in ({} if by_rank is None else by_rank.cycle).items()
        if len(values) > total
    )


def _evaluation_warnings(spec: ExperimentSpec) -> tuple[str, ...]:
    evaluators = spec.evaluators
    if evaluators is None or (total := evaluators.spread.num_environments) == evaluators.environments:
        return ()
    each = evaluators.spread.num_per_worker
    asked = f"{evaluators.environments} environments do not divide evenly over {evaluators.replicas} evaluators"
    return (f"{asked}: each steps {each}, together {total}",)
