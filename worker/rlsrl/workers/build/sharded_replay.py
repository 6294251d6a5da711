"""Builds a rank whose replay store is in shards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing

from typing_extensions import override

from rlsrl.api.resolved import ReplayConfig, TrainerConfig
from rlsrl.data.slots import ProducerId, Slot, SlotLayout
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import TrainerState
from rlsrl.runtime.addresses import own_address
from rlsrl.streams.grpc_replay.rank_end import ShardServer
from rlsrl.streams.protocols import SampleConsumer
from rlsrl.workers.build.common import limiter_states
from rlsrl.workers.build.replay import counts_from, drawing_of, limiter_of
from rlsrl.workers.build.store_files import replay_codec
from rlsrl.workers.context import WorkerContext
from rlsrl.workers.replay_experience import ReplayExperience
from rlsrl.workers.sharded_store import ShardedStore, known_shards
from rlsrl.workers.training_ledger import TrainingLedger


class ShardSamples(SampleConsumer):
    """The sample stream of a rank whose actors post to shards: it brings no slots, and waits for the shards."""

    def __init__(self, server: ShardServer, store: ShardedStore) -> None:
        self._server = server
        self._store = store

    @override
    def grant(self, num_lanes: int, min_version: Version, room: int = 0) -> None:
        self._store.grant(num_lanes, min_version, room)

    @override
    def receive(self, max_items: int, timeout: float) -> Sequence[Slot]:
        del max_items
        if timeout > 0:
            self._server.wait(timeout)
        return ()

    @override
    def release(self, slot: Slot) -> None:
        raise ValueError(f"{slot} is not of this stream, which has no slots")

    @property
    @override
    def outstanding(self) -> tuple[int, ...]:
        return ()

    @property
    @override
    def producers(self) -> tuple[ProducerId, ...]:
        return ()

    @override
    def close(self) -> None:
        """Nothing ends: the shards have to hear of the end of the run, later. The server's owner closes it."""


def open_sharded_replay(
    config: TrainerConfig,
    replay: ReplayConfig,
    context: WorkerContext,
    state: TrainerState | None,
    slot: SlotLayout,
    ledger: TrainingLedger,
    resources: ExitStack,
    *,
    rank: int,
) -> tuple[SampleConsumer, ReplayExperience]:
    """Return a rank's stream and experience, whose store is in its shards. ``resources`` closes the server.

    Raises:
        OSError: another process serves the rank's endpoint.
    """
    codec = replay_codec(config.environment, slot, config.algorithm.chosen)
    drawing, counts = drawing_of(config, replay, rank=rank), counts_from(config, state, rank)
    counted = 0 if counts is None else int(counts["stored"])
    known = known_shards([] if state is None else limiter_states(state))
    shards = range(rank, replay.num_shards * config.num_trainers, config.num_trainers)
    server = ShardServer(
        own_address(config.serving(config.samples_endpoints, context.index)),
        codec,
        shards=shards,
        lives={int(index): shard["life"] for index, shard in known.items()},
        token=context.token,
        tls=context.tls,
        peer_timeout=config.peer_timeout_seconds,
        on_unauthenticated=context.count_unauthenticated,
    )
    resources.enter_context(closing(server))
    store = ShardedStore(
        server,
        codec=codec,
        drawing=drawing,
        indices=shards,
        lanes_per_slot=replay.lanes_per_grant,
        step=0 if state is None else state.version.step,
        state={"arrived": counted if counts is None else counts.get("arrived", counted), "shards": known},
        metrics=context.metrics,
    )
    limiter = limiter_of(config, replay)
    if counts is not None:
        limiter.load_state_dict(counts, stored=store.env_steps, held=0)
    samples = ShardSamples(server, store)
    experience = ReplayExperience(
        store=store,
        limiter=limiter,
        drawing=drawing,
        grant=samples.grant,
        ledger=ledger,
        metrics=context.metrics,
        counted=counted,
        num_ranks=config.num_trainers,
    )
    return samples, experience
