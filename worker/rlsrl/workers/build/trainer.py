"""Builds the parts of a trainer rank from its config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rlsrl.algorithms.learner import Learner
from rlsrl.algorithms.normalizer import ReplayNormalizer
from rlsrl.api.live import settings_of, with_settings
from rlsrl.api.resolved import TrainerConfig
from rlsrl.api.role_names import ACTOR, BUFFER
from rlsrl.buffers.fifo import FifoBuffer
from rlsrl.buffers.limiter import RateLimiter
from rlsrl.buffers.replay.write_back import WriteBack
from rlsrl.data.slots import SlotLayout
from rlsrl.data.specs import EnvSpec
from rlsrl.data.version import Version
from rlsrl.envs.interface import EnvironmentInterface
from rlsrl.parameters.layout import NETWORK_KEY
from rlsrl.parameters.protocols import ParameterDB, Parameters, TrainerState
from rlsrl.parameters.resumption import ROLLBACK, Rollback, nothing_to_resume, rollback_of
from rlsrl.parameters.terminal import withdrawn_failure
from rlsrl.policies.export import check_export
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.runtime.errors import ConfigurationError, RunDamaged
from rlsrl.runtime.frequency import FrequencyControl
from rlsrl.runtime.ledger import LedgerError, PageRecord, TrainerLedger
from rlsrl.streams.protocols import SampleConsumer
from rlsrl.workers.build.common import (
    EXPORTED_ACTOR_KEY,
    INTERFACE_KEY,
    interface_of_environments,
    limiter_states,
    torch_policy,
)
from rlsrl.workers.build.compile_child import request_for
from rlsrl.workers.build.initial_weights import InitialWeights, read_initial_weights
from rlsrl.workers.build.learner import (
    batch_layout,
    build_learner,
    coefficients_of,
    example_batch,
    learning_rate_of,
    rank_device,
)
from rlsrl.workers.build.parameters import open_parameter_publisher
from rlsrl.workers.build.replay import open_store, pace_of, replay_experience
from rlsrl.workers.build.samples import open_consumer
from rlsrl.workers.build.sharded_replay import open_sharded_replay
from rlsrl.workers.checkpoints import UNSTORED, UNSTORED_REASON, CheckpointWriter, Unstored
from rlsrl.workers.compiling import StepCompiler
from rlsrl.workers.context import WorkerContext
from rlsrl.workers.experience import Experience, OnPolicyExperience
from rlsrl.workers.gang import Gang, ProcessGroupGang, SoloGang
from rlsrl.workers.progress import Progress, SkipWindow, StopConditions
from rlsrl.workers.status import NO_VERSION, RESUMED_FROM, STORED_ON_REQUEST
from rlsrl.workers.stored_transitions import OpenedStore
from rlsrl.workers.training import (
    Cadence,
    Checkpoint,
    Learning,
    Outputs,
    StartingPoint,
    TrainingSettings,
    TrainingThread,
)

GANG_SECONDS = 120.0
"""How long a rank waits for the others at a step boundary before the gang restarts. A step takes less."""
REPORT_SECONDS = 1.0
"""Seconds between two rows of the learning curve."""
LEAST_ROWS = 50
"""Rows that a run has, however short it is, if it takes so many steps."""


@dataclass(frozen=True, kw_only=True)
class TrainerParts:
    """The parts of a trainer."""

    gang: Gang
    consumer: SampleConsumer
    experience: Experience
    ledger: TrainerLedger
    training: TrainingThread
    checkpoints: CheckpointWriter
    withdrawn_failure: str | None
    """Why the run had failed with the version from which it resumes, if it is tried again."""
    resources: ExitStack
    """Closes the publisher, the consumer and the ledger's page."""


