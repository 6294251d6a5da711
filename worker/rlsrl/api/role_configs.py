"""Derives the config of each role from an experiment and where it runs: one function a role. Pure.

``rlsrl.api.roles`` names the function of each role; ``rlsrl.api.resolve`` calls them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlsrl.api.placement import Placement
from rlsrl.api.resolved import (
    ActorConfig,
    BufferConfig,
    CoordinatorConfig,
    EvaluatorConfig,
    PolicyWorkerConfig,
    ReplayConfig,
    ShardConfig,
    TrainerConfig,
)
from rlsrl.api.role_names import ACTOR, BUFFER, COORDINATOR, POLICY, TRAINER
from rlsrl.api.spec import CompileMode, ExperimentSpec, RLExperiment, WorkerEnvironment

POLICY_NAME = "default"
"""The one policy's name in the parameter DB."""
SLOTS_PER_GROUP = 2
"""Slots of an actor for each group of environments: one is filled while the one before is trained on."""
MAX_SLOTS_PER_PRODUCER = 64
"""The largest number of slots that a stream takes from one producer. Further rollouts of a buffer worker's actors wait
in the actors' own slots."""
HEARTBEAT_SECONDS = 1.0
LEASE_SECONDS = 10.0
"""Ten missed heartbeats: a machine that is only busy does not lose its index."""
PEER_TIMEOUT_SECONDS = 60.0
"""Longer than one step of a slow environment, because the holder of a slot shows that it is alive once a step."""


@dataclass(frozen=True, kw_only=True)
class ResolutionContext:
    """An experiment, where it runs, and what more than one role's config needs of both."""

    experiment: RLExperiment
    placement: Placement
    num_workers: Mapping[str, int]
    """The number of workers of every role; 0 for a role that the experiment does not have."""

    @property
    def spec(self) -> ExperimentSpec:
        """The experiment's spec."""
        return self.experiment.spec

    @cached_property
    def common(self) -> dict[str, Any]:
        """The fields of ``RoleConfig`` that are the same for every role."""
        return {
            "experiment": self.experiment.metadata.name,
            "run_uid": self.placement.run_uid,
            "seed": self.spec.seed,
            "coordinator_address": self.placement.coordinator_address,
            "heartbeat_seconds": HEARTBEAT_SECONDS,
            "metrics_address": self.placement.http_address,
            "log_folder": self.placement.log_folder,
            "ledger_folder": self.placement.ledger_folder,
        }

    @cached_property
    def environment(self) -> WorkerEnvironment:
        """The environment as workers get it."""
        return self.spec.worker_environment

    @property
    def parameters_endpoint(self) -> str | None:
        """The shared memory that weights travel through; None: they travel over gRPC, through the coordinator."""
        return None if self.spec.transport == "grpc" else self.placement.parameters_endpoint

    @cached_property
    def samples_endpoints(self) -> tuple[str, ...]:
        """Where each trainer rank takes samples. Shards of a replay store speak gRPC on one machine, too."""
        return self._endpoints(TRAINER, shared=self.parameters_endpoint is not None and not self.spec.keeps_in_buffers)

    @cached_property
    def buffer_endpoints(self) -> tuple[str, ...]:
        """Where each buffer worker takes samples."""
        return self._endpoints(BUFFER, shared=self.parameters_endpoint is not None)

    @cached_property
    def inference_endpoints(self) -> tuple[str, ...]:
        """Where each policy worker serves actors."""
        return self._endpoints(POLICY)

    @property
    def slots_per_actor(self) -> int:
        """Slots of one actor."""
        return SLOTS_PER_GROUP * self.spec.actors.ring_size

    @property
    def producers_per_trainer(self) -> int:
        """Producers that connect to each trainer: buffer workers or, if there are none, actors.

        With replay each actor connects to one trainer only.
        """
        if self.spec.algorithm.chosen.draws_from is not None:
            return self.num_workers[ACTOR] // self.num_workers[TRAINER]
        return self.num_workers[BUFFER] or self.num_workers[ACTOR]

    @property
    def actors_per_producer(self) -> int:
        """Actors behind each producer that trainers know: those of one buffer worker, or the actor itself."""
        num_buffer_workers = self.num_workers[BUFFER]
        return self.num_workers[ACTOR] // num_buffer_workers if num_buffer_workers else 1

    def _endpoints(self, role: str, *, shared: bool = False) -> tuple[str, ...]:
        return tuple(self.placement.endpoint(role, index, shared=shared) for index in range(self.num_workers[role]))


