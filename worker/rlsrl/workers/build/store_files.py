"""Opens stores of replayed transitions, for trainer ranks and for buffer workers, which have no torch."""

from __future__ import annotations

import errno
import itertools
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlsrl.api.spec import AlgorithmSettings, AlgorithmSpec, Environment, ReplaySpec
from rlsrl.buffers.replay.checksums import drop_torn
from rlsrl.buffers.replay.draws import Draws, PrioritizedDraws, UniformDraws
from rlsrl.buffers.replay.rows import RowForm, as_stored, rows_of
from rlsrl.buffers.replay.segments import Segments
from rlsrl.buffers.replay.store_file import SUFFIX, StoreFile
from rlsrl.data.slots import SlotLayout
from rlsrl.data.specs import Arrays, ArraySpec
from rlsrl.rpc.codec import MAX_HEADER_BYTES
from rlsrl.rpc.settings import MAX_MESSAGE_BYTES
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.runtime.ledger import LedgerPage, TrainerLedger, page_path, read_pages
from rlsrl.streams.grpc_replay.messages import ReplayCodec
from rlsrl.workers.build.replay_stores import ReplayStores, capacity_field, replay_layout, share_of, store_path
from rlsrl.workers.context import WorkerContext
from rlsrl.workers.stored_transitions import OpenedStore

FOUND = "replay_store_found"
"""The event in a worker's log if its store has what a former life kept."""
FOUND_IN_PART = "replay_store_in_part"
"""The event if the machine was lost meanwhile: only some of the transitions may be left."""


def open_segments(
    folder: str,
    context: WorkerContext,
    stores: ReplayStores,
    *,
    outlives: bool,
    former: int | None,
    step: int,
    env_steps: int,
) -> OpenedStore:
    """Open the store of a worker in its file. ``stores`` has those of all workers of the role.

    ``former``: as for ``open_store``. ``outlives``, ``step`` and ``env_steps``: as in ``OpenedStore``, and the last two
    those of an empty store.

    Raises:
        ConfigurationError: the disk has no room for it, or does not allow it.
    """
    path = store_path(folder, context.role, context.index)
    try:
        file = StoreFile.open(path, stores.layout, former=former, owner=context.incarnation)
    except OSError as error:
        raise ConfigurationError(_why_not_opened(error, path, stores.part(stores.number))) from error
    recovered = drop_torn(stores.layout, file.content, env_steps=env_steps) if file.is_in_doubt else None
    if recovered is not None:
        file.believe()
    segments = Segments(stores.layout, file.content, env_steps=env_steps)
    store = OpenedStore(segments=segments, file=file, outlives=outlives, step=step, env_steps=env_steps)
    if recovered is not None:
        context.log.warning(FOUND_IN_PART, transitions=recovered.found, of=recovered.marked)
    elif file.why_empty is None:
        context.log.info(FOUND, transitions=store.segments.num_transitions)
    else:
        context.log.info("replay_store_empty", why=file.why_empty)
    return store


def remove_other_runs(volume: str, run_uid: str) -> None:
    """Remove the folders of other runs from a worker's own volume.

    An experiment that began again from step 0, or one that has the claim of a deleted one, needs their room.
    """
    for folder in Path(volume).glob("*"):
        if folder.name != run_uid:
            shutil.rmtree(folder)


def remove_stores_from(index: int, folder: str, context: WorkerContext) -> None:
    """Remove the stores of this index and of higher ones, which an earlier spec had, and count what they held.

    No later life uses them. Workers on other machines, whose pages are not here, have stores that end with their pods.
    """
    for gone in itertools.count(index):
        store, ledger = store_path(folder, context.role, gone), page_path(context.ledger_folder, context.role, gone)
        if not (store.exists() or ledger.exists()):
            return
        store.unlink(missing_ok=True)
        if ledger.exists():
            with closing(LedgerPage.open(ledger, context.role, gone)) as page:
                drop_held(page, "evicted")


def discard_stores(folder: Path, ledger_folder: Path) -> None:
    """Remove all stores of a run that has ended on one machine, and count what they held. No worker of it may live.

    Most remove their own. A buffer worker that an edit took away, or that died before it heard of the end, does not.
    """
    for record in read_pages(ledger_folder):
        if record.keeps:
            path = page_path(ledger_folder, record.role, record.index)
            with closing(LedgerPage.open(path, record.role, record.index)) as page:
                drop_held(page, "end_of_run")
    for store in folder.glob(f"*{SUFFIX}"):
        store.unlink()


def drop_held(page: LedgerPage, reason: str) -> None:
    """Count what a former life held in a store that is gone."""
    if held := page.record.counters["in_buffer"]:
        ledger = TrainerLedger(page)
        ledger.dropped(reason, held)
        ledger.end()


def _why_not_opened(error: OSError, path: Path, stores: ReplayStores) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(path.parent).free if path.parent.is_dir() else 0
        if (shortage := stores.shortage(free, f"on the disk at {path}")) is not None:
            return shortage
    return f"{stores.field}: {stores}, and the file cannot be made at {path}: {error.strerror}"


def stores_in(environment: Environment, slot: SlotLayout, algorithm: AlgorithmSpec, number: int) -> ReplayStores:
    """Return so many stores with equal parts of the capacity."""
    settings = algorithm.chosen.draws_from
    assert settings is not None, "the algorithm replays"
    return ReplayStores(
        field=capacity_field(algorithm),
        capacity=settings.capacity,
        number=number,
        layout=replay_layout(environment, slot, share_of(settings, number)),
    )


def draws_from(segments: Segments, settings: ReplaySpec) -> Draws:
    """Return the draws that the spec asks for."""
    if (priorities := settings.priorities) is None:
        return UniformDraws(segments)
    return PrioritizedDraws(segments, exponent=priorities.exponent, offset=priorities.offset)


def row_form_of(settings: AlgorithmSettings, rewards: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> RowForm:
    """Return the form of the rows that the algorithm trains on; ``rewards``: see ``RowForm.rewards``."""
    assert settings.draws_from is not None, "the algorithm replays"
    return RowForm(
        num_steps=settings.draws_from.n_step,
        discount=settings.discount,
        rewards=rewards,
        burn_in=settings.draws_burn_in,
    )


def replay_codec(environment: Environment, slot: SlotLayout, settings: AlgorithmSettings) -> ReplayCodec:
    """Return the messages between a rank and its shards, which must have the same rows.

    Raises:
        ConfigurationError: a row is larger than a message may be.
    """
    assert settings.draws_from is not None, "the algorithm replays"
    rows = zero_rows(environment, slot, settings, 1)
    fields = {name: ArraySpec(shape=each.shape[1:], dtype=each.dtype.name) for name, each in rows.items()}
    codec = ReplayCodec(fields, [settings.draws_from.model_dump(), settings.discount, settings.reward_clip])
    if codec.row_bytes > (allowed := MAX_MESSAGE_BYTES - MAX_HEADER_BYTES):
        raise ConfigurationError(
            f"a drawn row has {codec.row_bytes:,} bytes, and bufferWorkers send at most {allowed:,} in a message; "
            "lower actors.rolloutLength, or set burnIn to false"
        )
    return codec


def zero_rows(environment: Environment, slot: SlotLayout, settings: AlgorithmSettings, num_rows: int) -> Arrays:
    """Return so many rows of the form that the algorithm trains on, of zeros."""
    layout = replay_layout(environment, slot, ReplaySpec(capacity=1))
    segments = Segments(layout, bytearray(layout.nbytes))
    return rows_of(segments, np.zeros(num_rows, np.int64), row_form_of(settings, rewards=as_stored))