def build_trainer(
    config: TrainerConfig,
    context: WorkerContext,
    db: ParameterDB,
    *,
    on_training_end: Callable[[], None],
    wait_for_exit: Callable[[float], bool],
) -> TrainerParts:
    """Build a rank's parts, resumed from the newest durable version. If there is none, make the first version durable.

    Waits for the other ranks of its gang. ``on_training_end`` is for ``Outputs.on_end``, ``wait_for_exit`` for the
    ``CheckpointWriter``.

    Raises:
        ConfigurationError: the environment or the user's network cannot be made, ranks start with different
            parameters, or those of ``parameters.from`` are missing or do not fit.
        RunDamaged: the run has trained, and no stored version is intact.
        ExportMismatch: the exported actor does not compute what the network does.
        NotStored: the disk has no room for the first version.
    """
    interface = interface_of_environments(config.environment, context)
    policy = torch_policy(config.network, interface.spec, outputs=config.algorithm.chosen.outputs, seed=config.seed)
    device = rank_device(config, policy)
    context.log.info("training_on", device=str(device))
    gang = gang_of(config, device)
    # An edit of a moment ago may have reached only some ranks: all take rank 0's settings.
    config = with_settings(config, gang.agree({"settings": settings_of(config)})[0]["settings"])
    state = _agreed_state(config, context, db, gang)
    start = _initial_weights(config, context, gang) if state is None else None
    initial = _initial_parameters(config, context, db, policy, state, start)
    learner = _first_learner(config, interface.spec, policy, initial, device, state, start, gang)
    metadata = _acting_facts(policy, learner.parameters(initial.version), interface)
    withdrawn = None if state is None else withdrawn_failure(db, config.policy_name, state.version)
    with ExitStack() as resources:
        layout = batch_layout(config, interface.spec)
        ledger, store = _resumed_ledger(config, context, state, layout, resources)
        consumer, experience = _samples(
            config, context, state, store, layout, ledger, learner, resources, rank=gang.rank
        )
        checkpoints = _checkpoint_writer(config, context, db, wait_for_exit)
        training = TrainingThread(
            learning=_learning(config, context, interface.spec, learner, device),
            experience=experience,
            start=starting_point(config, context, state, num_ranks=gang.size, is_retry=withdrawn is not None),
            outputs=_outputs(config, context, metadata, resources, gang, checkpoints, on_training_end),
            context=context,
            gang=gang,
        )
        if state is None:
            _store_first(training, checkpoints, gang)
        return TrainerParts(
            gang=gang,
            consumer=consumer,
            experience=experience,
            ledger=ledger,
            training=training,
            checkpoints=checkpoints,
            withdrawn_failure=withdrawn,
            resources=resources.pop_all(),
        )


def _initial_weights(config: TrainerConfig, context: WorkerContext, gang: Gang) -> InitialWeights | None:
    """Return what ``parameters.from`` names, the same on every rank: the version that rank 0 has found."""
    if (initial := config.versions.from_) is None:
        return None
    found = read_initial_weights(initial, config.policy_name) if gang.rank == 0 else None
    version = gang.agree({"initial": None if found is None else found.version})[0]["initial"]
    if found is None:
        named = initial if version is None else initial.model_copy(update={"version": version, "tag": None})
        found = read_initial_weights(named, config.policy_name)
    context.log.info("starts_from", origin=found.origin, what=initial.what)
    return found


def _first_learner(
    config: TrainerConfig,
    env_spec: EnvSpec,
    policy: TorchPolicy,
    initial: Parameters,
    device: torch.device,
    state: TrainerState | None,
    start: InitialWeights | None,
    gang: Gang,
) -> Learner:
    """Return the learner with the state from which the rank resumes, or with what it starts from."""
    learner = build_learner(config, env_spec, policy, initial, gang.reduce, device, rank=gang.rank)
    if state is not None:
        learner.load_state_dict(state.arrays, state.values["learner"])
    elif start is not None:
        start.start(learner)
    check_equal(learner, gang)
    return learner


def check_equal(learner: Learner, gang: Gang) -> None:
    """Check that all ranks start with the same parameters: they sum gradients, and would drift apart unnoticed.

    Raises:
        ConfigurationError: they differ.
    """
    if len({answer["learner"] for answer in gang.agree({"learner": learner.digest()})}) > 1:
        raise ConfigurationError(
            "the ranks of the gang start with different parameters. The algorithm's factory may draw random numbers "
            "from torch only, whose generator has the same seed on all ranks"
        )


def _store_first(training: TrainingThread, checkpoints: CheckpointWriter, gang: Gang) -> None:
    first = training.checkpoint()
    if gang.rank == 0:
        checkpoints.store_first(first)


