"""Where the batches of a trainer rank come from, and how gathering keeps pace with training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from typing_extensions import override

from rlsrl.algorithms.learner import StepResult
from rlsrl.algorithms.normalizer import SampleMoments
from rlsrl.buffers.fifo import Discard, FifoBuffer
from rlsrl.buffers.limiter import RateLimiter
from rlsrl.buffers.replay.ratio import Pace
from rlsrl.data.episodes import EndedEpisodes
from rlsrl.data.slots import Slot
from rlsrl.data.specs import Arrays
from rlsrl.data.version import Version
from rlsrl.workers.progress import Progress, StopConditions
from rlsrl.workers.training_ledger import TrainingLedger

BATCH = "batch"
"""The reason to wait of a rank that has too few samples."""
BUFFER_WORKERS = "buffer workers"
"""The reason to wait of a rank whose replay store is in buffer workers that it has not heard."""


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """What one training step trains on, on this rank."""

    arrays: Arrays
    """What the algorithm prepares."""
    num_transitions: int
    """Transitions in the arrays."""
    oldest_version: Version
    """Version of the oldest action. Policy lag counts from it."""
    env_steps: int
    """Transitions that count as gathered with this step."""
    episodes: EndedEpisodes
    """The episodes that count as ended with this step."""
    moments: SampleMoments | None = None
    """What statistics learn from those ``env_steps``, on all ranks; None: what they need is in the arrays, or none
    are kept."""


class Experience(Protocol):
    """What a rank has received and not trained yet. The main thread receives, the training thread calls the rest."""

    max_policy_lag: int | None
    """Largest allowed policy lag; None: any."""

    def receive(self, slots: Sequence[Slot], *, oldest_outstanding: int | None) -> None:
        """Copy the slots. The caller may then release them.

        ``oldest_outstanding`` is the lowest credit that a live producer holds after these slots were received, or None.
        If only this changed, because a producer died, call ``receive`` without slots.
        """

    def grant(self, version: Version) -> bool:
        """Grant the credits that are due, to act with ``version``; drop and count what may not be trained after it.

        Returns whether all is granted that the rank can still train.
        """

    def next_batch(self, timeout: float) -> TrainingBatch | None:
        """Return the next batch. Received slots, ``close`` or the timeout (seconds) ends the wait.

        Returns None if no batch is complete in time, if the buffer holds lanes that ``grant`` has to drop, and after
        ``close``.
        """

    @property
    def waits_for(self) -> str:
        """What the next batch waits for, see ``WorkerContext.waiting``."""
        return BATCH

    def shared(self, batch: TrainingBatch) -> Mapping[str, Any]:
        """Return JSON values that all ranks have to know of this rank's batch."""

    def completed(self, batch: TrainingBatch, of_ranks: Sequence[Mapping[str, Any]]) -> TrainingBatch | None:
        """Return the batch with what depends on all ranks' batches; ``of_ranks`` are their ``shared``, by rank.

        Returns None if no rank is to train on its batch. Then call ``passed``.
        """

    def trained(self, batch: TrainingBatch, result: StepResult) -> int:
        """Count a batch that was trained. Return how many transitions of this rank were trained for the first time."""

    def passed(self, batch: TrainingBatch) -> None:
        """Count a batch that no rank trains on. Replayed rows are drawn again."""

    @property
    def is_behind(self) -> bool:
        """Whether another training step is due for what was gathered, whether or not more is."""

    def abandon(self, batch: TrainingBatch) -> None:
        """Count a batch that is left at the end."""

    def expect(self, progress: Progress, stop: StopConditions) -> None:
        """Grant no more than what training can use until one of these conditions ends it."""

    def close(self) -> None:
        """Form no more batches, and count what no life can train."""

    def give_up(self, *, run_ended: bool) -> None:
        """Count what only a later life could have trained, and which none will. Call it before the ledger ends.

        ``run_ended``: there is no later life.
        """

    def sync(self) -> None:
        """Make durable what a later life trains on, after the ledger has ended."""

    def tune(self, pace: Pace | None) -> None:
        """Keep another pace from now on; None where nothing is replayed.

        A bound below ``RatioLimiter.least_bound`` counts as that.
        """

    def figures(self) -> Mapping[str, float]:
        """Return numbers for the learning curve and the metrics, of a replay store and its pace. On policy none."""

    def ledger_snapshot(self) -> dict[str, Any]:
        """Return the ledger's JSON values to resume from."""

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values from which pace and draws of this rank go on after the batches trained and passed."""


class OnPolicyExperience(Experience):
    """Each lane of a slot is trained once, in the order in which its credit was granted."""

    def __init__(
        self,
        *,
        buffer: FifoBuffer,
        limiter: RateLimiter,
        grant: Callable[[int, Version, int], None],
        ledger: TrainingLedger,
        batch_lanes: int,
        batch_transitions: int,
        max_policy_lag: int,
    ) -> None:
        """Use a buffer that forms batches of ``batch_lanes`` lanes, and its limiter.

        ``batch_transitions``: most transitions of a batch, over all ranks.

        ``grant`` grants credits to the producers: (number of lanes, version to act with, room), see
        ``SampleConsumer.grant``.
        """
        self._batch_transitions = batch_transitions
        self.max_policy_lag = max_policy_lag
        self._buffer = buffer
        self._limiter = limiter
        self._grant = grant
        self._ledger = ledger
        self._batch_lanes = batch_lanes
        self._room = 0
        """The room of the last grant."""

    @override
    def receive(self, slots: Sequence[Slot], *, oldest_outstanding: int | None) -> None:
        self._buffer.put(slots, oldest_outstanding=oldest_outstanding)

    @override
    def grant(self, version: Version) -> bool:
        discards = self._buffer.discard_stale(version)
        self._count(discards)
        for discard in discards:
            self._limiter.discarded(discard.num_lanes)
        lanes, room = self._limiter.take(), self._limiter.room
        if lanes or room != self._room:
            self._room = room
            self._grant(lanes, version, room)
        return self._limiter.is_complete

    @override
    def next_batch(self, timeout: float) -> TrainingBatch | None:
        batch = self._buffer.sample(timeout)
        if batch is None:
            return None
        return TrainingBatch(
            arrays=batch.arrays,
            num_transitions=batch.num_transitions,
            oldest_version=batch.oldest_version,
            env_steps=batch.num_transitions,
            episodes=EndedEpisodes.of(batch.arrays),
        )

    @override
    def shared(self, batch: TrainingBatch) -> Mapping[str, Any]:
        return {"transitions": batch.num_transitions}

    @override
    def completed(self, batch: TrainingBatch, of_ranks: Sequence[Mapping[str, Any]]) -> TrainingBatch | None:
        """As ``Experience.completed``. None of the ranks has a transition, if this returns None.

        An optimizer step without a transition would still move the weights, by its momentum.
        """
        return batch if any(each["transitions"] for each in of_ranks) else None

    @override
    def trained(self, batch: TrainingBatch, result: StepResult) -> int:
        num_trained = batch.num_transitions - result.num_untrained
        self._ledger.trained(num_trained, num_untrained=result.num_untrained)
        self._limiter.sampled(self._batch_lanes)
        return num_trained

    @override
    def passed(self, batch: TrainingBatch) -> None:
        self._limiter.discarded(self._batch_lanes)

    @override
    def abandon(self, batch: TrainingBatch) -> None:
        self._ledger.dropped("end_of_run", batch.num_transitions)

    @property
    @override
    def is_behind(self) -> bool:
        return False  # a batch that is not needed is dropped

    @override
    def expect(self, progress: Progress, stop: StopConditions) -> None:
        steps = progress.steps_left(stop, batch_transitions=self._batch_transitions)
        self._limiter.expect(None if steps is None else steps * self._batch_lanes)

    @override
    def close(self) -> None:
        self._count(self._buffer.close())

    @override
    def give_up(self, *, run_ended: bool) -> None:
        """Nothing is left: a buffer does not outlive its process."""

    @override
    def sync(self) -> None:
        """Nothing is left for a later life."""

    @override
    def tune(self, pace: Pace | None) -> None:
        """Nothing follows: training keeps pace by its batches."""

    @override
    def figures(self) -> Mapping[str, float]:
        return {}

    @override
    def ledger_snapshot(self) -> dict[str, Any]:
        return self._ledger.snapshot()

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._limiter.state_dict()

    def _count(self, discards: Sequence[Discard]) -> None:
        """Count what was never trained, by reason."""
        for discard in discards:
            self._ledger.dropped(discard.reason, discard.num_transitions)
