"""The core of a buffer worker that is a shard of a replay store: it stores slots, and answers its rank.

The shard's ledger page counts its transitions, as that of a consumer which trains: the rank says what it has trained.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from rlsrl.data.slots import Slot
from rlsrl.data.version import Version
from rlsrl.runtime.ledger import TrainerLedger
from rlsrl.streams.grpc_replay.messages import (
    DrawRequest,
    Grant,
    RankWelcome,
    ReplayCodec,
    ReplayMessage,
    Rows,
    RunIsOver,
    Settle,
    Settled,
    ShardHello,
    Stored,
)
from rlsrl.workers.stored_transitions import Settlement, StoredTransitions

LIFE_ENV_STEPS = 1 << 40
"""A shard that has lost its content counts its env steps from a multiple of this: its incarnation's."""
MOST_REMEMBERED_STEPS = 1 << 16
"""Training steps whose counts are remembered, to go back to one of them."""


class ReplayShard:
    """A shard. Any thread may call any method."""

    def __init__(
        self,
        store: StoredTransitions,
        *,
        index: int,
        codec: ReplayCodec,
        ledger: TrainerLedger,
        grant: Callable[[int, Version, int], None],
    ) -> None:
        """Use a store whose env steps began at a multiple of ``LIFE_ENV_STEPS`` when it was last empty.

        ``ledger`` counts what the store holds. ``grant`` grants credits to actors, see ``SampleConsumer.grant``.
        """
        self._store = store
        self._index = index
        self._codec = codec
        self._ledger = ledger
        self._grant = grant
        self._lock = threading.Lock()
        """Guards the store, and what follows."""
        self._lanes = 0
        """Granted to actors and not arrived."""
        self._trained_by_step: deque[tuple[int, int]] = deque([(0, 0)])
        """(training step, transitions that were first trained in this process up to it), ascending; never empty."""
        self._has_ended = False
        """Whether the run, or this life of the shard, has ended: what is untrained is counted."""

    def hello(self) -> ShardHello:
        """Return the first message of a connection."""
        with self._lock:
            life, env_steps = divmod(self._store.env_steps, LIFE_ENV_STEPS)
            return ShardHello(
                index=self._index,
                digest=self._codec.digest,
                life=life,
                env_steps=env_steps,
                lanes=self._lanes,
                **self._content(),
            )

    def insert(self, slots: Sequence[Slot]) -> list[Stored]:
        """Store the slots, and return the messages that say so. After the run's end they are dropped, and counted."""
        return [message for slot in slots if (message := self._insert(slot)) is not None]

    def _insert(self, slot: Slot) -> Stored | None:
        with self._lock:  # one at a time: the rank may wait for rows
            self._lanes -= slot.num_lanes
            if self._has_ended:
                self._ledger.dropped("end_of_run", slot.num_transitions)
                return None
            (arrival,) = self._store.insert([slot])
            text = Stored.text(arrival.episodes)
            return Stored(
                env_steps=self._store.env_steps % LIFE_ENV_STEPS,
                lanes=arrival.lanes,
                attempt=slot.oldest_version.attempt,
                step=slot.oldest_version.step,
                num_rows=len(text),
                arrays={"episodes": text},
                **self._content(),
            )

    def answers(self, message: ReplayMessage) -> Iterator[ReplayMessage]:
        """Obey a message of the rank, and yield the answers. After the end none changes anything."""
        if isinstance(message, DrawRequest):
            yield from self._draw(message)
        elif isinstance(message, Settle):
            yield from self._settle(message)
        elif isinstance(message, Grant):
            with self._lock:
                self._lanes += message.lanes
            self._grant(message.lanes, Version(message.attempt, message.step), message.room)
        elif isinstance(message, RankWelcome):
            self._forget_training_after(message.step)
        elif isinstance(message, RunIsOver):
            self.give_up(run_ended=True)

    def give_up(self, *, run_ended: bool) -> None:
        """Count what no later life can train. Slots that come later are dropped."""
        with self._lock:
            if not self._has_ended:
                self._has_ended = True
                self._store.give_up(run_ended=run_ended)

    @property
    def has_credits(self) -> bool:
        """Whether actors hold lanes that were granted."""
        with self._lock:
            return self._lanes > 0

    def sync(self) -> None:
        """Make durable what a later life uses, after the ledger has ended."""
        self._store.sync()

    def _draw(self, request: DrawRequest) -> Iterator[Rows]:
        rng = np.random.default_rng((request.seed, request.step, request.trial, self._index))
        with self._lock:
            content = self._content()
            drawn = self._store.draw_rows(request.num_rows, rng) if content["mass"] else None
            if drawn is None:
                arrays, age = self._codec.no_rows, 0.0
            else:
                arrays = self._codec.rows(drawn.arrays, key=drawn.keys, share=drawn.share)
                age = drawn.mean_age
        size = self._codec.rows_per_message
        for first in range(0, max(len(arrays["key"]), 1), size):
            part = {name: array[first : first + size] for name, array in arrays.items()}
            yield Rows(
                step=request.step,
                trial=request.trial,
                mean_age=age,
                num_rows=len(part["key"]),
                arrays=part,
                **content,
            )

    def _settle(self, message: Settle) -> Iterator[Settled]:
        """Note what was trained. What this repeats changes nothing."""
        errors = message.arrays["error"]
        settlement = Settlement(
            step=message.step,
            keys=message.arrays["key"],
            trained_rows=np.flatnonzero(message.arrays["is_trained"]),
            errors=errors,
        )
        with self._lock:
            if self._has_ended:
                return
            num_trained = self._store.settle(settlement)
            step, trained = self._trained_by_step[-1]
            self._trained_by_step.append((max(message.step, step), trained + num_trained))
            if len(self._trained_by_step) > MOST_REMEMBERED_STEPS:
                self._trained_by_step.popleft()
            settled = Settled(step=message.step, num_trained=num_trained, **self._content())
        yield settled

    def _forget_training_after(self, step: int) -> None:
        """Count what was trained after the step as untrained if it is held, else as lost.

        Of what a former life of this process trained only what is held is known.
        """
        with self._lock:
            if self._has_ended:
                return
            held = self._store.segments.count_trained_after(step)
            undone = self._undone_after(step)
            if held or undone:
                self._ledger.roll_back(held=held, gone=max(undone - held, 0))
                self._store.segments.forget_training_after(step)

    def _undone_after(self, step: int) -> int:
        """Return how many transitions this process has trained after that step, and forget them."""
        trained = self._trained_by_step[-1][1]
        while len(self._trained_by_step) > 1 and self._trained_by_step[-1][0] > step:
            self._trained_by_step.pop()
        return trained - self._trained_by_step[-1][1]

    def _content(self) -> dict[str, int]:
        return {"mass": self._store.draws.mass, "num_transitions": self._store.num_transitions}