def _acting_facts(policy: TorchPolicy, parameters: Parameters, interface: EnvironmentInterface) -> dict[str, Any]:
    """Return the metadata by which a version acts: the exported actor, which is checked to compute what the network
    does, the environments' interface, and the names and shapes of its weights."""
    exported = policy.export()
    if exported is not None:
        check_export(policy, exported, parameters)
    return {
        EXPORTED_ACTOR_KEY: None if exported is None else exported.to_json(),
        INTERFACE_KEY: interface.to_json(),
        NETWORK_KEY: {name: list(shape) for name, shape in policy.layout.shapes.items()},
    }


def _resumed_ledger(
    config: TrainerConfig,
    context: WorkerContext,
    state: TrainerState | None,
    layout: SlotLayout,
    resources: ExitStack,
) -> tuple[TrainerLedger, OpenedStore | None]:
    """Return the rank's ledger, and the store of an algorithm that replays with what the ledger counts as held.

    A store that outlives the rank is written back until ``resources`` is closed.
    """
    ledgers = [] if state is None else state.values["ledgers"]
    page = context.open_ledger_page()
    resources.callback(page.close)
    ledger = TrainerLedger(page, producers=BUFFER if config.takes_from_buffers else ACTOR)
    saved = ledgers[context.index] if context.index < len(ledgers) else None
    store = open_store(config, context, state, layout, former=ledger.former_life(saved))
    if store is None:
        ledger.resume(saved, incarnation=context.incarnation)
        return ledger, None
    try:
        ledger.resume(saved, incarnation=context.incarnation, held=store.held, keeps=store.outlives)
    except LedgerError as error:  # a run without what it had stored is better than one that cannot start
        context.log.warning("replay_store_unusable", why=str(error))
        store = open_store(config, context, state, layout, former=None)
        assert store is not None, "opened before"
        ledger.resume(saved, incarnation=context.incarnation, keeps=store.outlives)
    store.forget_training()
    if store.outlives:
        resources.enter_context(WriteBack(store.write_back))
    return ledger, store


def _open_consumer(
    config: TrainerConfig, context: WorkerContext, layout: SlotLayout, ledger: TrainerLedger, resources: ExitStack
) -> SampleConsumer:
    return open_consumer(
        config.serving(config.samples_endpoints, context.index),
        context,
        resources,
        layout=layout,
        ledger=ledger,
        slots_per_producer=config.slots_per_producer,
        peer_timeout=config.peer_timeout_seconds,
        expected_producers=config.num_producers,
    )


def _outputs(
    config: TrainerConfig,
    context: WorkerContext,
    metadata: Mapping[str, Any],
    resources: ExitStack,
    gang: Gang,
    checkpoints: CheckpointWriter,
    on_end: Callable[[], None],
) -> Outputs:
    """Return where a rank's results go. Rank 0 publishes for all ranks."""
    publish = _open_publisher(config, context, metadata, resources) if gang.rank == 0 else _publish_nothing
    return Outputs(publish=publish, store=checkpoints.store, metadata=metadata, on_end=on_end)


def _open_publisher(
    config: TrainerConfig, context: WorkerContext, metadata: Mapping[str, Any], resources: ExitStack
) -> Callable[[Parameters], None]:
    publisher = open_parameter_publisher(config, context.token, context.tls, metadata)
    resources.callback(publisher.close)
    return publisher.publish


def _publish_nothing(parameters: Parameters) -> None:
    del parameters


