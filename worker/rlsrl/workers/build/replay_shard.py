"""Builds a buffer worker that is a shard of a rank's replay store. Without torch."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from rlsrl.api.resolved import BufferConfig, ShardConfig
from rlsrl.buffers.replay.write_back import WriteBack
from rlsrl.data.slots import SlotLayout
from rlsrl.runtime.ledger import Held, TrainerLedger
from rlsrl.streams.grpc_replay.shard_end import ShardConnection
from rlsrl.workers.build.samples import open_consumer
from rlsrl.workers.build.store_files import (
    draws_from,
    open_segments,
    remove_other_runs,
    remove_stores_from,
    replay_codec,
    row_form_of,
    stores_in,
)
from rlsrl.workers.context import WorkerContext
from rlsrl.workers.replay_shard import LIFE_ENV_STEPS, ReplayShard
from rlsrl.workers.shard_core import ShardCore
from rlsrl.workers.stored_transitions import StoredTransitions


def open_shard(
    config: BufferConfig,
    shard: ShardConfig,
    context: WorkerContext,
    slot: SlotLayout,
    ledger: TrainerLedger,
    resources: ExitStack,
) -> ShardCore:
    """Return the core of a buffer worker that is a shard, with what its file still has, and begin its ledger's life.

    Raises:
        ConfigurationError: the disk has no room for the store, or does not allow it.
        OSError: another process serves this buffer worker's endpoint.
    """
    store = open_shard_store(config, shard, context, slot, ledger, resources)
    upstream = open_consumer(
        config.serving(config.buffer_endpoints, context.index),
        context,
        resources,
        layout=slot,
        ledger=ledger,
        slots_per_producer=config.slots_per_actor,
        peer_timeout=config.peer_timeout_seconds,
        expected_producers=config.num_actors,
    )
    codec = replay_codec(config.environment, slot, shard.algorithm.chosen)
    core = ReplayShard(store, index=context.index, codec=codec, ledger=ledger, grant=upstream.grant)
    connection = ShardConnection(
        config.trainer_of(context.index),
        codec,
        token=context.token,
        tls=context.tls,
        find=context.directory.find,
        hello=core.hello,
        answers=core.answers,
    )
    return ShardCore(upstream=upstream, shard=core, connection=connection)


def open_shard_store(
    config: BufferConfig,
    shard: ShardConfig,
    context: WorkerContext,
    slot: SlotLayout,
    ledger: TrainerLedger,
    resources: ExitStack,
) -> StoredTransitions:
    """Open the store of a buffer worker that is a shard, with what its file still has, and begin its ledger's life.

    It is written back until ``resources`` is closed.

    Raises:
        ConfigurationError: the disk has no room for the store, or does not allow it.
    """
    algorithm, num_shards = shard.algorithm.chosen, len(config.buffer_endpoints)
    assert algorithm.draws_from is not None, "the algorithm replays"
    if shard.volume is not None:
        remove_other_runs(shard.volume, config.run_uid)
    elif context.index == 0:
        remove_stores_from(num_shards, shard.folder, context)
    opened = open_segments(
        shard.folder,
        context,
        stores_in(config.environment, slot, shard.algorithm, num_shards),
        outlives=True,
        former=ledger.former_life(None),
        step=0,
        env_steps=context.incarnation * LIFE_ENV_STEPS,
    )
    held = Held(untrained=opened.segments.count_untrained(), trained_since=0)
    ledger.resume(ledger.snapshot(), incarnation=context.incarnation, held=held, keeps=True)
    resources.enter_context(WriteBack(opened.write_back))

    def rewards(stored: NDArray[np.float32]) -> NDArray[np.float32]:
        clip = algorithm.reward_clip
        return stored if clip is None else np.clip(stored, -clip, clip)

    return StoredTransitions(
        opened,
        draws=draws_from(opened.segments, algorithm.draws_from),
        form=row_form_of(algorithm, rewards),
        ledger=ledger,
        metrics=context.metrics,
    )
