"""What an actor is made of that has its policy evaluated by policy workers. No torch, and no weights."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from rlsrl.api.resolved import ActorConfig
from rlsrl.data.inference import InferenceLayout
from rlsrl.data.slots import ProducerId, rollout_layout
from rlsrl.envs.returns import DiscountedReturns
from rlsrl.envs.vector import VectorEnv
from rlsrl.policies.asking import AskingActor
from rlsrl.runtime.ledger import ActorLedger
from rlsrl.streams.grpc_inference import GrpcInferenceClient
from rlsrl.streams.inference import InferenceClient
from rlsrl.streams.protocols import SampleProducer
from rlsrl.workers.build.common import derived_seed
from rlsrl.workers.build.environments import lockstep_environments
from rlsrl.workers.build.samples import open_producer
from rlsrl.workers.context import WorkerContext


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupParts:
    """One group of the ring: environments that fill one slot after another."""

    envs: VectorEnv
    actor: AskingActor
    returns: DiscountedReturns | None
    """Where rewards are scaled: keeps what they are scaled by."""


@dataclass(frozen=True, kw_only=True)
class RingParts:
    """What such an actor is made of."""

    groups: tuple[GroupParts, ...]
    client: InferenceClient
    producer: SampleProducer
    ledger: ActorLedger
    num_steps: int
    resources: ExitStack
    """Closes all of them, and the ledger's page."""


def build_ring(config: ActorConfig, context: WorkerContext) -> RingParts:
    """The parts. Nothing waits for a trainer or a policy worker.

    The actor's environments, in order of rank, are divided into groups of equal size.

    Raises:
        ConfigurationError: the environment cannot be made.
        IndexError: all environments belong to actors of lower indices.
    """
    ranks = config.environment_ranks_of(context.index)
    size = len(ranks) // config.ring_size
    with ExitStack() as resources:
        groups = tuple(
            _group(config, context, number, ranks[number * size : (number + 1) * size], resources)
            for number in range(config.ring_size)
        )
        env_spec = groups[0].envs.spec
        client = GrpcInferenceClient(
            config.inference_endpoints,
            token=context.token,
            tls=context.tls,
            layout=InferenceLayout.of(env_spec),
            home=context.index,
            find=context.directory.find,
        )
        resources.callback(client.close)
        page = context.open_ledger_page()
        resources.callback(page.close)
        ledger = ActorLedger(page)
        producer = open_producer(
            config.consumers_of(context.index),
            token=context.token,
            tls=context.tls,
            layout=rollout_layout(
                env_spec,
                num_steps=config.rollout_length,
                num_lanes=size,
                discounted_return=config.return_discount is not None,
            ),
            producer_id=ProducerId(index=context.index, incarnation=context.incarnation),
            ledger=ledger,
            directory=context.directory,
        )
        resources.callback(producer.close)
        return RingParts(
            groups=groups,
            client=client,
            producer=producer,
            ledger=ledger,
            num_steps=config.rollout_length,
            resources=resources.pop_all(),
        )


def _group(config: ActorConfig, context: WorkerContext, number: int, ranks: range, resources: ExitStack) -> GroupParts:
    envs = lockstep_environments(config, context, ranks)
    resources.callback(envs.close)
    # The first group draws what an actor without a ring draws: so both act alike.
    place = (context.index, context.incarnation, number)[: 3 if number else 2]
    rng = np.random.default_rng(derived_seed(config.seed, "acting", *place))
    return GroupParts(
        envs=envs,
        actor=AskingActor(envs.spec, num_steps=config.rollout_length, num_lanes=envs.num_envs, rng=rng),
        returns=None
        if config.return_discount is None
        else DiscountedReturns(discount=config.return_discount, num_lanes=envs.num_envs),
    )
