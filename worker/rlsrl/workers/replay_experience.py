"""Experience that is kept and drawn again, while gathering keeps the ratio of updates to env steps."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.algorithms.base import ERRORS
from rlsrl.algorithms.learner import StepResult
from rlsrl.algorithms.normalizer import ReplayNormalizer, SampleMoments
from rlsrl.buffers.replay.draws import Drawn, Draws
from rlsrl.buffers.replay.layout import FIRST_TRAINED
from rlsrl.buffers.replay.ratio import Pace, RatioLimiter
from rlsrl.buffers.replay.rows import IMPORTANCE, fields_of, importance_of, largest_ratios, rows_of
from rlsrl.buffers.replay.segments import Indices, Segments
from rlsrl.buffers.replay.store_file import StoreFile
from rlsrl.data.episodes import EndedEpisodes
from rlsrl.data.slots import Slot
from rlsrl.data.version import Version
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.runtime.ledger import Held
from rlsrl.workers.experience import Experience, TrainingBatch, TrainingLedger
from rlsrl.workers.progress import Progress, StopConditions

_KEYS_AT_ONCE = 4096
"""Transitions that are copied at once to learn from a store."""


class _Arrived(NamedTuple):
    """What has arrived, and belongs to the next batch."""

    env_steps: int
    episodes: EndedEpisodes
    moments: SampleMoments


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """What a training step draws."""

    updates: int
    """Minibatches of a training step."""
    minibatch_rows: int
    """Transitions of this rank's part of a minibatch."""
    num_steps: int
    """Steps of a row's rewards: see ``rows.rows_of``."""
    discount: float
    by_priority: bool = False
    """Whether priorities follow from the errors of trained rows."""
    seed: int = 0
    """Decides the rank's draws of each training step."""

    @property
    def num_rows(self) -> int:
        """Rows of a training step."""
        return self.updates * self.minibatch_rows


@dataclass(frozen=True, kw_only=True)
class ReplayBatch(TrainingBatch):
    """Rows for all minibatches of a training step, one after the other."""

    keys: Indices
    """The transitions' keys, [N]."""
    share: NDArray[np.float64]
    """The probability with which each was drawn from this rank's store, [N]."""


