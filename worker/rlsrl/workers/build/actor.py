"""Builds an actor: its groups of environments, and how they get actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from rlsrl.api.resolved import ActorConfig
from rlsrl.data.inference import InferenceLayout
from rlsrl.data.slots import ProducerId, rollout_layout
from rlsrl.data.specs import EnvSpec, state_specs
from rlsrl.envs.episodes import EpisodeReports
from rlsrl.envs.faults import EnvironmentFaults, FaultReason
from rlsrl.envs.returns import DiscountedReturns
from rlsrl.envs.threads import EnvironmentThreads
from rlsrl.envs.unreachable import WaitAbandoned
from rlsrl.envs.vector import VectorEnv
from rlsrl.parameters.protocols import Parameters, ParameterSource
from rlsrl.policies.acting import LocalActor, PolicyActor
from rlsrl.policies.epsilon_greedy import ape_x_exponents
from rlsrl.policies.exported import ExportedActor
from rlsrl.policies.lane_requests import LaneRequests, RequestingLanes
from rlsrl.policies.lane_states import LaneStates
from rlsrl.policies.numpy_policy import NumpyActor, NumpyLanes
from rlsrl.policies.pink_noise import PinkNoise
from rlsrl.policies.remote import RemoteActor, RemotePolicy
from rlsrl.policies.sampling import Exploration
from rlsrl.runtime.ledger import ActorLedger
from rlsrl.streams.grpc_inference.client import GrpcInferenceClient, InferenceClientOptions
from rlsrl.streams.protocols import SampleProducer
from rlsrl.workers.build.common import (
    await_description,
    derived_seed,
    exported_actor,
    torch_policy,
)
from rlsrl.workers.build.environments import environment_threads, lockstep_environments
from rlsrl.workers.build.parameters import open_parameter_source
from rlsrl.workers.build.samples import open_producer
from rlsrl.workers.call_watch import call_limits
from rlsrl.workers.context import WorkerContext
from rlsrl.workers.env_groups import EnvGroup, LockstepEnvGroup, ThreadedEnvGroup
from rlsrl.workers.fleet_row import ReportedFleetRow, status_reader
from rlsrl.workers.lane_evaluation import LaneEvaluation, LocalEvaluation, RemoteEvaluation
from rlsrl.workers.life_during_calls import LifeDuringCalls
from rlsrl.workers.server_waits import ServerWaitReport
from rlsrl.workers.status import ERRORS, NON_FINITE, UNREACHABLE


@dataclass(frozen=True, kw_only=True)
class LocalPolicy:
    """How an actor that evaluates the policy itself gets weights."""

    source: ParameterSource
    load: Callable[[Parameters], None]
    """Makes the groups act with these weights in slots that begin from now on."""


@dataclass(frozen=True, kw_only=True)
class ActorParts:
    """The parts of an actor."""

    groups: tuple[EnvGroup, ...]
    producer: SampleProducer
    policy: LocalPolicy | RemotePolicy | None
    """None: the one group asks policy workers by itself."""
    ledger: ActorLedger
    faults: EnvironmentFaults
    """The faults of all groups' environments."""
    resources: ExitStack
    """Closes all parts and the ledger's page; before that, the groups stop writing into slots."""


class BuildActor(Protocol):
    """``build_actor`` or a test's substitute."""

    def __call__(
        self, config: ActorConfig, context: WorkerContext, *, still_wanted: Callable[[], bool]
    ) -> ActorParts | None:
        """Return the parts, or None if the actor is no longer wanted."""


def build_actor(config: ActorConfig, context: WorkerContext, *, still_wanted: Callable[[], bool]) -> ActorParts | None:
    """Return an actor's parts, or None if it is no longer wanted.

    Without policy workers it waits for a trainer to publish the exported actor. It waits for an environment's server.

    Raises:
        ConfigurationError: the environment or the user's network cannot be made.
        EnvironmentFailed: the environment's own code raised another error when it was made.
        IndexError: all environments belong to actors of lower indices.
    """
    faults = _faults(config, context)
    reports = EpisodeReports(config.environment.episode_info, log=context.log)
    with ExitStack() as resources:
        make = _local_group
        if config.inference_endpoints:
            make = _remote_threads if config.vectorization == "threads" else _remote_groups
        try:
            acting = make(config, context, resources, faults, reports, still_wanted)
        except WaitAbandoned:
            return None
        if acting is None:
            return None
        groups, policy, env_spec = acting
        page = context.open_ledger_page()
        resources.callback(page.close)
        ledger = ActorLedger(page)
        producer = open_producer(
            config.consumers_of(context.index),
            consumers=config.consumer_role,
            token=context.token,
            tls=context.tls,
            layout=rollout_layout(
                env_spec,
                num_steps=config.rollout_length,
                num_lanes=len(config.environment_ranks_of(context.index)) // len(groups),
                state=state_specs(config.network.state_sizes),
                discounted_return=config.return_discount is not None,
                episode_info=config.environment.episode_info,
            ),
            producer_id=ProducerId(index=context.index, incarnation=context.incarnation),
            ledger=ledger,
            directory=context.directory,
        )
        resources.callback(producer.close)
        if context.call_board is not None:
            limits = call_limits(config.environment)
            life = LifeDuringCalls(context.call_board, limits, producer.touch, clock=context.clock)
            life.start()
            resources.callback(life.close)
        for group in groups:
            resources.callback(group.abandon)
        return ActorParts(
            groups=groups,
            producer=producer,
            policy=policy,
            ledger=ledger,
            faults=faults,
            resources=resources.pop_all(),
        )


