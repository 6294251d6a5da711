"""From one experiment and where it runs to the config of each role. Pure: it reads nothing else."""

from __future__ import annotations

from typing import TypedDict

from rlsrl.api.placement import Placement
from rlsrl.api.resolved import (
    ActorConfig,
    BufferConfig,
    CoordinatorConfig,
    EvaluatorConfig,
    ParameterStoreConfig,
    PolicyWorkerConfig,
    ResolvedExperiment,
    TrainerConfig,
)
from rlsrl.api.spec import CompileMode, ExperimentSpec, RLExperiment

POLICY_NAME = "default"
"""The one policy's name in the parameter DB."""
SLOTS_PER_GROUP = 2
"""Slots of an actor for each group of environments: one is filled while the one before is trained on."""
MAX_SLOTS_PER_PRODUCER = 64
"""What a stream takes of one producer; more rollouts of a buffer worker's actors wait in their own slots."""
HEARTBEAT_SECONDS = 1.0
LEASE_SECONDS = 10.0
"""Ten missed heartbeats: a machine that is only busy does not lose its index."""
PEER_TIMEOUT_SECONDS = 60.0
"""Longer than one step of a slow environment takes, since a holder of a slot gives a sign of life once a step."""


class _Common(TypedDict):
    experiment: str
    run_uid: str
    seed: int
    coordinator_address: str
    heartbeat_seconds: float
    metrics_address: str
    log_folder: str | None
    ledger_folder: str


def resolve(experiment: RLExperiment, placement: Placement) -> ResolvedExperiment:
    """What each role is told of ``experiment`` when it runs at ``placement``.

    Where no memory is shared, or with ``transport: grpc``, samples go by gRPC and weights by way of the coordinator.
    """
    spec = experiment.spec
    spread = spec.actors.spread
    shared = spec.transport == "auto" and placement.parameters_endpoint is not None
    parameters_endpoint = placement.parameters_endpoint if shared else None
    num_buffer_workers = 0 if spec.buffer_workers is None else spec.buffer_workers.replicas
    num_policy_workers = 0 if spec.policy_workers is None else spec.policy_workers.replicas
    samples_endpoints, buffer_endpoints = (
        tuple(placement.samples_endpoint(role, index, shared=shared) for index in range(number))
        for role, number in (("trainer", spec.trainers.replicas), ("buffer", num_buffer_workers))
    )
    inference_endpoints = tuple(map(placement.inference_endpoint, range(num_policy_workers)))
    slots_per_actor = SLOTS_PER_GROUP * spec.actors.ring_size
    actors_per_producer = spread.num_workers // num_buffer_workers if num_buffer_workers else 1
    reached_store = placement.reached_store(experiment)
    common = _Common(
        experiment=experiment.metadata.name,
        run_uid=placement.run_uid,
        seed=spec.seed,
        coordinator_address=placement.coordinator_address,
        heartbeat_seconds=HEARTBEAT_SECONDS,
        metrics_address=placement.http_address,
        log_folder=placement.log_folder,
        ledger_folder=placement.ledger_folder,
    )
    return ResolvedExperiment(
        coordinator=CoordinatorConfig(
            **common,
            serves_at=placement.coordinator_serves_at,
            http_address=placement.http_address,
            lease_seconds=LEASE_SECONDS,
            roster_path=placement.roster_path(experiment),
            record_folder=placement.record_folder,
            settings_path=placement.settings_path,
            wandb=spec.tracking.wandb,
            parameter_store=placement.parameter_store(experiment),
            num_actors=spread.num_workers,
            num_trainers=len(samples_endpoints),
            num_policy_workers=num_policy_workers,
            num_buffer_workers=num_buffer_workers,
            num_evaluators=0 if spec.evaluators is None else spec.evaluators.replicas,
        ),
        trainer=TrainerConfig(
            **common,
            serves_at=placement.streams_serve_at,
            environment=spec.environment,
            network=spec.policy.network,
            normalize_observations=spec.policy.normalize_observations,
            algorithm=spec.algorithm.chosen,
            rollout_length=spec.actors.rollout_length,
            batch_lanes=spec.batch_environments,
            max_policy_lag=spec.pacing.max_policy_lag,
            compile=_compile_mode(spec),
            device=spec.trainers.device,
            num_producers=num_buffer_workers or spread.num_workers,
            slots_per_producer=min(slots_per_actor * actors_per_producer, MAX_SLOTS_PER_PRODUCER),
            samples_endpoints=samples_endpoints,
            parameters_endpoint=parameters_endpoint,
            publishes_live=parameters_endpoint is None,
            peer_timeout_seconds=PEER_TIMEOUT_SECONDS,
            policy_name=POLICY_NAME,
            parameter_store=reached_store,
            versions=spec.parameters,
            stop=spec.stop,
        ),
        actor=ActorConfig(
            **common,
            environment=spec.environment,
            network=spec.policy.network,
            num_actors=None if spec.actors.environments is None else spread.num_workers,
            environments=spec.actors.environments,
            environments_per_actor=spec.actors.environments_per_actor,
            rollout_length=spec.actors.rollout_length,
            samples_endpoints=samples_endpoints,
            buffer_endpoints=buffer_endpoints,
            parameters_endpoint=parameters_endpoint,
            inference_endpoints=inference_endpoints,
            max_decorrelation_steps=spec.actors.max_decorrelation_steps,
            vectorization=spec.actors.vectorization,
            ring_size=spec.actors.ring_size,
            policy_name=POLICY_NAME,
            return_discount=spec.algorithm.chosen.discount if spec.algorithm.chosen.normalize_rewards else None,
        ),
        policy=None
        if spec.policy_workers is None
        else PolicyWorkerConfig(
            **common,
            serves_at=placement.streams_serve_at,
            environment=spec.environment,
            network=spec.policy.network,
            inference_endpoints=inference_endpoints,
            max_batch_size=spec.policy_workers.max_batch_size,
            parameter_pull_seconds=spec.policy_workers.parameter_pull_seconds,
            device=spec.policy_workers.device,
            parameters_endpoint=parameters_endpoint,
            policy_name=POLICY_NAME,
        ),
        buffer=None
        if not buffer_endpoints
        else BufferConfig(
            **common,
            serves_at=placement.streams_serve_at,
            environment=spec.environment,
            rollout_length=spec.actors.rollout_length,
            lanes_per_slot=max(spec.actors.rollout_environments),
            has_discounted_return=spec.algorithm.chosen.normalize_rewards,
            num_actors=actors_per_producer,
            slots_per_actor=slots_per_actor,
            buffer_endpoints=buffer_endpoints,
            samples_endpoints=samples_endpoints,
            peer_timeout_seconds=PEER_TIMEOUT_SECONDS,
        ),
        evaluator=_evaluator(spec, common, reached_store),
        num_actors=spread.num_workers,
        warnings=(*spread.warnings, *_evaluation_warnings(spec)),
    )


