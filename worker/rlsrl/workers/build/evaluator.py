"""Builds an evaluation: for the evaluator and for ``rlsrl eval``. Imports torch only where a policy needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from rlsrl.api.resolved import EvaluatorConfig
from rlsrl.api.spec import Environment, Network
from rlsrl.envs.episodes import EpisodeReports
from rlsrl.envs.factory import EnvironmentSource, make_environment
from rlsrl.envs.faults import EnvironmentFaults
from rlsrl.envs.place import EnvironmentPlace
from rlsrl.envs.vector import LoopVectorEnv, VectorEnv
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.acting import LocalActor, PolicyActor
from rlsrl.policies.exported import ExportedActor
from rlsrl.policies.numpy_policy import NumpyActor
from rlsrl.runtime.call_board import CallBoard
from rlsrl.workers.build.common import environment_source, exported_actor, torch_policy
from rlsrl.workers.evaluation import Evaluation, acting_noise, evaluation_seeds

ROLLOUT_STEPS = 64
"""Steps between two checks for the end. With more, environments would play longer than needed."""


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """How versions are played. All start from the same seeds, so that their results can be compared."""

    environment: Environment
    network: Network
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

    @property
    def ranks(self) -> range:
        """The ranks of the environments among those of all evaluators."""
        return range(self.evaluator * self.num_environments, (self.evaluator + 1) * self.num_environments)


def evaluator_plan(config: EvaluatorConfig, index: int) -> EvaluationPlan:
    """Return the plan of the evaluator with that config and index."""
    return EvaluationPlan(
        environment=config.environment,
        network=config.network,
        network_seed=config.seed,
        num_environments=config.environments,
        episodes_per_environment=config.episodes_per_environment,
        max_steps=config.max_steps_per_environment,
        seed=config.seed,
        greedy=config.greedy,
        evaluator=index,
        num_evaluators=config.num_evaluators,
    )


def begin_evaluation(
    plan: EvaluationPlan,
    parameters: Parameters,
    metadata: Mapping[str, Any],
    *,
    reports: EpisodeReports,
    log: structlog.stdlib.BoundLogger,
    board: CallBoard | None = None,
) -> tuple[VectorEnv, Evaluation]:
    """Return the environments, which the caller closes, and the evaluation of a stored version with its metadata.

    ``reports`` chooses what episodes report. ``log`` gets the faults of the environments. ``board`` shows their calls
    to the call watch, if there is one.

    Raises:
        ConfigurationError: the environment or the user's network cannot be made.
        EnvironmentFailed: the environment's own code raised another error when it was made.
        LayoutMismatch: the weights belong to another network.
    """
    faults = EnvironmentFaults(max_non_finite=plan.environment.max_non_finite, log=log)
    seeds = evaluation_seeds(plan.seed, plan.num_environments)
    envs = LoopVectorEnv(
        lambda rank: make_environment(_source(plan, rank, seeds)),
        seeds=seeds,
        first_rank=plan.ranks.start,
        faults=faults,
        board=board,
        reports=reports,
    )
    try:
        actor = _local_actor(plan, exported_actor(metadata), envs)
        actor.load(parameters)
        return envs, Evaluation(
            actor,
            envs,
            num_steps=ROLLOUT_STEPS,
            episodes_per_environment=plan.episodes_per_environment,
            max_steps=plan.max_steps,
            episode_info=reports.keys,
            faults=faults,
        )
    except BaseException:
        envs.close()
        raise


def _source(plan: EvaluationPlan, rank: int, seeds: Sequence[int]) -> EnvironmentSource:
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


def _local_actor(plan: EvaluationPlan, exported: ExportedActor | None, envs: VectorEnv) -> LocalActor:
    """Return an actor without torch if the version has an exported form: importing torch takes a second."""
    rng = acting_noise(plan.seed)
    shape = {"num_steps": ROLLOUT_STEPS, "num_lanes": envs.num_envs}
    if exported is not None:
        return NumpyActor(exported, rng=rng, greedy=plan.greedy, **shape)
    policy = torch_policy(plan.network, envs.spec, seed=plan.network_seed)
    return PolicyActor(policy, envs.spec, rng=rng, greedy=plan.greedy, **shape)
