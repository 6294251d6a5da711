"""Experience that is kept and drawn again, while gathering keeps the ratio of updates to env steps."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from typing_extensions import override

from rlsrl.algorithms.base import ERRORS
from rlsrl.algorithms.learner import StepResult
from rlsrl.algorithms.normalizer import ReplayNormalizer, SampleMoments
from rlsrl.buffers.replay.ratio import Pace, RatioLimiter
from rlsrl.buffers.replay.rows import IMPORTANCE, fields_of, importance_of, largest_ratios
from rlsrl.data.episodes import EndedEpisodes
from rlsrl.data.slots import Slot
from rlsrl.data.version import Version
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.runtime.metrics import Metrics
from rlsrl.workers.experience import BATCH, BUFFER_WORKERS, Experience, TrainingBatch
from rlsrl.workers.progress import Progress, StopConditions
from rlsrl.workers.replay_store import Drawing, ReplayStore
from rlsrl.workers.stored_transitions import DrawnRows, OpenedStore, Settlement
from rlsrl.workers.training_ledger import TrainingLedger

_KEYS_AT_ONCE = 4096
"""Transitions that are copied at once to learn from a store."""


@dataclass(frozen=True, kw_only=True)
class ReplayBatch(TrainingBatch):
    """Rows for all minibatches of a training step, one after the other."""

    rows: DrawnRows

    @classmethod
    def of(cls, batch: TrainingBatch, rows: DrawnRows) -> Self:
        """Return the batch with rows."""
        return cls(
            arrays=rows.arrays,
            num_transitions=rows.num_transitions,
            oldest_version=batch.oldest_version,
            env_steps=batch.env_steps,
            episodes=batch.episodes,
            moments=batch.moments,
            rows=rows,
        )


def moments_of_uncounted(opened: OpenedStore, normalizer: ReplayNormalizer) -> SampleMoments:
    """Return what statistics learn from what is in the store and not in the run's progress.

    They do not learn from those of its transitions that newer ones have replaced.
    """
    if not opened.uncounted:
        return normalizer.joined(())
    keys = opened.segments.keys_after(opened.env_steps)
    parts = np.array_split(keys, 1 + len(keys) // _KEYS_AT_ONCE)
    samples = (fields_of(opened.segments, part, normalizer.fields) for part in parts)
    return normalizer.joined(map(normalizer.moments_of, samples))


class ReplayExperience(Experience):
    """Slots go into a store, and each training step draws from all that it holds."""

    def __init__(
        self,
        *,
        store: ReplayStore,
        limiter: RatioLimiter,
        drawing: Drawing,
        grant: Callable[[int, Version, int], None],
        ledger: TrainingLedger,
        metrics: Metrics,
        counted: int = 0,
        uncounted: SampleMoments | None = None,
        num_ranks: int = 1,
        normalizer: ReplayNormalizer | None = None,
    ) -> None:
        """Use a rank's store, and a limiter that counts what it holds already.

        Args:
            store: The rank's transitions.
            limiter: Keeps the ratio.
            drawing: What ``store`` draws for a training step.
            grant: Grants credits, see ``SampleConsumer.grant``.
            ledger: For checkpoints.
            metrics: Show the pace. The store shows what it holds, in this process or in buffer workers.
            counted: Env steps of this rank that the run's progress contains. The store may hold more: a former life
                stored them after the checkpoint.
            uncounted: What statistics learn from those further env steps.
            num_ranks: Of the gang.
            normalizer: The learner's; None: nothing is normalised.
        """
        self.max_policy_lag = None
        self._num_ranks = num_ranks
        self._store = store
        self._limiter = limiter
        self._drawing = drawing
        self._normalizer = normalizer if normalizer is not None else ReplayNormalizer()
        self._grant = grant
        self._ledger = ledger
        self._metrics = metrics
        self._counted = counted
        """Env steps of this rank that the run's progress contains: those of batches that were trained or passed."""
        self._changed = threading.Condition()
        """Guards all that follows, and the store."""
        further = store.env_steps - counted
        self._arrived = [(further, EndedEpisodes.joined([]))] if further else []
        """Env steps and episodes of the slots since the last batch."""
        self._moments = [uncounted] if uncounted is not None else []
        """What statistics learn from them."""
        self._turn: list[Slot] = []
        """Copies of the slots of this turn, until all are there."""
        self._oldest_arrived: Version | None = None
        """The oldest version that acted in them."""
        self._version: Version | None = None
        """The newest version for which credits were granted."""
        self._room = 0
        self._end_is_set = True
        """Whether ``expect`` was called since the last batch was counted."""
        self._closed = False
        self._age: float | None = None
        """Mean number of env steps that were stored after the transitions of the last draw."""
        self._show_pace()

    def _show_pace(self) -> None:
        metrics, limiter = self._metrics, self._limiter
        metrics.replay_start_missing.set(limiter.start_missing)
        metrics.replay_ratio_wanted.set(limiter.ratio / self._num_ranks)
        metrics.train_steps_behind.set(limiter.debt)
        metrics.train_steps_behind_limit.set(limiter.bound)

    @override
    def receive(self, slots: Sequence[Slot], *, oldest_outstanding: int | None) -> None:
        del oldest_outstanding  # a dead producer's credits go to others
        if self._limiter.takes_turns:
            self._receive_in_turn(slots)
            return
        for part in [[slot] for slot in slots] or [[]]:  # one at a time: the training thread may wait for the lock
            with self._changed:
                self._store_slots(part)

    def _receive_in_turn(self, slots: Sequence[Slot]) -> None:
        """Keep copies until all lanes of the turn are there, and store them at once, in the order of their credits."""
        with self._changed:
            self._turn += [
                replace(slot, arrays={name: array.copy() for name, array in slot.arrays.items()}) for slot in slots
            ]
            if sum(slot.num_lanes for slot in self._turn) >= self._limiter.outstanding:
                self._store_turn()

    def _store_turn(self) -> None:
        slots, self._turn = sorted(self._turn, key=lambda slot: slot.credit), []
        self._store_slots(slots)

    def _store_slots(self, slots: Sequence[Slot]) -> None:
        self._moments += [self._normalizer.moments_of(self._normalizer.samples_of(slot.arrays)) for slot in slots]
        for arrival in self._store.insert(slots):
            self._limiter.stored(arrival.env_steps, lanes=arrival.lanes, fresh=arrival.fresh)
            if arrival.env_steps or arrival.episodes.returns:
                self._arrived.append((arrival.env_steps, arrival.episodes))
            if arrival.oldest_version is not None:
                self._note_age(arrival.oldest_version)
        self._show_pace()
        self._changed.notify_all()

    def _note_age(self, oldest: Version) -> None:
        """Note the version of a slot's oldest action, unless an earlier attempt acted: its steps were rolled back."""
        if self._version is not None and oldest.attempt == self._version.attempt:
            self._oldest_arrived = oldest if self._oldest_arrived is None else min(oldest, self._oldest_arrived)

    @override
    def grant(self, version: Version) -> bool:
        with self._changed:
            self._version = version
            may_grant = self._store.takes_slots and not self._waits_for_the_end
            lanes = self._limiter.take() if may_grant else 0
            room, is_complete = self._limiter.room, self._limiter.is_complete
            if lanes or room != self._room:
                self._room = room
                self._grant(lanes, version, room)
        return is_complete

    @property
    def _waits_for_the_end(self) -> bool:
        """Whether the end of the run, which follows from what all ranks have counted, is to be set before a grant.

        In turns it is: what is granted may not depend on time.
        """
        is_open = self._store.env_steps > self._counted or not self._end_is_set
        return self._limiter.takes_turns and self._num_ranks > 1 and is_open

    @override
    def next_batch(self, timeout: float) -> TrainingBatch | None:
        """As ``Experience.next_batch``, but slots that arrive while training must wait come as a batch without rows."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._arrived or self._has_rows, timeout)
            if self._closed or not (self._has_rows or self._arrived):
                return None
            assert self._version is not None, "granted before"
            rows = self._store.draw(self._version.step) if self._has_rows else None
            arrived, self._arrived = self._arrived, []
            moments, self._moments = self._moments, []
            oldest, self._oldest_arrived = self._oldest_arrived or self._version, None
            if rows is not None:
                self._age = rows.mean_age
        batch = TrainingBatch(
            arrays={},
            num_transitions=0,
            oldest_version=oldest,
            env_steps=sum(env_steps for env_steps, _ in arrived),
            episodes=EndedEpisodes.joined([episodes for _, episodes in arrived]),
            moments=self._normalizer.joined(moments) if self._normalizer.fields else None,
        )
        return batch if rows is None else ReplayBatch.of(batch, rows)

    @property
    def _has_rows(self) -> bool:
        """Whether a training step is due and its rows are there."""
        if not self._limiter.may_train:
            return False
        # Statistics without a sample would leave the first rows as they are: what has arrived is learned first.
        if self._arrived and self._normalizer.is_empty:
            return False
        assert self._version is not None, "granted before"
        return self._store.is_ready(self._version.step)

    @property
    @override
    def waits_for(self) -> str:
        with self._changed:
            return BATCH if self._store.takes_slots else BUFFER_WORKERS

    @override
    def shared(self, batch: TrainingBatch) -> Mapping[str, Any]:
        if not isinstance(batch, ReplayBatch):
            return {"largest_ratios": []}
        return {"largest_ratios": largest_ratios(batch.rows.share, size=self._drawing.minibatch_rows)}

    @override
    def completed(self, batch: TrainingBatch, of_ranks: Sequence[Mapping[str, Any]]) -> TrainingBatch | None:
        """As ``Experience.completed``, with the rows' importance ratios under ``IMPORTANCE``. All ranks need rows."""
        ratios = [each["largest_ratios"] for each in of_ranks]
        if not isinstance(batch, ReplayBatch) or not all(ratios):
            return None
        importance = importance_of(batch.rows.share, ratios, size=self._drawing.minibatch_rows)
        return replace(batch, arrays={**batch.arrays, IMPORTANCE: importance})

    @override
    def trained(self, batch: TrainingBatch, result: StepResult) -> int:
        """As ``Experience.trained``.

        Raises:
            ConfigurationError: the algorithm has made another number of minibatches, or has no errors to draw by.
        """
        assert isinstance(batch, ReplayBatch), "others pass"
        if len(result.taken) != self._drawing.updates:
            raise ConfigurationError(
                f"the algorithm's schedule has {len(result.taken)} minibatches for {self._drawing.num_rows} rows; with "
                f"replay it needs {self._drawing.updates} of {self._drawing.minibatch_rows}"
            )
        if self._drawing.by_priority and result.errors is None:
            raise ConfigurationError(
                f"the algorithm is to draw by priority, and no loss has {ERRORS!r} among its metrics: those of its rows"
            )
        settlement = Settlement(
            step=result.step, keys=batch.rows.keys, trained_rows=result.trained_rows, errors=result.errors
        )
        with self._changed:
            self._counted += batch.env_steps
            self._end_is_set = False
            self._limiter.trained()
            self._show_pace()
            return self._store.settle(settlement)

    @override
    def passed(self, batch: TrainingBatch) -> None:
        with self._changed:
            self._counted += batch.env_steps
            self._end_is_set = False

    @property
    @override
    def is_behind(self) -> bool:
        with self._changed:
            return self._limiter.may_train

    @override
    def abandon(self, batch: TrainingBatch) -> None:
        """Nothing is lost: the transitions are in the store, and count there."""

    @override
    def expect(self, progress: Progress, stop: StopConditions) -> None:
        with self._changed:
            ends = []
            if stop.env_steps is not None:  # each rank gathers an equal part of what is left
                left = math.ceil((stop.env_steps - progress.env_steps) / self._num_ranks)
                ends.append(self._counted + left)
            if stop.train_steps is not None:
                ends.append(self._limiter.env_steps_for(stop.train_steps - progress.train_steps))
            self._end_is_set = True
            self._limiter.expect(0 if stop.now else min(ends, default=None))

    @override
    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._store_turn()

    @override
    def give_up(self, *, run_ended: bool) -> None:
        with self._changed:
            self._store.give_up(run_ended=run_ended)

    @override
    def sync(self) -> None:
        self._store.sync()

    @override
    def tune(self, pace: Pace | None) -> None:
        assert pace is not None, "transitions are replayed"
        with self._changed:
            self._limiter.tune(replace(pace, bound=max(pace.bound, self._limiter.least_bound(pace))))
            self._show_pace()

    @override
    def figures(self) -> Mapping[str, float]:
        with self._changed:
            figures = {
                "replay_transitions": float(self._store.num_transitions),
                "train_steps_behind": self._limiter.debt,
                "train_steps_behind_limit": self._limiter.bound,
            }
            return figures if self._age is None else {**figures, "replay_age": self._age}

    @override
    def ledger_snapshot(self) -> dict[str, Any]:
        return self._ledger.snapshot()

    @override
    def state_dict(self) -> dict[str, Any]:
        with self._changed:
            return {**self._limiter.state_dict(self._counted), **self._store.state_dict()}
