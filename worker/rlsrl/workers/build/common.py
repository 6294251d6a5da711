"""Parts that several roles are built from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rlsrl.api.spec import ExperimentSpec, Network, NetworkOutputs, WorkerEnvironment
from rlsrl.data.specs import EnvSpec, state_specs
from rlsrl.envs.factory import AtariOptions, EnvironmentSource, environment_interface
from rlsrl.envs.http.options import HttpOptions
from rlsrl.envs.interface import EnvironmentInterface
from rlsrl.envs.place import INSPECTION, EnvironmentPlace
from rlsrl.envs.unreachable import EnvironmentUnreachable
from rlsrl.parameters.protocols import ParameterSource, SourceTimeout, TrainerState
from rlsrl.policies.acting import LocalActor, PolicyActor
from rlsrl.policies.exported import ExportedActor
from rlsrl.policies.numpy_policy import NumpyActor
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.workers.context import WorkerContext
from rlsrl.workers.server_waits import ServerWaitReport

if TYPE_CHECKING:
    import torch

    from rlsrl.policies.effort import NetworkEffort
    from rlsrl.policies.torch_policy import TorchPolicy

EXPORTED_ACTOR_KEY = "program"
"""Key of the exported actor in the broadcast's description and in a version's metadata. None: the network has none."""
INTERFACE_KEY = "environment"
"""Key of the environments' interface there."""

SERVER_SECONDS = 1.0
"""How long a worker waits for an environment's server between two looks at its membership."""
DESCRIPTION_SECONDS = 0.2
"""How long a worker waits for the trainer's description between two checks for exit."""

SeedPurpose = Literal["network", "minibatches", "acting", "algorithm", "draws"]
_DOMAINS: dict[SeedPurpose, int] = {"network": 11, "minibatches": 12, "acting": 13, "algorithm": 14, "draws": 15}


def limiter_states(state: TrainerState) -> Sequence[Mapping[str, Any]]:
    """Return what ``Experience.state_dict`` has said, by rank. States of before each rank's was stored have one."""
    stored: Sequence[Mapping[str, Any]] = state.values.get("limiters") or [state.values["limiter"]]
    return stored


def derived_seed(seed: int, purpose: SeedPurpose, *key: int) -> int:
    """Return the seed of one use of randomness, unrelated to the seeds of other uses and keys."""
    return int(np.random.SeedSequence(seed, spawn_key=(_DOMAINS[purpose], *key)).generate_state(1, np.uint32)[0])


def environment_source(
    environment: WorkerEnvironment, *, rank: int = 0, place: EnvironmentPlace = INSPECTION
) -> EnvironmentSource:
    """Return how one of the experiment's environments is made; by default an inspection.

    Args:
        environment: The environment of the experiment.
        rank: Selects the values of ``kwargsByRank``.
        place: Passed to the environment if it asks for its place.
    """
    atari = environment.atari
    return EnvironmentSource(
        id=environment.id,
        factory=environment.factory,
        http=None if environment.http is None else HttpOptions(**environment.http.model_dump()),
        kwargs={**environment.kwargs, **environment.kwargs_at(rank)},
        place=place if environment.pass_place else None,
        atari=None
        if atari is None
        else AtariOptions(
            frame_skip=atari.frame_skip,
            screen_size=atari.screen_size,
            noop_max=atari.noop_max,
            terminal_on_life_loss=atari.terminal_on_life_loss,
        ),
        max_episode_steps=environment.max_episode_steps,
        frame_stack=environment.frame_stack,
        action_mask=environment.action_mask,
        vector_actions=environment.vector_actions,
    )


def spec_of_environments(environment: WorkerEnvironment, context: WorkerContext) -> EnvSpec:
    """Return the spec of ``interface_of_environments``, and raise its errors."""
    return interface_of_environments(environment, context).spec


def interface_of_environments(environment: WorkerEnvironment, context: WorkerContext) -> EnvironmentInterface:
    """Return the interface of the experiment's environments, for a worker that steps none. Makes one and closes it.

    The making counts as waiting: if it hangs, the run stands still. While the environment's server is away, it waits;
    SIGTERM ends a process that is not configured yet.

    Raises:
        ConfigurationError: the environment cannot be made, or a space is not supported.
        EnvironmentFailed: the environment's own code raised another error.
        JoinError: the worker lost its membership meanwhile.
    """
    report = ServerWaitReport(context)
    with context.waiting("environment"):
        while True:
            try:
                found = environment_interface(environment_source(environment))
            except EnvironmentUnreachable as error:
                report(1, str(error))
                while not error.wait(SERVER_SECONDS):
                    context.join_session.check()
            else:
                report(0, "")
                return found


