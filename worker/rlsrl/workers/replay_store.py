"""Stores of replayed transitions, as a trainer rank uses them; and the one in the process that trains.

Shards in buffer workers are another implementation: ``rlsrl.workers.sharded_store``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from typing_extensions import override

from rlsrl.buffers.replay.draws import Draws
from rlsrl.buffers.replay.rows import RowForm
from rlsrl.data.slots import Slot
from rlsrl.runtime.metrics import Metrics
from rlsrl.workers.stored_transitions import Arrival, DrawnRows, OpenedStore, Settlement, StoredTransitions
from rlsrl.workers.training_ledger import TrainingLedger


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """What a training step draws."""

    updates: int
    """Minibatches of a training step."""
    minibatch_rows: int
    """Rows of this rank's part of a minibatch."""
    by_priority: bool = False
    """Whether priorities follow from the errors of trained rows."""
    seed: int = 0
    """Decides the rank's draws of each training step."""

    @property
    def num_rows(self) -> int:
        """Rows of a training step."""
        return self.updates * self.minibatch_rows


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


class LocalStore(StoredTransitions, ReplayStore):
    """The store of a rank that keeps its transitions in its own process."""

    def __init__(
        self,
        opened: OpenedStore,
        *,
        draws: Draws,
        form: RowForm,
        drawing: Drawing,
        ledger: TrainingLedger,
        metrics: Metrics,
    ) -> None:
        """See ``StoredTransitions``; ``drawing``: of each training step."""
        super().__init__(opened, draws=draws, form=form, ledger=ledger, metrics=metrics)
        self._drawing = drawing

    @property
    @override
    def takes_slots(self) -> bool:
        return True

    @override
    def is_ready(self, step: int) -> bool:
        return True

    @override
    def draw(self, step: int) -> DrawnRows:
        """As ``ReplayStore.draw``. The rows depend on the content, the seed and the step alone."""
        return self.draw_rows(self._drawing.num_rows, np.random.default_rng((self._drawing.seed, step)))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"draws": self.draws.state_dict()}