@dataclass(frozen=True, kw_only=True)
class ReplayStore:
    """A rank's store in its file, with what a former life of the trainer left."""

    segments: Segments
    file: StoreFile
    outlives: bool
    """Whether the file outlives the trainer's machine or pod, and not only its process."""
    step: int
    """The training step from which the rank resumes."""
    env_steps: int
    """The rank's env steps that the run's progress contains at that step."""

    def arrived(self, normalizer: ReplayNormalizer) -> list[_Arrived]:
        """Return what is in the store and not in the run's progress. The first batch has it.

        Statistics do not learn from those of its transitions that newer ones have replaced.
        """
        if not self.uncounted:
            return []
        keys, of_none = self.segments.keys_after(self.env_steps), EndedEpisodes.joined([])
        parts = np.array_split(keys, 1 + len(keys) // _KEYS_AT_ONCE)
        samples = (fields_of(self.segments, part, normalizer.fields) for part in parts)
        moments = normalizer.joined(map(normalizer.moments_of, samples))
        return [_Arrived(self.uncounted, of_none, moments)]

    @property
    def held(self) -> Held:
        """What the former life left, before ``forget_training``."""
        return Held(
            untrained=self.segments.count_untrained(), trained_since=self.segments.count_trained_after(self.step)
        )

    @property
    def uncounted(self) -> int:
        """Env steps in the store that the run's progress lacks: the former life stored them after the checkpoint."""
        return self.segments.env_steps - self.env_steps

    def forget_training(self) -> None:
        """Forget what was trained after the checkpoint, once the ledger of the new life counts it as held."""
        self.segments.forget_training_after(self.step)


class ReplayExperience(Experience):
    """Slots go into a store, and each training step draws from all that it holds.

    A transition counts as trained with the first update that it is drawn for.
    """

    def __init__(
        self,
        *,
        store: ReplayStore,
        draws: Draws,
        limiter: RatioLimiter,
        drawing: Drawing,
        grant: Callable[[int, Version, int], None],
        ledger: TrainingLedger,
        num_ranks: int = 1,
        normalizer: ReplayNormalizer | None = None,
    ) -> None:
        """Use a rank's store, draws from it, and a limiter that counts what it holds already.

        ``grant`` grants credits, see ``SampleConsumer.grant``. ``normalizer`` is the learner's; None: nothing is
        normalised.
        """
        self.max_policy_lag = None
        self._num_ranks = num_ranks
        self._store = store
        self._segments = store.segments
        self._draws = draws
        self._limiter = limiter
        self._drawing = drawing
        self._normalizer = normalizer if normalizer is not None else ReplayNormalizer()
        self._grant = grant
        self._ledger = ledger
        self._counted = store.env_steps
        """Env steps of this rank that the run's progress contains: those of batches that were trained or passed."""
        self._changed = threading.Condition()
        """Guards all that follows, and the store."""
        self._arrived = store.arrived(self._normalizer)
        """What the slots since the last batch contain."""
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
        self._is_kept = False
        """Whether a later life uses the store, once ``give_up`` was called."""
        self._age: float | None = None
        """Mean number of env steps that were stored after the transitions of the last draw."""

    @override
    def receive(self, slots: Sequence[Slot], *, oldest_outstanding: int | None) -> None:
        del oldest_outstanding  # a dead producer's credits go to others
        if self._limiter.takes_turns:
            self._receive_in_turn(slots)
            return
        for slot in slots:
            with self._changed:
                self._store_slot(slot)

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
        for slot in slots:
            self._store_slot(slot)

    def _store_slot(self, slot: Slot) -> None:
        inserted = self._segments.insert(slot)
        self._draws.inserted(inserted.numbers)
        self._limiter.stored(inserted.num_transitions, lanes=slot.num_lanes)
        self._ledger.dropped("evicted", inserted.num_evicted_untrained)
        moments = self._normalizer.moments_of(self._normalizer.samples_of(slot.arrays))
        self._arrived.append(_Arrived(inserted.num_transitions, EndedEpisodes.of(slot.arrays), moments))
        self._note_age(slot.oldest_version)
        self._changed.notify_all()

    def _note_age(self, oldest: Version) -> None:
        """Note the version of a slot's oldest action, unless an earlier attempt acted: its steps were rolled back."""
        if self._version is not None and oldest.attempt == self._version.attempt:
            self._oldest_arrived = oldest if self._oldest_arrived is None else min(oldest, self._oldest_arrived)

    @override
    def grant(self, version: Version) -> bool:
        with self._changed:
            self._version = version
            lanes = 0 if self._waits_for_the_end else self._limiter.take()
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
        is_open = self._segments.env_steps > self._counted or not self._end_is_set
        return self._limiter.takes_turns and self._num_ranks > 1 and is_open

    @override
    def next_batch(self, timeout: float) -> TrainingBatch | None:
        """As ``Experience.next_batch``, but slots that arrive while training must wait come as a batch without rows."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._arrived or self._limiter.may_train, timeout)
            if self._closed or not (self._limiter.may_train or self._arrived):
                return None
            assert self._version is not None, "granted before"
            drawn = Drawn(keys=np.zeros(0, np.int64), share=np.zeros(0))
            # Statistics without a sample would leave the first rows as they are: what has arrived is learned first.
            if self._limiter.may_train and not (self._arrived and self._normalizer.is_empty):
                rng = np.random.default_rng((self._drawing.seed, self._version.step))
                drawn = self._draws.draw(self._drawing.num_rows, rng)
                self._age = self._segments.mean_age(drawn.keys)
            rows = rows_of(
                self._segments,
                drawn.keys,
                num_steps=self._drawing.num_steps,
                discount=self._drawing.discount,
                rewards=self._normalizer.rewards,
            )
            arrived, self._arrived = self._arrived, []
            oldest, self._oldest_arrived = self._oldest_arrived or self._version, None
        return ReplayBatch(
            arrays=rows,
            num_transitions=len(drawn.keys),
            oldest_version=oldest,
            env_steps=sum(each.env_steps for each in arrived),
            episodes=EndedEpisodes.joined([each.episodes for each in arrived]),
            moments=self._normalizer.joined(each.moments for each in arrived) if self._normalizer.fields else None,
            keys=drawn.keys,
            share=drawn.share,
        )

    @override
    def shared(self, batch: TrainingBatch) -> Mapping[str, Any]:
        assert isinstance(batch, ReplayBatch), "this experience's own"
        return {"largest_ratios": largest_ratios(batch.share, size=self._drawing.minibatch_rows)}

    @override
    def completed(self, batch: TrainingBatch, of_ranks: Sequence[Mapping[str, Any]]) -> TrainingBatch | None:
        """As ``Experience.completed``, with the rows' importance ratios under ``IMPORTANCE``. All ranks need rows."""
        assert isinstance(batch, ReplayBatch), "this experience's own"
        ratios = [each["largest_ratios"] for each in of_ranks]
        if not all(ratios):
            return None
        importance = importance_of(batch.share, ratios, size=self._drawing.minibatch_rows)
        return replace(batch, arrays={**batch.arrays, IMPORTANCE: importance})

    @override
    def trained(self, batch: TrainingBatch, result: StepResult) -> int:
        """As ``Experience.trained``.

        Raises:
            ConfigurationError: the algorithm has made another number of minibatches, or has no errors to draw by.
        """
        assert isinstance(batch, ReplayBatch), "this experience's own"
        if len(result.taken) != self._drawing.updates:
            raise ConfigurationError(
                f"the algorithm's schedule has {len(result.taken)} minibatches for {self._drawing.num_rows} rows; with "
                f"replay it needs {self._drawing.updates} of {self._drawing.minibatch_rows}"
            )
        if self._drawing.by_priority and result.errors is None:
            raise ConfigurationError(
                f"the algorithm is to draw by priority, and no loss has {ERRORS!r} among its metrics: those of its rows"
            )
        keys = batch.keys if result.trained_rows is None else batch.keys[result.trained_rows]
        with self._changed:
            self._counted += batch.env_steps
            self._end_is_set = False
            self._limiter.trained()
            if result.errors is not None:
                is_known = np.isfinite(result.errors)
                self._draws.settle(batch.keys[is_known], result.errors[is_known])
            num_trained = self._note_trained(np.unique(keys), result.step)
            self._ledger.trained(num_trained)
        return num_trained

    def _note_trained(self, keys: Indices, step: int) -> int:
        """Note the training step in transitions that were never trained before; return their number."""
        number, place = np.divmod(keys, self._segments.layout.num_steps)
        segment = number % self._segments.layout.num_segments
        first_trained = self._segments.arrays[FIRST_TRAINED]
        is_first = self._segments.are_held(number) & (first_trained[segment, place] == 0)
        first_trained[segment[is_first], place[is_first]] = step
        return int(np.count_nonzero(is_first))

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
            self._is_kept = self._store.outlives and not run_ended
            if not self._is_kept:
                self._store.file.remove()  # first: no later life may find what counts as dropped
                self._ledger.dropped("end_of_run", self._segments.count_untrained())

    @override
    def sync(self) -> None:
        if self._is_kept:
            self._store.file.close()

    @override
    def tune(self, pace: Pace | None) -> None:
        assert pace is not None, "transitions are replayed"
        with self._changed:
            self._limiter.tune(replace(pace, bound=max(pace.bound, self._limiter.least_bound(pace))))

    @override
    def figures(self) -> Mapping[str, float]:
        with self._changed:
            figures = {
                "replay_transitions": float(self._segments.num_transitions),
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
            return {**self._limiter.state_dict(self._counted), "draws": self._draws.state_dict()}
