"""Builds an evaluation: for the evaluator and for ``rlsrl eval``. Imports torch only where a policy needs it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from rlsrl.api.resolved import EvaluatorConfig
from rlsrl.api.spec import Network, NetworkOutputs, WorkerEnvironment
from rlsrl.data.specs import EnvSpec, state_specs
from rlsrl.envs.episodes import EpisodeReports
from rlsrl.envs.factory import EnvironmentSource, make_environment
from rlsrl.envs.faults import EnvironmentFaults
from rlsrl.envs.place import EnvironmentPlace
from rlsrl.envs.threads import ThreadedVectorEnv
from rlsrl.envs.vector import LoopVectorEnv, VectorEnv
from rlsrl.parameters.layout import Shapes, difference, layout_digest, shapes_in
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.acting import LocalActor
from rlsrl.policies.exported import ExportedActor, LayoutMismatch
from rlsrl.policies.mlp_shapes import mlp_shapes
from rlsrl.runtime.call_board import CallBoard
from rlsrl.workers.build.common import environment_source, exported_actor, local_actor, torch_policy
from rlsrl.workers.evaluation import Evaluation, acting_noise, evaluation_seeds

if TYPE_CHECKING:
    from rlsrl.policies.torch_policy import TorchPolicy

ROLLOUT_STEPS = 64
"""Steps between two checks for the end. With more, environments would play longer than needed."""


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """How versions are played. All start from the same seeds, so that their results can be compared."""

    environment: WorkerEnvironment
    network: Network
    outputs: NetworkOutputs
    """Builds the policy if the version has no exported actor."""
    network_seed: int
    """The experiment's seed."""
    num_environments: int
    episodes_per_environment: int
    max_steps: int
    """Steps of each environment after which to give up."""
    seed: int
    """Seeds the environments and the drawing of actions."""
    greedy: bool
    evaluator: int = 0
    """The evaluator's index."""
    num_evaluators: int = 1
    """Evaluators with equal plans, each with environments of its own."""
    side_by_side: bool = False
    """Whether each environment steps in a thread of its own."""
    checks_network: bool = False
    """Whether a version may come from another run, whose network may be another one."""

    @property
    def ranks(self) -> range:
        """The ranks of the environments among those of all evaluators."""
        return range(self.evaluator * self.num_environments, (self.evaluator + 1) * self.num_environments)


def evaluator_plan(config: EvaluatorConfig, index: int) -> EvaluationPlan:
    """Return the plan of the evaluator with that config and index."""
    return EvaluationPlan(
        environment=config.environment,
        network=config.network,
        outputs=config.outputs,
        network_seed=config.seed,
        num_environments=config.environments,
        episodes_per_environment=config.episodes_per_environment,
        max_steps=config.max_steps_per_environment,
        seed=config.seed,
        greedy=config.greedy,
        evaluator=index,
        num_evaluators=config.num_evaluators,
        side_by_side=config.side_by_side,
        checks_network=config.parameters is not None,
    )


def begin_evaluation(
    plan: EvaluationPlan,
    parameters: Parameters,
    metadata: Mapping[str, Any],
    *,
    reports: EpisodeReports,
    log: structlog.stdlib.BoundLogger,
    board: CallBoard | None = None,
    still_wanted: Callable[[], bool] = lambda: True,
    on_wait: Callable[[int, str], None] = lambda *_: None,
) -> tuple[VectorEnv, Evaluation]:
    """Return the environments, which the caller closes, and the evaluation of a stored version with its metadata.

    ``reports`` chooses what episodes report. ``log`` gets the faults of the environments. ``board`` shows their calls
    to the call watch, if there is one. ``still_wanted`` is asked while an environment's server is away, and
    ``on_wait`` hears of it (``EnvironmentFaults``).

    Raises:
        ConfigurationError: the environment or the user's network cannot be made.
        EnvironmentFailed: the environment's own code raised another error when it was made.
        LayoutMismatch: the weights belong to another network, or to other observations or actions.
        WaitAbandoned: an environment's server is away, and the evaluation is no longer wanted.
    """
    faults = EnvironmentFaults(max_non_finite=plan.environment.max_non_finite, on_wait=on_wait, log=log)
    seeds = evaluation_seeds(plan.seed, plan.num_environments)
    make_envs = ThreadedVectorEnv if plan.side_by_side else LoopVectorEnv
    envs: VectorEnv = make_envs(
        lambda rank: make_environment(source_of(plan, rank, seeds)),
        seeds=seeds,
        first_rank=plan.ranks.start,
        faults=faults,
        board=board,
        reports=reports,
        still_wanted=still_wanted,
    )
    try:
        exported = exported_actor(metadata)
        if plan.checks_network:
            _require_same_network(plan, parameters, metadata, exported, envs.spec)
        actor = evaluating_actor(plan, exported, envs.spec, num_steps=ROLLOUT_STEPS, num_lanes=envs.num_envs)
        actor.load(parameters)
        return envs, Evaluation(
            actor,
            envs,
            num_steps=ROLLOUT_STEPS,
            episodes_per_environment=plan.episodes_per_environment,
            max_steps=plan.max_steps,
            episode_info=reports.keys,
            faults=faults,
            state=state_specs(plan.network.state_sizes),
        )
    except BaseException:
        envs.close()
        raise


