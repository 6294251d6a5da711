"""Stores of replayed transitions, as a trainer rank uses them; and the one in the process that trains.

Shards in buffer workers are another implementation: ``rlsrl.workers.sharded_store``. Each shard has a store of this
kind, so nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.buffers.replay.draws import Draws
from rlsrl.buffers.replay.layout import FIRST_TRAINED
from rlsrl.buffers.replay.rows import as_stored, rows_of
from rlsrl.buffers.replay.segments import Indices, Segments
from rlsrl.buffers.replay.store_file import StoreFile
from rlsrl.data.episodes import EndedEpisodes
from rlsrl.data.slots import Slot
from rlsrl.data.specs import Arrays
from rlsrl.data.version import Version
from rlsrl.runtime.ledger import Held
from rlsrl.workers.training_ledger import TrainingLedger


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
    """Rows of transitions that were drawn."""

    arrays: Arrays
    """See ``rows.rows_of``: [N, ...] each."""
    keys: Indices
    """The transitions' keys, [N]."""
    share: NDArray[np.float64]
    """The probability with which each was drawn from the store, [N]."""
    mean_age: float
    """Mean number of env steps that were stored after the transitions."""


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


class ReplayStore(Protocol):
    """Where a rank's transitions are. Not thread-safe."""

    @property
    def env_steps(self) -> int:
        """Env steps of this rank that were ever stored in the run."""

    @property
    def num_transitions(self) -> int:
        """Transitions that can be drawn."""

    @property
    def takes_slots(self) -> bool:
        """Whether what is granted can be stored, and it is known what the store holds."""

    def insert(self, slots: Sequence[Slot]) -> Sequence[Arrival]:
        """Store the slots, and return what has arrived since the last call."""

    def is_ready(self, step: int) -> bool:
        """Return whether the rows for the training step after ``step`` are there. If not, a later ``insert`` knows."""

    def draw(self, step: int) -> DrawnRows:
        """Return the rows for the training step after ``step``, which are ready. A further call changes nothing."""

    def settle(self, settlement: Settlement) -> int:
        """Learn what became of drawn rows. Return how many transitions were trained for the first time."""

    def give_up(self, *, run_ended: bool) -> None:
        """Count what no later life can train, and see to it that none finds it; see ``Experience.give_up``."""

    def sync(self) -> None:
        """Make durable what a later life trains on, after the ledger has ended."""

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values for a checkpoint: what the store needs beside its content."""


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

    def forget_training(self) -> None:
        """Forget what was trained after the checkpoint, once the ledger of the new life counts it as held."""
        self.segments.forget_training_after(self.step)


class LocalStore(ReplayStore):
    """Segments in this process.

    A transition counts as trained with the first update that it is drawn for.
    """

    def __init__(
        self,
        opened: OpenedStore,
        *,
        draws: Draws,
        drawing: Drawing,
        ledger: TrainingLedger,
        rewards: Callable[[NDArray[np.float32]], NDArray[np.float32]] = as_stored,
    ) -> None:
        """Use opened segments, draws from them, and the ledger that counts what they hold. ``rewards``: of rows."""
        self.segments = opened.segments
        self.draws = draws
        self._opened = opened
        self._drawing = drawing
        self._ledger = ledger
        self._rewards = rewards
        self._is_kept = False
        """Whether a later life uses the store, once ``give_up`` was called."""

    @property
    @override
    def env_steps(self) -> int:
        return self.segments.env_steps

    @property
    @override
    def num_transitions(self) -> int:
        return self.segments.num_transitions

    @property
    @override
    def takes_slots(self) -> bool:
        return True

    @override
    def insert(self, slots: Sequence[Slot]) -> Sequence[Arrival]:
        return [self._insert(slot) for slot in slots]

    def _insert(self, slot: Slot) -> Arrival:
        inserted = self.segments.insert(slot)
        self.draws.inserted(inserted.numbers)
        self._ledger.dropped("evicted", inserted.num_evicted_untrained)
        return Arrival(
            env_steps=inserted.num_transitions,
            lanes=slot.num_lanes,
            fresh=inserted.num_transitions,
            episodes=EndedEpisodes.of(slot.arrays),
            oldest_version=slot.oldest_version,
        )

    @override
    def is_ready(self, step: int) -> bool:
        return True

    @override
    def draw(self, step: int) -> DrawnRows:
        """As ``ReplayStore.draw``. The rows depend on the content, the seed and the step alone."""
        return self.draw_rows(self._drawing.num_rows, np.random.default_rng((self._drawing.seed, step)))

    def draw_rows(self, num_rows: int, rng: np.random.Generator) -> DrawnRows:
        """Return so many rows."""
        drawn, drawing = self.draws.draw(num_rows, rng), self._drawing
        rows = rows_of(
            self.segments,
            drawn.keys,
            num_steps=drawing.num_steps,
            discount=drawing.discount,
            rewards=self._rewards,
        )
        age = self.segments.mean_age(drawn.keys)
        return DrawnRows(arrays=rows, keys=drawn.keys, share=drawn.share, mean_age=age)

    @override
    def settle(self, settlement: Settlement) -> int:
        """As ``ReplayStore.settle``. A second call with the same settlement counts nothing."""
        keys, errors = settlement.keys, settlement.errors
        if errors is not None:
            is_known = np.isfinite(errors)
            self.draws.settle(keys[is_known], errors[is_known])
        trained = keys if settlement.trained_rows is None else keys[settlement.trained_rows]
        num_trained = self._note_trained(np.unique(trained), settlement.step)
        self._ledger.trained(num_trained)
        return num_trained

    def _note_trained(self, keys: Indices, step: int) -> int:
        """Note the training step in transitions that were never trained before; return their number."""
        number, place = np.divmod(keys, self.segments.layout.num_steps)
        segment = number % self.segments.layout.num_segments
        first_trained = self.segments.arrays[FIRST_TRAINED]
        is_first = self.segments.are_held(number) & (first_trained[segment, place] == 0)
        first_trained[segment[is_first], place[is_first]] = step
        return int(np.count_nonzero(is_first))

    @override
    def give_up(self, *, run_ended: bool) -> None:
        self._is_kept = self._opened.outlives and not run_ended
        if not self._is_kept:
            self._opened.file.remove()  # first: no later life may find what counts as dropped
            self._ledger.dropped("end_of_run", self.segments.count_untrained())

    @override
    def sync(self) -> None:
        if self._is_kept:
            self._opened.file.close()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"draws": self.draws.state_dict()}