def await_description(
    parameters: ParameterSource, context: WorkerContext, still_wanted: Callable[[], bool]
) -> dict[str, object] | None:
    """Wait for the trainer's description of its policy and return it, or None once this worker is no longer wanted.

    Raises:
        JoinError: the worker lost its membership meanwhile.
    """
    with context.waiting("trainer"):
        while still_wanted():
            context.join_session.check()
            try:
                return parameters.description(timeout=DESCRIPTION_SECONDS)
            except SourceTimeout:
                continue
    return None


def exported_actor(description: Mapping[str, object]) -> ExportedActor | None:
    """Return the exported actor of a broadcast's description or a version's metadata, or None if it has none."""
    exported = description.get(EXPORTED_ACTOR_KEY)
    return ExportedActor.from_json(exported) if isinstance(exported, dict) else None


def environment_interface_of(metadata: Mapping[str, object]) -> EnvironmentInterface:
    """Return the environments' interface of a version's metadata.

    Raises:
        CodecError: it is missing or damaged.
    """
    return EnvironmentInterface.from_json(metadata.get(INTERFACE_KEY))  # type: ignore[arg-type]  # from_json checks


def local_actor(
    exported: ExportedActor | None,
    env_spec: EnvSpec,
    *,
    make_policy: Callable[[], TorchPolicy],
    num_steps: int,
    num_lanes: int,
    rng: np.random.Generator,
    greedy: bool,
) -> LocalActor:
    """Return an actor, without torch if the version has an exported form: importing torch takes a second.

    ``make_policy`` makes its policy otherwise; the other arguments are those of ``DistributionActor``.
    """
    if exported is not None:
        return NumpyActor(exported, num_steps=num_steps, num_lanes=num_lanes, rng=rng, greedy=greedy)
    return PolicyActor(make_policy(), env_spec, num_steps=num_steps, num_lanes=num_lanes, rng=rng, greedy=greedy)


def torch_policy(
    network: Network, env_spec: EnvSpec, *, outputs: NetworkOutputs, seed: int, device: torch.device | None = None
) -> TorchPolicy:
    """Return the experiment's policy with initial weights by its seed, on that device or the CPU. Imports torch.

    ``outputs`` are those that the algorithm trains.

    Raises:
        ConfigurationError: the user's own network cannot be made, or its outputs do not fit.
    """
    from rlsrl.policies.build import build_network
    from rlsrl.policies.device import CPU
    from rlsrl.policies.factories import built_in
    from rlsrl.policies.torch_policy import TorchPolicy
    from rlsrl.runtime.references import load_callable

    factory: Callable[..., Any]
    kwargs: Mapping[str, Any] = {}
    if network.custom is not None:
        factory = load_callable(network.custom.factory, where="network factory")
        kwargs = network.custom.kwargs
    else:
        factory = built_in(network, outputs)
    network_seed, on = derived_seed(seed, "network"), CPU if device is None else device
    module = build_network(factory, env_spec, kwargs, seed=network_seed, device=on, outputs=outputs)
    policy = TorchPolicy(module, env_spec, outputs=outputs)
    if policy.state != state_specs(network.state_sizes):
        raise ConfigurationError(
            f"policy.network.custom.state is {network.state_sizes}, and the network's state_sizes are "
            f"{ {name: spec.size for name, spec in policy.state.items()} }; they must be equal"
        )
    return policy


def effort_of(spec: ExperimentSpec, env_spec: EnvSpec) -> NetworkEffort:
    """Return the work of an experiment's networks, for ``rlsrl size``. Imports torch.

    Raises:
        ConfigurationError: see ``torch_policy``.
    """
    from rlsrl.policies.effort import network_effort

    algorithm = spec.algorithm.chosen
    policy = torch_policy(spec.policy.network, env_spec, outputs=algorithm.outputs, seed=spec.seed)
    return network_effort(policy, critic=algorithm.critic_network)