def _checkpoint_writer(
    config: TrainerConfig, context: WorkerContext, db: ParameterDB, wait_for_exit: Callable[[float], bool]
) -> CheckpointWriter:
    fulfilled: str | None = None

    def show_durable(checkpoint: Checkpoint) -> None:
        nonlocal fulfilled
        version = checkpoint.parameters.version
        context.metrics.durable_version_step.set(version.step)
        context.metrics.durable_version_timestamp_seconds.set(context.clock.time())
        context.report_stats({UNSTORED: 0})
        context.report_text(UNSTORED_REASON, "")
        if (request := checkpoint.metadata.get("store_request")) != fulfilled:
            fulfilled = request
            context.report_text(STORED_ON_REQUEST, f"{request} {version}")

    checkpoints_failed = context.metrics.checkpoints_failed  # exposed from the start: an alert compares it with 0

    # Reported at once, not with the next statistics: until there is space, a crash loses what was trained since.
    def show_unstored(unstored: Unstored) -> None:
        checkpoints_failed.inc()
        context.report_stats({UNSTORED: unstored.num_versions})
        context.report_text(UNSTORED_REASON, unstored.why)

    context.metrics.checkpoint_period_seconds.set(config.versions.every_seconds)
    return CheckpointWriter(
        db=db,
        policy_name=config.policy_name,
        versions=config.versions,
        log=context.log,
        clock=context.clock,
        on_stored=show_durable,
        on_failed=show_unstored,
        wait_for_exit=wait_for_exit,
    )


def _learning(
    config: TrainerConfig, context: WorkerContext, env_spec: EnvSpec, learner: Learner, device: torch.device
) -> Learning:
    return Learning(
        learner=learner,
        compiler=StepCompiler(
            mode=config.compile,
            learner=learner,
            example_batch=lambda: example_batch(config, env_spec),
            request=request_for(config, env_spec),
            context=context,
            on_gpu=device.type == "cuda",
        ),
        settings=_settings(config),
        read_settings=lambda settings: _settings(with_settings(config, settings)),
    )


def gang_of(config: TrainerConfig, device: torch.device, *, join_ranks: Callable[..., Gang] = ProcessGroupGang) -> Gang:
    """Return the gang of all ranks, which must train on devices of one kind. ``join_ranks`` waits for the other ranks.

    Raises:
        ConfigurationError: some ranks have a GPU and some have none.
    """
    if config.num_trainers == 1:
        return SoloGang()
    gang = join_ranks(timeout_seconds=GANG_SECONDS, on_gpus=device.type == "cuda")
    kinds = [answer["device"] for answer in gang.agree({"device": device.type})]
    if len(set(kinds)) > 1:
        raise ConfigurationError(
            f"trainers.device is {config.device}, and the ranks would train on {', '.join(kinds)}; allowed: "
            "one kind of device for all ranks, cpu or cuda with a GPU for each rank"
        )
    return gang


def state_to_resume(
    db: ParameterDB, policy_name: str, *, has_trained: bool, attempt: int
) -> tuple[TrainerState | None, Rollback | None]:
    """Return the newest intact state and what resuming from it loses; None and None for a new run.

    ``has_trained``: whether an earlier attempt of this run has trained.

    Raises:
        RunDamaged: the run has trained, and can resume from no stored version. A new run would hide the loss.
    """
    point = db.resume_point(policy_name)
    if point.version is not None:
        return db.load_state(policy_name, point.version), rollback_of(point, attempt=attempt)
    if point.unusable or has_trained:
        raise RunDamaged(nothing_to_resume(point))
    return None, None


def has_trained(context: WorkerContext) -> bool:
    """Return whether the coordinator knows of transitions that an earlier trainer at this index has trained."""
    if not (payload := context.join_session.ledger_copy):
        return False
    page = PageRecord.decode(payload, role=context.role, index=context.index)
    return page.counters["trained"] > 0


def _agreed_state(config: TrainerConfig, context: WorkerContext, db: ParameterDB, gang: Gang) -> TrainerState | None:
    """Return the state that rank 0 resumes from, the same on every rank; None for a new run."""
    found: TrainerState | None = None
    if gang.rank == 0:
        found, rollback = state_to_resume(
            db, config.policy_name, has_trained=has_trained(context), attempt=context.attempt
        )
        if rollback is not None:
            context.log.warning("rolled_back", **asdict(rollback))
            context.report_text(ROLLBACK, str(rollback))
        context.report_text(RESUMED_FROM, NO_VERSION if found is None else str(found.version))
    version = gang.agree({"resume": None if found is None else str(found.version)})[0]["resume"]
    if gang.rank == 0 or version is None:
        return found
    state = db.load_state(config.policy_name, version)
    assert state is not None, "rank 0 has just read it"
    return state


