"""Transitions that a process stores, and the rows that it draws from them. Needs no torch.

A trainer rank uses them as its ``LocalStore``, and a buffer worker that is a shard draws from them for its rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlsrl.buffers.replay.draws import Draws
from rlsrl.buffers.replay.layout import FIRST_TRAINED
from rlsrl.buffers.replay.rows import RowForm, rows_of
from rlsrl.buffers.replay.segments import Indices, Segments
from rlsrl.buffers.replay.store_file import StoreFile, file_bytes
from rlsrl.data.episodes import EndedEpisodes
from rlsrl.data.slots import Slot
from rlsrl.data.specs import Arrays
from rlsrl.data.version import Version
from rlsrl.runtime.ledger import Held
from rlsrl.runtime.metrics import Metrics
from rlsrl.workers.training_ledger import TrainingLedger


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """What a slot brought into the store, or what a shard brings or takes that comes or goes."""

    env_steps: int
    """Transitions that were stored and that no arrival before has counted."""
    lanes: int
    """Granted lanes that are not outstanding any more. Below 0: so many more are."""
    fresh: int
    """Transitions that can be drawn from now on."""
    episodes: EndedEpisodes = field(default_factory=EndedEpisodes)
    """Those that ended in the slot."""
    oldest_version: Version | None = None
    """Version of the oldest action in the slot."""


@dataclass(frozen=True, kw_only=True)
class DrawnRows:
    """Rows that were drawn: transitions, or sequences of these."""

    arrays: Arrays
    """See ``rows.rows_of``: [N, ...] each."""
    keys: Indices
    """The rows' keys, [N]."""
    share: NDArray[np.float64]
    """The probability with which each was drawn from the store, [N]."""
    mean_age: float
    """Mean number of env steps that were stored after the transitions."""

    @property
    def num_transitions(self) -> int:
        """Transitions in the rows."""
        mask = self.arrays.get("mask")
        return len(self.keys) if mask is None else int(np.count_nonzero(mask))


@dataclass(frozen=True, kw_only=True)
class Settlement:
    """What became of drawn rows in a training step."""

    step: int
    """The training step, 1 for the first."""
    keys: Indices
    """Of all rows that were drawn for it, [N]."""
    trained_rows: Indices | None
    """Rows that an update has taken; None: all."""
    errors: NDArray[np.float32] | None
    """The rows' last errors, [N], with NaN for rows without one; None: the algorithm computes no errors."""


@dataclass(frozen=True, kw_only=True)
class OpenedStore:
    """The segments of a store in their file, with what a former life of the trainer left."""

    segments: Segments
    file: StoreFile
    outlives: bool
    """Whether the file outlives the trainer's machine or pod, and not only its process."""
    step: int
    """The training step from which the rank resumes."""
    env_steps: int
    """The rank's env steps that the run's progress contains at that step."""

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

    def write_back(self) -> None:
        """Wait until the disk has what is stored now, with checksums. Another thread may insert and draw meanwhile.

        Raises:
            OSError: the disk failed.
        """
        self.segments.seal()
        self.file.write_back()

    def forget_training(self) -> None:
        """Forget what was trained after the checkpoint, once the ledger of the new life counts it as held."""
        self.segments.forget_training_after(self.step)