def coordinator_config(context: ResolutionContext) -> CoordinatorConfig:
    """Return the coordinator's config."""
    spec, placement = context.spec, context.placement
    fields = CoordinatorConfig.count_fields
    counts: dict[str, Any] = {name: context.num_workers[role] for role, name in fields.items()}
    others = {role: count for role, count in context.num_workers.items() if role not in {COORDINATOR, *fields}}
    return CoordinatorConfig(
        **context.common,
        serves_at=placement.coordinator_serves_at,
        http_address=placement.http_address,
        lease_seconds=LEASE_SECONDS,
        roster_path=placement.roster_path(context.experiment),
        record_folder=placement.record_folder,
        settings_path=placement.settings_path,
        first_attempt=placement.first_attempt,
        wandb=spec.tracking.wandb,
        worker_seconds=spec.tracking.worker_seconds,
        parameter_store=placement.parameter_store(context.experiment),
        num_others=others,
        paused=spec.paused,
        **counts,
    )


def trainer_config(context: ResolutionContext) -> TrainerConfig:
    """Return the trainers' config."""
    spec, placement = context.spec, context.placement
    return TrainerConfig(
        **context.common,
        serves_at=placement.streams_serve_at,
        environment=context.environment,
        network=spec.policy.network,
        normalize_observations=spec.policy.normalize_observations,
        algorithm=spec.algorithm,
        rollout_length=spec.actors.rollout_length,
        batch_lanes=spec.batch_environments if spec.algorithm.chosen.draws_from is None else spec.trainers.replicas,
        max_policy_lag=spec.pacing.max_policy_lag,
        replay=_replay(context),
        compile=_compile_mode(spec),
        threads=spec.trainers.threads,
        device=spec.trainers.device,
        takes_from_buffers=context.num_workers[BUFFER] > 0,
        num_producers=context.producers_per_trainer,
        slots_per_producer=min(context.slots_per_actor * context.actors_per_producer, MAX_SLOTS_PER_PRODUCER),
        samples_endpoints=context.samples_endpoints,
        parameters_endpoint=context.parameters_endpoint,
        publishes_live=context.parameters_endpoint is None,
        peer_timeout_seconds=PEER_TIMEOUT_SECONDS,
        policy_name=POLICY_NAME,
        parameter_store=placement.reached_store(context.experiment),
        versions=spec.parameters,
        stop=spec.stop,
    )


def _replay(context: ResolutionContext) -> ReplayConfig | None:
    spec, placement = context.spec, context.placement
    if spec.pacing.train_steps_per_env_step is None:
        return None
    num_shards = context.num_workers[BUFFER] // context.num_workers[TRAINER]
    most_lanes = max(spec.actors.rollout_environments)
    return ReplayConfig(
        folder=placement.replay_folder,
        outlives=placement.shares_disk,
        num_shards=num_shards,
        updates_per_env_step=spec.updates_per_env_step,
        most_updates_behind=spec.train_steps_behind,
        updates_per_step=spec.updates_per_train_step,
        most_lanes=most_lanes,
        lanes_per_grant=most_lanes if num_shards else 0,
        lanes_in_turn=spec.environments_per_trainer if spec.pacing.max_policy_lag == 0 else None,
    )


