"""What an actor is made of."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from rlsrl.api.resolved import ActorConfig
from rlsrl.data.slots import ProducerId, rollout_layout
from rlsrl.envs.returns import DiscountedReturns
from rlsrl.envs.threads import EnvironmentThreads
from rlsrl.envs.vector import VectorEnv
from rlsrl.parameters.protocols import ParameterSource
from rlsrl.policies.acting import RolloutActor
from rlsrl.policies.exported import ExportedActor, NumpyActor
from rlsrl.policies.lanes import NumpyLanes
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.runtime.ledger import ActorLedger
from rlsrl.streams.protocols import SampleProducer
from rlsrl.workers.build.common import EXPORTED_ACTOR_KEY, await_description, derived_seed, torch_policy
from rlsrl.workers.build.environments import environment_threads, lockstep_environments
from rlsrl.workers.build.parameters import open_parameter_source
from rlsrl.workers.build.samples import open_producer
from rlsrl.workers.context import WorkerContext
from rlsrl.workers.rollout import LockstepRollout, Rollout, ThreadedRollout

Environments = VectorEnv | EnvironmentThreads
"""Of an actor: stepped together, or each by itself."""


@dataclass(frozen=True, kw_only=True)
class ActorParts:
    """What an actor is made of."""

    rollout: Rollout
    producer: SampleProducer
    parameters: ParameterSource
    returns: DiscountedReturns | None
    """Where rewards are scaled: keeps what they are scaled by."""
    ledger: ActorLedger
    resources: ExitStack
    """Closes all of them, and the ledger's page: slots are left alone first."""


def build_actor(config: ActorConfig, context: WorkerContext, *, still_wanted: Callable[[], bool]) -> ActorParts | None:
    """An actor's parts; waits for a trainer to say how its policy is evaluated. None if no longer wanted meanwhile.

    Raises:
        ConfigurationError: the environment or the user's network cannot be made, or they cannot be used as asked for.
        IndexError: all environments belong to actors of lower indices.
    """
    ranks = config.environment_ranks_of(context.index)
    make = environment_threads if config.vectorization == "threads" else lockstep_environments
    with ExitStack() as resources:
        envs: Environments = make(config, context, ranks)
        resources.callback(envs.close)
        parameters = open_parameter_source(config, context.token, context.tls)
        resources.callback(parameters.close)
        description = await_description(parameters, context, still_wanted)
        if description is None:
            return None
        page = context.open_ledger_page()
        resources.callback(page.close)
        ledger = ActorLedger(page)
        producer = open_producer(
            config.consumers_of(context.index),
            token=context.token,
            tls=context.tls,
            layout=rollout_layout(
                envs.spec,
                num_steps=config.rollout_length,
                num_lanes=envs.num_envs,
                discounted_return=config.return_discount is not None,
            ),
            producer_id=ProducerId(index=context.index, incarnation=context.incarnation),
            ledger=ledger,
            directory=context.directory,
        )
        resources.callback(producer.close)
        rollout = _rollout(description, config, context, envs)
        resources.callback(rollout.abandon)
        return ActorParts(
            rollout=rollout,
            producer=producer,
            parameters=parameters,
            returns=_returns(config, envs),
            ledger=ledger,
            resources=resources.pop_all(),
        )


def _returns(config: ActorConfig, envs: Environments) -> DiscountedReturns | None:
    if config.return_discount is None:
        return None
    return DiscountedReturns(discount=config.return_discount, num_lanes=envs.num_envs)


def _rollout(
    description: dict[str, object], config: ActorConfig, context: WorkerContext, envs: Environments
) -> Rollout:
    """The policy is evaluated by the torch-free program where it exports one, else by torch in this process."""
    rng = np.random.default_rng(derived_seed(config.seed, "acting", context.index, context.incarnation))
    given = description[EXPORTED_ACTOR_KEY]
    program = ExportedActor.from_json(given) if isinstance(given, dict) else None
    num_steps, num_lanes = config.rollout_length, envs.num_envs
    if isinstance(envs, EnvironmentThreads):
        if program is None:
            raise ConfigurationError(
                "actors.vectorization: threads evaluate the policy without PyTorch, and policy.network exports nothing "
                "that could be evaluated so (networks.ExportableNetwork); allowed are loop and native"
            )
        one, another = (NumpyLanes(program, num_steps=num_steps, num_lanes=num_lanes, rng=rng) for _ in range(2))
        return ThreadedRollout(envs, (one, another), num_steps=num_steps)
    if program is not None:
        actor: RolloutActor = NumpyActor(program, num_steps=num_steps, num_lanes=num_lanes, rng=rng)
    else:
        from rlsrl.policies.torch_policy import TorchActor

        policy = torch_policy(config.network, envs.spec, seed=config.seed)
        actor = TorchActor(policy, num_steps=num_steps, num_lanes=num_lanes, rng=rng)
    return LockstepRollout(envs, actor, num_steps=num_steps)
