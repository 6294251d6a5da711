"""What a trainer rank is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from rlsrl.api.live import settings_of, with_settings
from rlsrl.api.resolved import TrainerConfig
from rlsrl.buffers.fifo import FifoBuffer
from rlsrl.buffers.limiter import RateLimiter
from rlsrl.data.version import Version
from rlsrl.envs.factory import environment_spec
from rlsrl.parameters.protocols import ParameterDB, Parameters, TrainerState
from rlsrl.policies.export import check_export
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.runtime.addresses import own_address
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.runtime.frequency import FrequencyControl
from rlsrl.runtime.ledger import TrainerLedger
from rlsrl.streams.connect import consumer_for
from rlsrl.streams.protocols import SampleConsumer
from rlsrl.workers.build.common import EXPORTED_ACTOR_KEY, environment_source, torch_policy
from rlsrl.workers.build.learner import (
    batch_layout,
    build_learner,
    coefficients_of,
    learning_rate_of,
    rank_device,
    stand_in_batch,
)
from rlsrl.workers.build.parameters import open_parameter_publisher
from rlsrl.workers.checkpoints import CheckpointWriter
from rlsrl.workers.compiling import StepCompiler, request_for
from rlsrl.workers.context import WorkerContext
from rlsrl.workers.gang import Gang, ProcessGroupGang, SoloGang
from rlsrl.workers.progress import Progress, StopConditions
from rlsrl.workers.training import Cadence, TrainingThread, Tuning

GANG_SECONDS = 120.0
"""How long a rank waits for the others at a step boundary: longer than a step takes; then the gang starts anew."""
REPORT_SECONDS = 1.0
"""Time between two rows of the learning curve."""


@dataclass(frozen=True, kw_only=True)
class TrainerParts:
    """What a trainer is made of."""

    gang: Gang
    consumer: SampleConsumer
    buffer: FifoBuffer
    ledger: TrainerLedger
    training: TrainingThread
    checkpoints: CheckpointWriter
    resources: ExitStack
    """Closes the consumer, the broadcast and the ledger's page."""


def build_trainer(
    config: TrainerConfig, context: WorkerContext, db: ParameterDB, *, on_training_end: Callable[[], None]
) -> TrainerParts:
    """A rank's parts, resumed from the newest durable version; the first version is made durable if there is none.

    Waits for the other ranks of its gang.

    Raises:
        ConfigurationError: the environment or the user's network cannot be made.
        ExportMismatch: the exported actor does not compute what the network does.
    """
    env_spec = environment_spec(environment_source(config.environment))
    policy = torch_policy(config.network, env_spec, seed=config.seed)
    device = rank_device(config, policy)
    gang = gang_of(config, device)
    context.log.info("training_on", device=str(device))
    # Settings that were edited a moment ago may have reached some ranks only.
    config = with_settings(config, gang.agree({"settings": settings_of(config)})[0]["settings"])
    state = _agreed_state(config, db, gang)
    initial = _initial_parameters(config, context, db, policy, state)
    learner = build_learner(config, env_spec, policy, initial, gang.reduce, device)
    if state is not None:
        learner.load_state_dict(state.arrays, state.values["learner"])
    program = policy.export()
    if program is not None:
        check_export(policy, program, learner.parameters(initial.version))
    description = {EXPORTED_ACTOR_KEY: None if program is None else program.to_json()}
    layout = batch_layout(config, env_spec)
    with ExitStack() as resources:
        page = context.open_ledger_page()
        resources.callback(page.close)
        ledger = TrainerLedger(page)
        ledgers = state.values["ledgers"] if state is not None else []
        saved = ledgers[gang.rank] if gang.rank < len(ledgers) else None
        ledger.resume(saved, incarnation=context.incarnation)
        endpoint = own_address(config.serving(config.samples_endpoints, context.index))
        consumer = consumer_for(endpoint, tls=context.tls, on_unauthenticated=context.count_unauthenticated)(
            endpoint,
            token=context.token,
            layout_digest=layout.step_digest,
            ledger=ledger,
            slots_per_producer=config.slots_per_producer,
            peer_timeout=config.peer_timeout_seconds,
            expected_producers=config.num_producers,
        )
        resources.callback(consumer.close)
        publish: Callable[[Parameters], None] = _publish_nothing
        if gang.rank == 0:
            publisher = open_parameter_publisher(config, context.token, context.tls, description)
            resources.callback(publisher.close)
            publish = publisher.publish
        buffer = FifoBuffer(layout=layout, batch_lanes=config.lanes_per_rank, max_policy_lag=config.max_policy_lag)
        context.metrics.checkpoint_period_seconds.set(config.versions.every_seconds)
        checkpoints = CheckpointWriter(
            db=db,
            policy_name=config.policy_name,
            keep_last=config.versions.keep_last,
            log=context.log,
            on_stored=lambda version: _show_durable(version, context),
            on_failed=context.metrics.checkpoints_failed.inc,
        )
        training = TrainingThread(
            learner=learner,
            compiler=StepCompiler(
                mode=config.compile,
                learner=learner,
                stand_in=lambda: stand_in_batch(config, env_spec),
                request=request_for(config, env_spec),
                context=context,
                on_gpu=device.type == "cuda",
            ),
            buffer=buffer,
            limiter=_resumed_limiter(config, state),
            batch_lanes=config.lanes_per_rank,
            max_policy_lag=config.max_policy_lag,
            version=Version(context.attempt, state.version.step if state is not None else 0),
            progress=_resumed_progress(config, state),
            tuning=_tuning(config),
            tuned=lambda settings: _tuning(with_settings(config, settings)),
            ledger=ledger,
            absent_ledgers=ledgers[gang.size :],
            context=context,
            gang=gang,
            metadata=description,
            grant=consumer.grant,
            publish=publish,
            store=checkpoints.store,
            on_end=on_training_end,
        )
        if state is None:
            first = training.checkpoint()
            if gang.rank == 0:
                checkpoints.store_now(first)
        return TrainerParts(
            gang=gang,
            consumer=consumer,
            buffer=buffer,
            ledger=ledger,
            training=training,
            checkpoints=checkpoints,
            resources=resources.pop_all(),
        )


