"""Builds what a trainer rank replays from, and rows to compile its step with."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import numpy as np

from rlsrl.algorithms.normalizer import ReplayNormalizer
from rlsrl.api.resolved import ReplayConfig, TrainerConfig
from rlsrl.buffers.replay.ratio import Pace, RatioLimiter
from rlsrl.buffers.replay.rows import IMPORTANCE
from rlsrl.data.slots import SlotLayout
from rlsrl.data.specs import Arrays
from rlsrl.parameters.protocols import TrainerState
from rlsrl.streams.protocols import SampleConsumer
from rlsrl.workers.build.common import derived_seed, limiter_states
from rlsrl.workers.build.replay_stores import share_of, store_path
from rlsrl.workers.build.store_files import (
    draws_from,
    drop_held,
    open_segments,
    remove_stores_from,
    row_form_of,
    stores_in,
    zero_rows,
)
from rlsrl.workers.context import WorkerContext
from rlsrl.workers.replay_experience import ReplayExperience, moments_of_uncounted
from rlsrl.workers.replay_store import Drawing, LocalStore
from rlsrl.workers.stored_transitions import OpenedStore
from rlsrl.workers.training_ledger import TrainingLedger


def open_store(
    config: TrainerConfig, context: WorkerContext, state: TrainerState | None, slot: SlotLayout, *, former: int | None
) -> OpenedStore | None:
    """Open a rank's store, before ``TrainerLedger.resume``; None if nothing is replayed, or buffer workers keep it.

    ``former``: the incarnation whose store may be used, see ``TrainerLedger.former_life``.

    Raises:
        ConfigurationError: the disk has no room for it, or does not allow it.
    """
    replay, settings = config.replay, config.algorithm.chosen.draws_from
    if replay is None:
        return None
    if replay.num_shards:  # of before an edit that added buffer workers; the ledger counts it as lost
        store_path(replay.folder, context.role, context.index).unlink(missing_ok=True)
        return None
    assert settings is not None, "the algorithm replays"
    counts = None if state is None else _counts_of(state, context.index)
    if counts is None:  # a store of a rank that the checkpoint does not know is of another time
        former = None
    if context.index == 0:
        remove_stores_from(config.num_trainers, replay.folder, context)
    return open_segments(
        replay.folder,
        context,
        stores_in(config.environment, slot, config.algorithm, config.num_trainers),
        outlives=replay.outlives,
        former=former,
        step=0 if state is None else state.version.step,
        env_steps=0 if state is None else int((counts or _counts_without_debt(state, config.num_trainers))["stored"]),
    )


def discard_store(config: TrainerConfig, context: WorkerContext) -> None:
    """Remove the store of a run that has ended, if a former life was killed before it did so, and count what it held.

    Nothing to do where nothing is replayed.
    """
    if config.replay is None:
        return
    store_path(config.replay.folder, context.role, context.index).unlink(missing_ok=True)
    with closing(context.open_ledger_page()) as page:
        drop_held(page, "end_of_run")


def _counts_of(state: TrainerState, rank: int) -> Mapping[str, Any] | None:
    """Return what ``ReplayExperience.state_dict`` of a rank said; None if the gang of the state had no such rank."""
    of_ranks = limiter_states(state)
    return of_ranks[rank] if rank < len(of_ranks) else None


def _counts_without_debt(state: TrainerState, num_ranks: int) -> Mapping[str, Any]:
    """Return counts for a rank that the gang of the state did not have: the run's updates are made, and were due.

    The rank counts an equal part of the run's env steps as its own, so that it is past the start if the run is.
    """
    updates = limiter_states(state)[0]["updates"]
    return {"stored": state.values["progress"]["env_steps"] // num_ranks, "due": updates, "updates": updates}


def replay_experience(
    config: TrainerConfig,
    replay: ReplayConfig,
    context: WorkerContext,
    state: TrainerState | None,
    opened: OpenedStore,
    consumer: SampleConsumer,
    ledger: TrainingLedger,
    *,
    rank: int = 0,
    normalizer: ReplayNormalizer | None = None,
) -> ReplayExperience:
    """Return a rank's experience, with the present settings and what its store holds.

    ``normalizer``: the learner's, see ``ReplayExperience``.
    """
    settings, segments = config.algorithm.chosen.draws_from, opened.segments
    assert settings is not None, "the algorithm replays"
    draws, limiter = draws_from(segments, settings), limiter_of(config, replay)
    if (counts := counts_from(config, state, rank)) is not None:
        limiter.load_state_dict(counts, stored=segments.env_steps, held=segments.num_transitions)
        draws.load_state_dict(counts.get("draws", {}))
    drawing = drawing_of(config, replay, rank=rank)
    normalizer = normalizer or ReplayNormalizer()
    form = row_form_of(config.algorithm.chosen, rewards=normalizer.rewards)
    return ReplayExperience(
        store=LocalStore(opened, draws=draws, form=form, drawing=drawing, ledger=ledger, metrics=context.metrics),
        limiter=limiter,
        drawing=drawing,
        grant=consumer.grant,
        ledger=ledger,
        metrics=context.metrics,
        counted=opened.env_steps,
        uncounted=moments_of_uncounted(opened, normalizer),
        num_ranks=config.num_trainers,
        normalizer=normalizer,
    )


def limiter_of(config: TrainerConfig, replay: ReplayConfig) -> RatioLimiter:
    """Return a rank's limiter, with nothing gathered."""
    settings = config.algorithm.chosen.draws_from
    assert settings is not None, "the algorithm replays"
    return RatioLimiter(
        pace_of(replay),
        start=share_of(settings, config.num_trainers).start,
        updates_per_step=replay.updates_per_step,
        steps_per_lane=config.rollout_length,
    )


def counts_from(config: TrainerConfig, state: TrainerState | None, rank: int) -> Mapping[str, Any] | None:
    """Return the counts with which a rank resumes from the state; None without one."""
    if state is None:
        return None
    return _counts_of(state, rank) or _counts_without_debt(state, config.num_trainers)


def pace_of(replay: ReplayConfig) -> Pace:
    """Return the pace of training and gathering."""
    return Pace(
        updates_per_env_step=replay.updates_per_env_step,
        bound=replay.most_updates_behind,
        most_lanes=replay.most_lanes,
        lanes_in_turn=replay.lanes_in_turn,
    )


def drawing_of(config: TrainerConfig, replay: ReplayConfig, *, rank: int = 0) -> Drawing:
    """Return what a training step of the rank draws."""
    settings = config.algorithm.chosen
    assert settings.draws_from is not None, "the algorithm replays"
    steps_of_row = config.rollout_length if config.network.state_sizes else 1
    return Drawing(
        updates=replay.updates_per_step,
        minibatch_rows=settings.minibatch_rows // (config.num_trainers * steps_of_row),
        by_priority=settings.draws_from.priorities is not None,
        seed=derived_seed(config.seed, "draws", *([rank] if rank else [])),
    )


def example_rows(config: TrainerConfig, replay: ReplayConfig, slot: SlotLayout) -> Arrays:
    """Return the rows of a training step, filled with zeros."""
    num_rows = drawing_of(config, replay).num_rows
    rows = zero_rows(config.environment, slot, config.algorithm.chosen, num_rows)
    return {**rows, IMPORTANCE: np.ones(num_rows, np.float32)}