def actor_config(context: ResolutionContext) -> ActorConfig:
    """Return the actors' config."""
    spec, actors, algorithm = context.spec, context.spec.actors, context.spec.algorithm.chosen
    needs_number = actors.environments is not None or spec.environment.pass_place or algorithm.lanes_differ_by > 0
    return ActorConfig(
        **context.common,
        environment=context.environment,
        network=spec.policy.network,
        outputs=algorithm.outputs,
        epsilon_spread=algorithm.lanes_differ_by,
        noise_color=algorithm.vector_noise,
        num_actors=context.num_workers[ACTOR] if needs_number else None,
        environments=actors.environments,
        environments_per_actor=actors.environments_per_actor,
        rollout_length=actors.rollout_length,
        samples_endpoints=context.samples_endpoints,
        buffer_endpoints=context.buffer_endpoints,
        has_home_trainer=algorithm.draws_from is not None,
        parameters_endpoint=context.parameters_endpoint,
        inference_endpoints=context.inference_endpoints,
        max_decorrelation_steps=actors.max_decorrelation_steps,
        vectorization=actors.vectorization,
        ring_size=actors.ring_size,
        policy_name=POLICY_NAME,
        return_discount=algorithm.discount if algorithm.normalize_rewards else None,
    )


def policy_worker_config(context: ResolutionContext) -> PolicyWorkerConfig:
    """Return the policy workers' config."""
    spec, workers = context.spec, context.spec.policy_workers
    assert workers is not None, "the experiment has policy workers"
    return PolicyWorkerConfig(
        **context.common,
        serves_at=context.placement.streams_serve_at,
        environment=context.environment,
        network=spec.policy.network,
        outputs=spec.algorithm.chosen.outputs,
        inference_endpoints=context.inference_endpoints,
        max_batch_size=workers.max_batch_size,
        parameter_pull_seconds=workers.parameter_pull_seconds,
        device=workers.device,
        parameters_endpoint=context.parameters_endpoint,
        policy_name=POLICY_NAME,
    )


def buffer_config(context: ResolutionContext) -> BufferConfig:
    """Return the buffer workers' config."""
    spec, placement = context.spec, context.placement
    shard = ShardConfig(folder=placement.replay_folder, volume=placement.volume_folder, algorithm=spec.algorithm)
    return BufferConfig(
        **context.common,
        serves_at=placement.streams_serve_at,
        environment=context.environment,
        network=spec.policy.network,
        rollout_length=spec.actors.rollout_length,
        lanes_per_slot=max(spec.actors.rollout_environments),
        has_discounted_return=spec.algorithm.chosen.normalize_rewards,
        num_actors=context.actors_per_producer,
        slots_per_actor=context.slots_per_actor,
        buffer_endpoints=context.buffer_endpoints,
        samples_endpoints=context.samples_endpoints,
        peer_timeout_seconds=PEER_TIMEOUT_SECONDS,
        replay=shard if context.spec.keeps_in_buffers else None,
    )


def evaluator_config(context: ResolutionContext) -> EvaluatorConfig:
    """Return the evaluators' config."""
    spec, evaluators = context.spec, context.spec.evaluators
    assert evaluators is not None, "the experiment has evaluators"
    spread = evaluators.spread
    return EvaluatorConfig(
        **context.common,
        environment=context.environment,
        network=spec.policy.network,
        outputs=spec.algorithm.chosen.outputs,
        num_evaluators=evaluators.replicas,
        environments=spread.num_per_worker,
        episodes_per_environment=evaluators.episodes_per_environment,
        max_steps_per_environment=spread.max_steps_per_environment,
        every_seconds=evaluators.every_seconds,
        every_versions=evaluators.every_versions,
        parameters=evaluators.parameters,
        greedy=evaluators.greedy,
        video=evaluators.video,
        side_by_side=spec.environment.steps_side_by_side(spec.actors.vectorization),
        policy_name=POLICY_NAME,
        parameter_store=context.placement.reached_store(context.experiment),
    )


def _compile_mode(spec: ExperimentSpec) -> CompileMode:
    """Return ``off`` for ``background`` where runs repeat bit for bit: a compiled step differs in its last bits."""
    repeats = spec.pacing.max_policy_lag == 0
    return "off" if repeats and spec.trainers.compile == "background" else spec.trainers.compile