_Acting = tuple[tuple[EnvGroup, ...], LocalPolicy | RemotePolicy | None, EnvSpec]


def _faults(config: ActorConfig, context: WorkerContext) -> EnvironmentFaults:
    reasons: tuple[FaultReason, ...] = get_args(FaultReason)
    counters = {reason: context.metrics.environment_faults.labels(reason=reason) for reason in reasons}

    names = {"environment_error": ERRORS, "unreachable": UNREACHABLE, "non_finite": NON_FINITE}

    def report_own(reason: FaultReason, number: int, text: str) -> None:
        context.report_failure(names[reason], number, text)

    status = status_reader(config.coordinator_address, context.token, context.tls)
    return EnvironmentFaults(
        max_non_finite=config.environment.max_non_finite,
        fleet_row=ReportedFleetRow(report=context.report_stats, status=status),
        on_fault=lambda reason: counters[reason].inc(),
        on_own_fault=report_own,
        on_wait=ServerWaitReport(context),
        log=context.log,
    )


def _remote_groups(
    config: ActorConfig,
    context: WorkerContext,
    resources: ExitStack,
    faults: EnvironmentFaults,
    reports: EpisodeReports,
    still_wanted: Callable[[], bool],
) -> _Acting | None:
    """Return the groups of an actor that asks policy workers: its environments in order of rank, in equal parts."""
    ranks = config.environment_ranks_of(context.index)
    size = len(ranks) // config.ring_size
    all_envs: list[VectorEnv] = []
    for number in range(config.ring_size):
        group_ranks = ranks[number * size : (number + 1) * size]
        envs = lockstep_environments(config, context, group_ranks, faults, reports, still_wanted)
        resources.callback(envs.close)
        all_envs.append(envs)
    env_spec = all_envs[0].spec
    client = _inference_client(config, context, env_spec, resources)
    policy = RemotePolicy(client, waiting=context.waiting, report_version=context.report_version, log=context.log)
    num_steps = config.rollout_length
    groups: list[EnvGroup] = []
    for number, envs in enumerate(all_envs):
        rng = _noise(config, context, number)
        actor = RemoteActor(
            policy,
            env_spec,
            group=number,
            num_steps=num_steps,
            num_lanes=envs.num_envs,
            rng=rng,
            exploration=_exploration(config, ranks[number * size : (number + 1) * size]),
            state=state_specs(config.network.state_sizes),
        )
        returns = _returns(config, envs.num_envs)
        groups.append(LockstepEnvGroup(envs, actor, num_steps=num_steps, returns=returns))
    return tuple(groups), policy, env_spec


def _remote_threads(
    config: ActorConfig,
    context: WorkerContext,
    resources: ExitStack,
    faults: EnvironmentFaults,
    reports: EpisodeReports,
    still_wanted: Callable[[], bool],
) -> _Acting | None:
    """Return the one group of an actor whose environments each have a thread and ask policy workers."""
    ranks = config.environment_ranks_of(context.index)
    envs = environment_threads(config, context, ranks, faults, reports, still_wanted)
    resources.callback(envs.close)
    client = _inference_client(config, context, envs.spec, resources)
    requests = LaneRequests(envs.num_envs)
    evaluation = RemoteEvaluation(
        envs, requests, client, waiting=context.waiting, report_version=context.report_version, log=context.log
    )
    group = _requesting_group(config, context, envs, requests, evaluation)
    return (group,), None, envs.spec


def _inference_client(
    config: ActorConfig, context: WorkerContext, env_spec: EnvSpec, resources: ExitStack
) -> GrpcInferenceClient:
    options = InferenceClientOptions(
        token=context.token,
        tls=context.tls,
        layout=InferenceLayout.of(env_spec, state_specs(config.network.state_sizes)),
        home=context.index,
        find=context.directory.find,
    )
    client = GrpcInferenceClient(config.inference_endpoints, options)
    resources.callback(client.close)
    return client