def evaluating_actor(
    plan: EvaluationPlan, exported: ExportedActor | None, env_spec: EnvSpec, *, num_steps: int, num_lanes: int
) -> LocalActor:
    """Return the actor of a version with that exported actor, for slots of ``num_steps`` steps and ``num_lanes`` lanes.

    It has no weights yet.
    """
    return local_actor(
        exported,
        env_spec,
        make_policy=lambda: _torch_policy(plan, env_spec),
        num_steps=num_steps,
        num_lanes=num_lanes,
        rng=acting_noise(plan.seed),
        greedy=plan.greedy,
    )


def _require_same_network(
    plan: EvaluationPlan,
    parameters: Parameters,
    metadata: Mapping[str, Any],
    exported: ExportedActor | None,
    env_spec: EnvSpec,
) -> None:
    """Raise ``LayoutMismatch`` unless the weights are those of the experiment's network for these environments.

    A version's exported actor would play with any network whose actions fit.
    """
    shapes = _network_shapes(plan, env_spec)
    if parameters.layout != layout_digest(shapes):
        raise LayoutMismatch(
            f"version {parameters.version} has {parameters.vector.size:,} weights of another network than "
            f"the experiment's, which has {sum(map(math.prod, shapes.values())):,}{_difference(metadata, shapes)}"
        )
    if exported is None:
        return
    for what, of_version, of_environment in (
        ("observations", [*exported.observation.items()], [*env_spec.unmasked.observation.items()]),
        ("actions", exported.head.parts, env_spec.action.parts),
        ("action mask", exported.head.mask, env_spec.action.mask),
    ):
        if of_version != of_environment:
            raise LayoutMismatch(
                f"version {parameters.version} is of another environment: its {what}: {of_version}; here: "
                f"{of_environment}"
            )


def _network_shapes(plan: EvaluationPlan, env_spec: EnvSpec) -> Shapes:
    """Return the shapes of the network's parameters by name. Without torch where the network acts without."""
    if plan.network.acts_without_torch:
        return mlp_shapes(env_spec, plan.network, outputs=plan.outputs)
    return _torch_policy(plan, env_spec).layout.shapes


def _torch_policy(plan: EvaluationPlan, env_spec: EnvSpec) -> TorchPolicy:
    return torch_policy(plan.network, env_spec, outputs=plan.outputs, seed=plan.network_seed)


def _difference(metadata: Mapping[str, Any], shapes: Shapes) -> str:
    """Return how the version's network differs, for an error, if the version has its names and shapes."""
    found = shapes_in(metadata)
    return "" if found is None else f"; {difference(found, shapes) or 'they follow each other in another order'}"


def source_of(plan: EvaluationPlan, rank: int, seeds: Sequence[int]) -> EnvironmentSource:
    """Return how the environment of that rank is made. All evaluators have the same arguments, as they have the same
    seeds: so the results of versions can be compared."""
    local_rank = rank - plan.ranks.start
    place = EnvironmentPlace(
        purpose="evaluation",
        rank=rank,
        num_environments=plan.num_evaluators * plan.num_environments,
        worker=plan.evaluator,
        local_rank=local_rank,
        seed=seeds[local_rank],
    )
    return environment_source(plan.environment, rank=local_rank, place=place)
