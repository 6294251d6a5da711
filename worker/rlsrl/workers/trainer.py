"""The trainer: one rank of the gang that learns.

The main thread receives slots and checks the other threads. The training thread
(``rlsrl.workers.training``) takes batches, trains, publishes and grants credits. The checkpoint writer's thread waits
for the disk. If minibatches are large, a fourth thread computes while a core is idle
(``rlsrl.algorithms.spare_core``).
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from typing_extensions import override

from rlsrl.api.live import settings_of
from rlsrl.api.resolved import TrainerConfig
from rlsrl.parameters.protocols import ParameterDB
from rlsrl.parameters.terminal import UPDATES_SKIPPED, WITHDRAWN_KEY, terminal_record
from rlsrl.runtime.worker import PollResult, Worker
from rlsrl.workers.build.parameters import open_parameter_store
from rlsrl.workers.build.replay import discard_store
from rlsrl.workers.build.trainer import TrainerParts, build_trainer
from rlsrl.workers.checkpoints import LATE, UNSTORED
from rlsrl.workers.context import WorkerContext
from rlsrl.workers.training import Checkpoint

MAX_SLOTS_A_POLL = 1024
"""Limits a poll, so that the main thread checks the other threads often."""
WAKE_SECONDS = 0.1
"""How long the main thread waits for slots before it checks the other threads."""
STEP_DEADLINE_SECONDS = 120.0
"""How long the current training step may take after the worker was asked to exit."""
DISK_DEADLINE_SECONDS = 120.0
"""How long the queued checkpoints may take after that step."""
SERVICE_SECONDS = 4.0
"""How long an absent coordinator may delay the last version of a trainer that was asked to exit. A deleted experiment's
pods are gone within 15 s, with or without a coordinator."""
_RESULT = (
    "env_steps",
    "train_steps",
    "return_mean",
    "length_mean",
    "episode_info",
    "train_seconds",
    "minibatches",
    "minibatches_skipped",
    "non_finite_returns",
)
"""Names of the last version's metadata that the terminal record contains."""


