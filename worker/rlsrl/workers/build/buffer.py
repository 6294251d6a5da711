"""Build a buffer worker from its resolved config."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from rlsrl.api.resolved import BufferConfig
from rlsrl.api.role_names import TRAINER
from rlsrl.data.slots import ProducerId, rollout_layout
from rlsrl.data.specs import state_specs
from rlsrl.runtime.ledger import BufferLedger, ConsumerAccount, TrainerLedger
from rlsrl.workers.build.common import spec_of_environments
from rlsrl.workers.build.replay_shard import open_shard
from rlsrl.workers.build.samples import open_consumer, open_producer
from rlsrl.workers.context import WorkerContext
from rlsrl.workers.forwarder import BufferCore, Forwarder


@dataclass(frozen=True, kw_only=True)
class BufferParts:
    """The parts of a buffer worker."""

    core: BufferCore
    ledger: ConsumerAccount
    resources: ExitStack
    """Closes the streams that the core has not closed, and the ledger's page."""


def build_buffer(config: BufferConfig, context: WorkerContext) -> BufferParts:
    """Return the parts: first the ledger, then the stream to the trainers, then the endpoint for actors.

    Raises:
        ConfigurationError: the environment cannot be made, a slot is too large for the transport, or the disk has no
            room for a replay store.
        OSError: another process serves this buffer worker's endpoint.
    """
    layout = rollout_layout(
        spec_of_environments(config.environment, context),
        num_steps=config.rollout_length,
        num_lanes=config.lanes_per_slot,
        state=state_specs(config.network.state_sizes),
        discounted_return=config.has_discounted_return,
        episode_info=config.environment.episode_info,
    )
    with ExitStack() as resources:
        page = context.open_ledger_page()
        resources.callback(page.close)
        if config.replay is not None:
            counts = TrainerLedger(page)
            core = open_shard(config, config.replay, context, layout, counts, resources)
            return BufferParts(core=core, ledger=counts, resources=resources.pop_all())
        ledger = BufferLedger(page)
        downstream = open_producer(
            dict(enumerate(config.samples_endpoints)),
            consumers=TRAINER,
            token=context.token,
            tls=context.tls,
            layout=layout,
            producer_id=ProducerId(index=context.index, incarnation=context.incarnation),
            ledger=ledger,
            directory=context.directory,
        )
        resources.callback(downstream.close)
        upstream = open_consumer(
            config.serving(config.buffer_endpoints, context.index),
            context,
            resources,
            layout=layout,
            ledger=ledger,
            slots_per_producer=config.slots_per_actor,
            peer_timeout=config.peer_timeout_seconds,
            expected_producers=config.num_actors,
        )
        forwarder = Forwarder(
            upstream=upstream,
            downstream=downstream,
            num_lanes=config.lanes_per_slot,
            ledger=ledger,
            clock=context.clock,
        )
        return BufferParts(core=forwarder, ledger=ledger, resources=resources.pop_all())
