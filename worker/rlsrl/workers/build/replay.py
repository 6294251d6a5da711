"""Builds what a trainer rank replays from, and rows to compile its step with."""

from __future__ import annotations

import errno
import itertools
import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from rlsrl.algorithms.normalizer import ReplayNormalizer
from rlsrl.api.resolved import ReplayConfig, TrainerConfig
from rlsrl.api.spec import ReplaySpec
from rlsrl.buffers.replay.draws import Draws, PrioritizedDraws, UniformDraws
from rlsrl.buffers.replay.ratio import Pace, RatioLimiter
from rlsrl.buffers.replay.rows import IMPORTANCE, rows_of
from rlsrl.buffers.replay.segments import Segments
from rlsrl.buffers.replay.store_file import StoreFile
from rlsrl.data.slots import SlotLayout
from rlsrl.data.specs import Arrays
from rlsrl.parameters.protocols import TrainerState
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.runtime.ledger import LedgerPage, TrainerLedger, page_path
from rlsrl.streams.protocols import SampleConsumer
from rlsrl.workers.build.common import derived_seed, limiter_states
from rlsrl.workers.build.replay_stores import ReplayStores, capacity_field, replay_layout, share_of, store_path
from rlsrl.workers.context import WorkerContext
from rlsrl.workers.experience import TrainingLedger
from rlsrl.workers.replay_experience import ReplayExperience, moments_of_uncounted
from rlsrl.workers.replay_store import Drawing, LocalStore, OpenedStore


def open_store(
    config: TrainerConfig, context: WorkerContext, state: TrainerState | None, slot: SlotLayout, *, former: int | None
) -> OpenedStore | None:
    """Open a rank's store, before ``TrainerLedger.resume``; None if nothing is replayed.

    ``former``: the incarnation whose store may be used, see ``TrainerLedger.former_life``.

    Raises:
        ConfigurationError: the disk has no room for it, or does not allow it.
    """
    replay, settings = config.replay, config.algorithm.chosen.draws_from
    if replay is None:
        return None
    assert settings is not None, "the algorithm replays"
    layout = replay_layout(config.environment, slot, share_of(settings, config.num_trainers))
    path = store_path(replay.folder, context.role, context.index)
    counts = None if state is None else _counts_of(state, context.index)
    if counts is None:  # a store of a rank that the checkpoint does not know is of another time
        former = None
    if context.index == 0:
        _remove_stores_from(config.num_trainers, replay, context)
    try:
        file = StoreFile.open(path, layout, former=former, owner=context.incarnation)
    except OSError as error:
        stores = ReplayStores(
            field=capacity_field(config.algorithm),
            capacity=settings.capacity,
            number=config.num_trainers,
            layout=layout,
        )
        raise ConfigurationError(_why_not_opened(error, path, stores.part(config.num_trainers))) from error
    env_steps = 0 if state is None else int((counts or _counts_without_debt(state, config.num_trainers))["stored"])
    store = OpenedStore(
        segments=Segments(layout, file.content, env_steps=env_steps),
        file=file,
        outlives=replay.outlives,
        step=0 if state is None else state.version.step,
        env_steps=env_steps,
    )
    if file.why_empty is None:
        context.log.info("replay_store_found", transitions=store.segments.num_transitions)
    else:
        context.log.info("replay_store_empty", why=file.why_empty)
    return store


def discard_store(config: TrainerConfig, context: WorkerContext) -> None:
    """Remove the store of a run that has ended, if a former life was killed before it did so, and count what it held.

    Nothing to do where nothing is replayed.
    """
    if config.replay is None:
        return
    store_path(config.replay.folder, context.role, context.index).unlink(missing_ok=True)
    with closing(context.open_ledger_page()) as page:
        _drop_held(page, "end_of_run")


def _drop_held(page: LedgerPage, reason: str) -> None:
    """Count what a former life held in a store that is gone."""
    if held := page.record.counters["in_buffer"]:
        ledger = TrainerLedger(page)
        ledger.dropped(reason, held)
        ledger.end()


def _remove_stores_from(rank: int, replay: ReplayConfig, context: WorkerContext) -> None:
    """Remove the stores of this rank and of higher ones, which an earlier gang had, and count what they held.

    No later gang uses them. Ranks on other machines, whose pages are not here, have stores that end with their pods.
    """
    for gone in itertools.count(rank):
        store = store_path(replay.folder, context.role, gone)
        ledger = page_path(context.ledger_folder, context.role, gone)
        if not (store.exists() or ledger.exists()):
            return
        store.unlink(missing_ok=True)
        if ledger.exists():
            with closing(LedgerPage.open(ledger, context.role, gone)) as page:
                _drop_held(page, "evicted")


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


def _why_not_opened(error: OSError, path: Path, stores: ReplayStores) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(path.parent).free if path.parent.is_dir() else 0
        if (shortage := stores.shortage(free, f"on the disk at {path}")) is not None:
            return shortage
    return f"{stores.field}: {stores}, and the file cannot be made at {path}: {error.strerror}"


def replay_experience(
    config: TrainerConfig,
    replay: ReplayConfig,
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
    settings = share_of(settings, config.num_trainers)
    limiter = RatioLimiter(
        pace_of(replay),
        start=settings.start,
        updates_per_step=replay.updates_per_step,
        steps_per_lane=config.rollout_length,
    )
    draws = draws_from(segments, settings)
    if state is not None:
        counts = _counts_of(state, rank) or _counts_without_debt(state, config.num_trainers)
        limiter.load_state_dict(counts, stored=segments.env_steps, held=segments.num_transitions)
        draws.load_state_dict(counts.get("draws", {}))
    drawing = drawing_of(config, replay, rank=rank)
    normalizer = normalizer or ReplayNormalizer()
    return ReplayExperience(
        store=LocalStore(opened, draws=draws, drawing=drawing, ledger=ledger, rewards=normalizer.rewards),
        limiter=limiter,
        drawing=drawing,
        grant=consumer.grant,
        ledger=ledger,
        counted=opened.env_steps,
        uncounted=moments_of_uncounted(opened, normalizer),
        num_ranks=config.num_trainers,
        normalizer=normalizer,
    )


def draws_from(segments: Segments, settings: ReplaySpec) -> Draws:
    """Return the draws that the spec asks for."""
    if (priorities := settings.priorities) is None:
        return UniformDraws(segments)
    return PrioritizedDraws(segments, exponent=priorities.exponent, offset=priorities.offset)


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
    return Drawing(
        updates=replay.updates_per_step,
        minibatch_rows=settings.minibatch_rows // config.num_trainers,
        num_steps=settings.draws_from.n_step,
        discount=settings.discount,
        by_priority=settings.draws_from.priorities is not None,
        seed=derived_seed(config.seed, "draws", *([rank] if rank else [])),
    )


def example_rows(config: TrainerConfig, replay: ReplayConfig, slot: SlotLayout) -> Arrays:
    """Return the rows of a training step, filled with zeros."""
    drawing = drawing_of(config, replay)
    layout = replay_layout(config.environment, slot, ReplaySpec(capacity=1))
    segments = Segments(layout, bytearray(layout.nbytes))
    keys = np.zeros(drawing.num_rows, np.int64)
    rows = rows_of(segments, keys, num_steps=drawing.num_steps, discount=drawing.discount)
    return {**rows, IMPORTANCE: np.ones(drawing.num_rows, np.float32)}