def _local_group(
    config: ActorConfig,
    context: WorkerContext,
    resources: ExitStack,
    faults: EnvironmentFaults,
    reports: EpisodeReports,
    still_wanted: Callable[[], bool],
) -> _Acting | None:
    """Return the one group of an actor that evaluates the policy itself, or None if it is no longer wanted."""
    ranks = config.environment_ranks_of(context.index)
    make = environment_threads if config.vectorization == "threads" else lockstep_environments
    envs: VectorEnv | EnvironmentThreads = make(config, context, ranks, faults, reports, still_wanted)
    resources.callback(envs.close)
    source = open_parameter_source(config, context.token, context.tls)
    resources.callback(source.close)
    description = await_description(source, context, still_wanted)
    if description is None:
        return None
    exported = exported_actor(description)
    if isinstance(envs, EnvironmentThreads):
        threaded = _threaded_group(config, context, envs, exported)
        return (threaded,), LocalPolicy(source=source, load=threaded.load), envs.spec
    actor = _local_actor(config, context, envs, exported)
    returns = _returns(config, envs.num_envs)
    group = LockstepEnvGroup(envs, actor, num_steps=config.rollout_length, returns=returns)
    return (group,), LocalPolicy(source=source, load=actor.load), envs.spec


def _local_actor(
    config: ActorConfig, context: WorkerContext, envs: VectorEnv, exported: ExportedActor | None
) -> LocalActor:
    """Return an actor without torch if the policy has an exported form, else one that evaluates torch here."""
    lanes = _lanes(config, context)
    if exported is not None:
        return NumpyActor(exported, **lanes)
    policy = torch_policy(config.network, envs.spec, outputs=config.outputs, seed=config.seed)
    return PolicyActor(policy, envs.spec, **lanes)


def _threaded_group(
    config: ActorConfig, context: WorkerContext, envs: EnvironmentThreads, exported: ExportedActor | None
) -> ThreadedEnvGroup:
    num_lanes = envs.num_envs
    if exported is None:
        requests = LaneRequests(num_lanes)
        policies = [torch_policy(config.network, envs.spec, outputs=config.outputs, seed=config.seed) for _ in range(2)]
        evaluation = LocalEvaluation(envs, requests, policies)
        return _requesting_group(config, context, envs, requests, evaluation, loads=[each.load for each in policies])
    lanes = _lanes(config, context)
    first = NumpyLanes(exported, **lanes)
    second = NumpyLanes(exported, **lanes, states=first.states)
    returns = _returns(config, num_lanes)
    return ThreadedEnvGroup(envs, (first, second), num_steps=config.rollout_length, returns=returns)


def _requesting_group(
    config: ActorConfig,
    context: WorkerContext,
    envs: EnvironmentThreads,
    requests: LaneRequests,
    evaluation: LaneEvaluation,
    *,
    loads: Sequence[Callable[[Parameters], None]] = (lambda _: None, lambda _: None),
) -> ThreadedEnvGroup:
    """Return a group whose lanes' requests ``evaluation`` answers. ``loads`` get the weights of each slot, in turn."""
    lanes = _lanes(config, context)
    states = [LaneStates(state_specs(config.network.state_sizes), 1) for _ in range(envs.num_envs)]
    first, second = (
        RequestingLanes(envs.spec, requests, number=number, load=load, **lanes, states=states)
        for number, load in enumerate(loads)
    )
    returns = _returns(config, envs.num_envs)
    return ThreadedEnvGroup(
        envs, (first, second), num_steps=config.rollout_length, returns=returns, evaluation=evaluation
    )


def _lanes(config: ActorConfig, context: WorkerContext) -> dict[str, Any]:
    """Return what an actor of one group of environments, or two that share its noise, need to know of its lanes."""
    ranks = config.environment_ranks_of(context.index)
    return {
        "num_steps": config.rollout_length,
        "num_lanes": len(ranks),
        "rng": _noise(config, context, 0),
        "exploration": _exploration(config, ranks),
    }


def _exploration(config: ActorConfig, ranks: range) -> Exploration:
    """Return how the environments with these ranks explore."""
    return Exploration(exponents=_exponents(config, ranks), pink=PinkNoise() if config.noise_color == "pink" else None)


def _exponents(config: ActorConfig, ranks: range) -> NDArray[np.float32] | None:
    """Return the power of the epsilon of each environment with these ranks; None if all have the same."""
    if not config.epsilon_spread:
        return None
    assert config.num_environments is not None, "the number of actors is known with another epsilon for each"
    return ape_x_exponents(ranks, config.num_environments, config.epsilon_spread)


def _noise(config: ActorConfig, context: WorkerContext, group: int) -> np.random.Generator:
    """Return the generator that a group's actions are drawn with.

    The first group draws what an actor without policy workers draws: so both choose the same actions.
    """
    key = (context.index, context.incarnation, group)[: 3 if group else 2]
    return np.random.default_rng(derived_seed(config.seed, "acting", *key))


def _returns(config: ActorConfig, num_lanes: int) -> DiscountedReturns | None:
    if config.return_discount is None:
        return None
    return DiscountedReturns(discount=config.return_discount, num_lanes=num_lanes)