def _compile_mode(spec: ExperimentSpec) -> CompileMode:
    """What repeats bit for bit may not depend on when a compiler was done."""
    repeats = spec.pacing.max_policy_lag == 0
    return "off" if repeats and spec.trainers.compile == "background" else spec.trainers.compile


def _evaluator(spec: ExperimentSpec, common: _Common, parameter_store: ParameterStoreConfig) -> EvaluatorConfig | None:
    evaluators = spec.evaluators
    if evaluators is None:
        return None
    spread = evaluators.spread
    return EvaluatorConfig(
        **common,
        environment=spec.environment,
        network=spec.policy.network,
        num_evaluators=evaluators.replicas,
        environments=spread.num_per_worker,
        episodes_per_environment=evaluators.episodes_per_environment,
        max_steps_per_environment=spread.max_steps_per_environment,
        every_seconds=evaluators.every_seconds,
        every_versions=evaluators.every_versions,
        greedy=evaluators.greedy,
        policy_name=POLICY_NAME,
        parameter_store=parameter_store,
    )


def _evaluation_warnings(spec: ExperimentSpec) -> tuple[str, ...]:
    evaluators = spec.evaluators
    if evaluators is None or (total := evaluators.spread.num_environments) == evaluators.environments:
        return ()
    each = evaluators.spread.num_per_worker
    asked = f"{evaluators.environments} environments do not divide evenly over {evaluators.replicas} evaluators"
    return (f"{asked}: each steps {each}, together {total}",)