class StoredTransitions:
    """Segments in this process, the draws from them, and the ledger and the metrics that count what they hold.

    A transition counts as trained with the first update that it is drawn for.
    """

    def __init__(
        self, opened: OpenedStore, *, draws: Draws, form: RowForm, ledger: TrainingLedger, metrics: Metrics
    ) -> None:
        """Use opened segments; ``form``: of the rows that are drawn; ``metrics``: of this process."""
        self.segments = opened.segments
        self.draws = draws
        self._opened = opened
        self._form = form
        self._ledger = ledger
        self._is_kept = False
        """Whether a later life uses the store, once ``give_up`` was called."""
        self._metrics = metrics
        metrics.replay_transitions.set(self.num_transitions)
        metrics.replay_capacity.set(self.segments.layout.num_places)
        metrics.replay_bytes.set(file_bytes(self.segments.layout))

    @property
    def env_steps(self) -> int:
        """Env steps that were ever stored here in the run."""
        return self.segments.env_steps

    @property
    def num_transitions(self) -> int:
        """Transitions that can be drawn."""
        return self.segments.num_transitions

    def insert(self, slots: Sequence[Slot]) -> Sequence[Arrival]:
        """Store the slots, and return what each has brought."""
        return [self._insert(slot) for slot in slots]

    def _insert(self, slot: Slot) -> Arrival:
        inserted = self.segments.insert(slot)
        self.draws.inserted(inserted.numbers)
        self._ledger.dropped("evicted", inserted.num_evicted_untrained)
        self._metrics.replay_transitions.set(self.num_transitions)
        self._metrics.replay_evicted.labels(outcome="trained").inc(inserted.num_evicted)
        self._metrics.replay_evicted.labels(outcome="untrained").inc(inserted.num_evicted_untrained)
        return Arrival(
            env_steps=inserted.num_transitions,
            lanes=slot.num_lanes,
            fresh=inserted.num_transitions,
            episodes=EndedEpisodes.of(slot.arrays),
            oldest_version=slot.oldest_version,
        )

    def draw_rows(self, num_rows: int, rng: np.random.Generator) -> DrawnRows:
        """Draw and return so many rows."""
        drawn = self.draws.draw(num_rows, rng)
        rows = rows_of(self.segments, drawn.keys, self._form)
        age = self.segments.mean_age(drawn.keys)
        found = DrawnRows(arrays=rows, keys=drawn.keys, share=drawn.share, mean_age=age)
        self._metrics.replay_drawn.inc(found.num_transitions)
        self._metrics.replay_age.set(age)
        return found

    def settle(self, settlement: Settlement) -> int:
        """Learn what became of drawn rows. Return how many transitions were trained for the first time.

        A second call with the same settlement counts nothing.
        """
        keys, errors = settlement.keys, settlement.errors
        if errors is not None:
            is_known = np.isfinite(errors)
            self.draws.settle(keys[is_known], errors[is_known])
        trained = keys if settlement.trained_rows is None else keys[settlement.trained_rows]
        num_trained = self._note_trained(np.unique(trained), settlement.step)
        self._ledger.trained(num_trained)
        return num_trained

    def _note_trained(self, keys: Indices, step: int) -> int:
        """Note the training step in the rows' transitions that were never trained before; return their number."""
        layout, first_trained = self.segments.layout, self.segments.arrays[FIRST_TRAINED]
        number, place = np.divmod(keys, layout.num_steps)
        segment, is_held = number % layout.num_segments, self.segments.are_held(number)
        if layout.rows_per_segment == 1:
            segment = segment[is_held]
            of_segments = first_trained[segment]
            is_first = self.segments.arrays["mask"][segment] & (of_segments == 0)
            first_trained[segment] = np.where(is_first, step, of_segments)
            return int(np.count_nonzero(is_first))
        is_first = is_held & (first_trained[segment, place] == 0)
        first_trained[segment[is_first], place[is_first]] = step
        return int(np.count_nonzero(is_first))

    def give_up(self, *, run_ended: bool) -> None:
        """Count what no later life can train, and see to it that none finds it; see ``Experience.give_up``."""
        self._is_kept = self._opened.outlives and not run_ended
        if not self._is_kept:
            self._opened.file.remove()  # first: no later life may find what counts as dropped
            self._ledger.dropped("end_of_run", self.segments.count_untrained())

    def sync(self) -> None:
        """Make durable what a later life trains on, after the ledger has ended."""
        if self._is_kept:
            self._opened.segments.seal()  # before the disk has it: a pod may be killed meanwhile
            self._opened.file.close()