class TrainerWorker(Worker[TrainerConfig]):
    """Trains until a stop condition holds or the worker is asked to exit; both make the last state durable."""

    def __init__(self, context: WorkerContext, *, build: Callable[..., TrainerParts] = build_trainer) -> None:
        super().__init__(report=context.report_stats, log=context.log, clock=context.clock)
        self._context = context
        self._build = build
        self._parts: TrainerParts | None = None
        self._db: ParameterDB | None = None
        self._terminal: Mapping[str, Any] | None = None
        self._late = ""
        """The reported text about a late version."""
        self._exit_requests: queue.SimpleQueue[None] = queue.SimpleQueue()
        """One item for each call of ``exit``. Signal handlers may put items, see ``Worker``."""

    @property
    @override
    def result(self) -> Mapping[str, Any] | None:
        """The run's terminal record, or None while the run is unfinished."""
        return self._terminal

    @override
    def exit(self) -> None:
        # First: ``run`` may return at once.
        self._exit_requests.put(None)
        super().exit()

    @override
    def _configure(self, config: TrainerConfig) -> None:
        session = self._context.join_session
        db = self._db = open_parameter_store(config.parameter_store, open_connection=lambda: session.channel)
        self._terminal = terminal_record(db, config.policy_name)
        if self._terminal is not None:
            self._context.log.info("already_finished", **self._terminal)
            discard_store(config, self._context)
            self.exit()
            return
        # The end of training is no request to exit: the last version may still have to wait for room.
        self._parts = self._build(
            config, self._context, db, on_training_end=super().exit, wait_for_exit=self._wait_for_exit
        )
        self._parts.checkpoints.start()
        self._parts.training.start(is_paused=lambda: not self.is_running)

    @override
    def _adopt(self, config: TrainerConfig) -> None:
        if (parts := self._parts) is not None:
            parts.checkpoints.adopt(config.versions)
            parts.training.adopt(settings_of(config))

    @override
    def start(self) -> None:
        super().start()
        if (parts := self._parts) is not None:
            parts.training.wake()

    @override
    def _rest(self) -> bool:
        """Receive samples as ever. The training thread pauses by itself, at the step at which rank 0 does."""
        self._poll()
        return self._parts is not None and self._parts.training.is_paused

    @override
    def _poll(self) -> PollResult:
        parts = self._parts
        assert parts is not None, "configured before it polls"
        self._context.join_session.check()
        slots = parts.consumer.receive(MAX_SLOTS_A_POLL, timeout=WAKE_SECONDS)
        parts.experience.receive(slots, oldest_outstanding=min(parts.consumer.outstanding, default=None))
        for slot in slots:
            parts.consumer.release(slot)
        parts.checkpoints.check()
        self._report_late(parts)
        self._context.join_session.check()
        return PollResult(num_samples=sum(slot.num_transitions for slot in slots), num_batches=len(slots))

    def _report_late(self, parts: TrainerParts) -> None:
        if (late := parts.checkpoints.late) != self._late:
            self._late = late
            self._context.report_text(LATE, late)

    @override
    def _stats(self) -> Mapping[str, float]:
        return {} if self._parts is None else {UNSTORED: self._parts.checkpoints.num_unstored}

    @override
    def _shutdown(self) -> None:
        """Stop at a step boundary, then store the last state, and the terminal record if a stop condition holds."""
        parts = self._parts
        if parts is None:
            return
        assert self._db is not None, "configured before it shuts down"
        if self._wait_for_exit(0.0):
            self._db.expect_end(SERVICE_SECONDS)
        with parts.resources:
            parts.training.stop()
            parts.training.join(STEP_DEADLINE_SECONDS)
            self._count_untrained(parts)
            with self._context.waiting("store"):
                parts.checkpoints.close(DISK_DEADLINE_SECONDS)
            parts.training.check()
            parts.checkpoints.check()
            final = parts.training.checkpoint(is_permanent=parts.training.ending.is_last_permanent)
            if parts.gang.rank == 0:
                self._store_last(final, parts)
            parts.experience.give_up(run_ended=parts.training.ending.stop_reason is not None)  # only now it is durable
            parts.ledger.end()
            parts.experience.sync()
            parts.gang.close()

    def _count_untrained(self, parts: TrainerParts) -> None:
        """Count slots that were acknowledged but never trained, before the last checkpoint stores the ledger."""
        parts.consumer.close()
        parts.experience.receive(parts.consumer.receive(MAX_SLOTS_A_POLL, timeout=0), oldest_outstanding=None)
        parts.experience.close()

    def _store_last(self, final: Checkpoint, parts: TrainerParts) -> None:
        """Store the last version. If a stop condition holds, wait for room, and store the terminal record, too."""
        ending = parts.training.ending
        reason, failure = ending.stop_reason, ending.run_failure
        if (withdrawn := parts.withdrawn_failure) is not None and not parts.training.has_stepped:
            # The version is the one with which the run had failed, and the trainer that resumes from it must know that.
            final = replace(final, metadata={**final.metadata, WITHDRAWN_KEY: withdrawn})
            if reason is not None:
                reason, failure = UPDATES_SKIPPED, f"{withdrawn}. The retry trained no step, since stop.{reason} holds"
        record: dict[str, Any] | None = None
        if reason is not None:
            result = {name: final.metadata[name] for name in _RESULT}
            record = {"reason": reason, "version": str(final.parameters.version), "result": result}
            record |= {} if failure is None else {"failure": failure}
        with self._context.waiting("store"):
            parts.checkpoints.store_last(final, record=record)
        if record is not None:
            self._terminal = record
            self._context.log.info("finished" if failure is None else "failed", **record)

    def _wait_for_exit(self, seconds: float) -> bool:
        """Wait; return True as soon as ``exit`` was called, also before this call."""
        try:
            self._exit_requests.get(timeout=seconds)
        except queue.Empty:
            return False
        self._exit_requests.put(None)
        return True