def gang_of(config: TrainerConfig, device: torch.device) -> Gang:
    """All ranks, which train on devices of one kind.

    Raises:
        ConfigurationError: they do not.
    """
    if config.num_trainers == 1:
        return SoloGang()
    gang = ProcessGroupGang(timeout_seconds=GANG_SECONDS, on_gpus=device.type == "cuda")
    kinds = [said["device"] for said in gang.agree({"device": device.type})]
    if len(set(kinds)) > 1:
        raise ConfigurationError(
            f"trainers.device is {config.device}, and of the ranks' machines some have GPUs for their ranks and some "
            f"have not ({', '.join(kinds)}); allowed: cpu, or cuda with a GPU for each rank"
        )
    return gang


def _show_durable(version: Version, context: WorkerContext) -> None:
    context.metrics.durable_version_step.set(version.step)
    context.metrics.durable_version_timestamp_seconds.set(context.clock.time())


def _publish_nothing(parameters: Parameters) -> None:
    """Rank 0 speaks for all."""
    del parameters


def _agreed_state(config: TrainerConfig, db: ParameterDB, gang: Gang) -> TrainerState | None:
    """What rank 0 finds to resume from, on every rank; None if there is nothing yet."""
    found = db.load_state(config.policy_name) if gang.rank == 0 and config.policy_name in db.policies() else None
    version = gang.agree({"resume": None if found is None else str(found.version)})[0]["resume"]
    if gang.rank == 0 or version is None:
        return found
    state = db.load_state(config.policy_name, version)
    assert state is not None, "rank 0 has just read it"  # noqa: S101 - the database's contract
    return state


def _initial_parameters(
    config: TrainerConfig, context: WorkerContext, db: ParameterDB, policy: TorchPolicy, state: TrainerState | None
) -> Parameters:
    if state is None:
        return policy.parameters(Version(context.attempt, 0))
    parameters = db.get(config.policy_name, state.version)
    assert parameters is not None, "get returns None only when asked for newer ones"  # noqa: S101 - its contract
    context.log.info("resumed", version=str(state.version))
    return parameters


def _tuning(config: TrainerConfig) -> Tuning:
    return Tuning(
        stop_conditions=_stop_conditions(config),
        cadence=_cadence(config),
        learning_rate=learning_rate_of(config),
        coefficients=coefficients_of(config),
    )


def _resumed_limiter(config: TrainerConfig, state: TrainerState | None) -> RateLimiter:
    limiter = RateLimiter.on_policy(batch_lanes=config.lanes_per_rank, max_policy_lag=config.max_policy_lag)
    if state is not None:
        limiter.load_state_dict(state.values["limiter"])
    return limiter


def _resumed_progress(config: TrainerConfig, state: TrainerState | None) -> Progress:
    progress = Progress(episodes=config.stop.episodes)
    if state is not None:
        progress.load_state_dict(_mapping(state.values["progress"]))
    return progress


def _mapping(value: Any) -> Mapping[str, Any]:
    assert isinstance(value, Mapping), "written by state_dict"  # noqa: S101 - an invariant of our own
    return value


def _stop_conditions(config: TrainerConfig) -> StopConditions:
    stop = config.stop
    return StopConditions(
        return_mean=stop.return_mean,
        episodes=stop.episodes,
        env_steps=stop.env_steps,
        train_steps=stop.train_steps,
        wall_seconds=stop.wall_seconds,
    )


def _cadence(config: TrainerConfig) -> Cadence:
    versions = config.versions
    return Cadence(
        report=FrequencyControl(seconds=REPORT_SECONDS),
        push=FrequencyControl(seconds=versions.every_seconds, steps=versions.every_steps),
        tag=FrequencyControl(seconds=versions.tag_every_seconds, steps=versions.tag_every_steps),
    )
