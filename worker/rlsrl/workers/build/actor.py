"""What an actor is made of."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from rlsrl.api.resolved import ActorConfig
from rlsrl.data.slots import ProducerId, rollout_layout
from rlsrl.envs.factory import make_environment
from rlsrl.envs.returns import DiscountedReturns
from rlsrl.envs.seeds import environment_seed
from rlsrl.envs.vector import LoopVectorEnv, VectorEnv
from rlsrl.parameters.protocols import ParameterSource
from rlsrl.policies.acting import RolloutActor
from rlsrl.policies.program import ActorProgram, ProgramActor
from rlsrl.runtime.ledger import ActorLedger
from rlsrl.streams.protocols import SampleProducer
from rlsrl.workers.build.common import PROGRAM_KEY, await_description, derived_seed, environment_source, torch_policy
from rlsrl.workers.build.parameters import open_parameter_source
from rlsrl.workers.build.samples import open_producer
from rlsrl.workers.context import WorkerContext


@dataclass(frozen=True, kw_only=True)
class ActorParts:
    """What an actor is made of."""

    envs: VectorEnv
    actor: RolloutActor
    producer: SampleProducer
    parameters: ParameterSource
    returns: DiscountedReturns | None
    """Where rewards are scaled: keeps what they are scaled by."""
    ledger: ActorLedger
    num_steps: int
    resources: ExitStack
    """Closes all of them, and the ledger's page."""


def build_actor(config: ActorConfig, context: WorkerContext, *, still_wanted: Callable[[], bool]) -> ActorParts | None:
    """An actor's parts; waits for a trainer to say how its policy is evaluated. None if no longer wanted meanwhile.

    Raises:
        ConfigurationError: the environment or the user's network cannot be made.
        IndexError: all environments belong to actors of lower indices.
    """
    ranks = config.environment_ranks_of(context.index)
    source = environment_source(config.environment)
    with ExitStack() as resources:
        envs = LoopVectorEnv(
            lambda: make_environment(source),
            seeds=[environment_seed(config.seed, rank, context.incarnation) for rank in ranks],
            first_rank=ranks.start,
            max_decorrelation_steps=config.max_decorrelation_steps,
        )
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
        return ActorParts(
            envs=envs,
            actor=_rollout_actor(description, config, context, envs),
            producer=producer,
            parameters=parameters,
            returns=_returns(config, envs),
            ledger=ledger,
            num_steps=config.rollout_length,
            resources=resources.pop_all(),
        )


def _returns(config: ActorConfig, envs: VectorEnv) -> DiscountedReturns | None:
    if config.return_discount is None:
        return None
    return DiscountedReturns(discount=config.return_discount, num_lanes=envs.num_envs)


def _rollout_actor(
    description: dict[str, object], config: ActorConfig, context: WorkerContext, envs: VectorEnv
) -> RolloutActor:
    """The torch-free program where the policy exports one, else torch in this process."""
    rng = np.random.default_rng(derived_seed(config.seed, "acting", context.index, context.incarnation))
    program = description[PROGRAM_KEY]
    if isinstance(program, dict):
        return ProgramActor(
            ActorProgram.from_json(program), num_steps=config.rollout_length, num_lanes=envs.num_envs, rng=rng
        )
    from rlsrl.policies.torch_policy import TorchActor

    policy = torch_policy(config.network, envs.spec, seed=config.seed)
    return TorchActor(policy, num_steps=config.rollout_length, num_lanes=envs.num_envs, rng=rng)