def _initial_parameters(
    config: TrainerConfig,
    context: WorkerContext,
    db: ParameterDB,
    policy: TorchPolicy,
    state: TrainerState | None,
    start: InitialWeights | None,
) -> Parameters:
    if state is None:
        version = Version(context.attempt, 0)
        return policy.parameters(version) if start is None else start.parameters(policy.layout, version)
    parameters = db.get(config.policy_name, state.version)
    assert parameters is not None, "get returns None only when asked for newer ones"
    context.log.info("resumed", version=str(state.version))
    return parameters


def _settings(config: TrainerConfig) -> TrainingSettings:
    stop, versions = config.stop, config.versions
    return TrainingSettings(
        stop_conditions=StopConditions(
            return_mean=stop.return_mean,
            episodes=stop.episodes,
            env_steps=stop.env_steps,
            train_steps=stop.train_steps,
            wall_seconds=stop.wall_seconds,
            now=stop.now,
        ),
        cadence=Cadence(
            report=FrequencyControl(seconds=REPORT_SECONDS, least=LEAST_ROWS),
            push=FrequencyControl(seconds=versions.every_seconds, steps=versions.every_steps),
            tag=FrequencyControl(seconds=versions.tag_every_seconds, steps=versions.tag_every_steps),
        ),
        learning_rate=learning_rate_of(config),
        coefficients=coefficients_of(config),
        pace=None if config.replay is None else pace_of(config.replay),
        store_request=versions.store_request,
    )


def _samples(
    config: TrainerConfig,
    context: WorkerContext,
    state: TrainerState | None,
    store: OpenedStore | None,
    layout: SlotLayout,
    ledger: TrainerLedger,
    learner: Learner,
    resources: ExitStack,
    *,
    rank: int,
) -> tuple[SampleConsumer, Experience]:
    """Return where a rank's samples come from, and what it trains on."""
    if config.replay is not None and config.replay.num_shards:
        return open_sharded_replay(config, config.replay, context, state, layout, ledger, resources, rank=rank)
    consumer = _open_consumer(config, context, layout, ledger, resources)
    return consumer, _experience(config, context, state, store, layout, consumer, ledger, learner, rank=rank)


def _experience(
    config: TrainerConfig,
    context: WorkerContext,
    state: TrainerState | None,
    store: OpenedStore | None,
    layout: SlotLayout,
    consumer: SampleConsumer,
    ledger: TrainerLedger,
    learner: Learner,
    *,
    rank: int,
) -> Experience:
    if config.replay is not None and store is not None:
        normalizer = learner.normalizer
        assert isinstance(normalizer, ReplayNormalizer), "the algorithm replays"
        return replay_experience(
            config, config.replay, context, state, store, consumer, ledger, rank=rank, normalizer=normalizer
        )
    limiter = RateLimiter(batch_lanes=config.lanes_per_rank, max_policy_lag=config.max_policy_lag)
    if state is not None:
        limiter.load_state_dict(limiter_states(state)[0])
    return OnPolicyExperience(
        buffer=FifoBuffer(layout=layout, batch_lanes=config.lanes_per_rank, max_policy_lag=config.max_policy_lag),
        limiter=limiter,
        grant=consumer.grant,
        ledger=ledger,
        batch_lanes=config.lanes_per_rank,
        batch_transitions=config.rollout_length * config.batch_lanes,
        max_policy_lag=config.max_policy_lag,
    )


def starting_point(
    config: TrainerConfig, context: WorkerContext, state: TrainerState | None, *, num_ranks: int, is_retry: bool
) -> StartingPoint:
    """Return where this attempt starts. ``is_retry``: the run had failed with ``state``, and is judged anew."""
    progress = Progress(episodes=config.stop.episodes)
    if state is None:
        return StartingPoint(version=Version(context.attempt, 0), progress=progress)
    progress.load_state_dict(state.values["progress"])
    # A state of an older version of rlsrl lacks the minibatches.
    taken = [] if is_retry else state.values.get("minibatches_taken", [])
    return StartingPoint(
        version=Version(context.attempt, state.version.step),
        progress=progress,
        skip_window=SkipWindow(taken),
        absent_ledgers=state.values["ledgers"][num_ranks:],
    )
