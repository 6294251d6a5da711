"""The buffer worker: a bounded, acknowledged FIFO between actors and trainers, or a shard of a replay store.

Actors post to it as to a trainer, and it posts to every trainer rank as an actor does; see
``rlsrl.workers.forwarder``. Only its ledger page outlives it. The page counts the transitions that are lost with it:
those acknowledged and not passed on. With an algorithm that replays it keeps them; see ``rlsrl.workers.shard_core``.
"""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import override

from rlsrl.api.resolved import BufferConfig
from rlsrl.runtime.activity import CREDIT
from rlsrl.runtime.worker import PollResult, Worker
from rlsrl.workers.build.buffer import BufferParts, build_buffer
from rlsrl.workers.context import WorkerContext

WAKE_SECONDS = 0.2
"""How long a poll waits for slots."""


class BufferWorker(Worker[BufferConfig]):
    """Forwards slots until a command or a signal ends it. One poll forwards the slots that have arrived."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(report=context.report_stats, log=context.log, clock=context.clock)
        self._context = context
        self._parts: BufferParts | None = None
        self._slots_passed_on = 0

    @override
    def _configure(self, config: BufferConfig) -> None:
        self._parts = build_buffer(config, self._context)
        self._parts.core.start()

    @override
    def _poll(self) -> PollResult:
        parts = self._parts
        assert parts is not None, "configured before it polls"
        self._context.join_session.check()
        parts.core.check()
        with self._context.waiting("samples" if parts.core.has_credits else CREDIT):
            parts.core.receive(WAKE_SECONDS)
        forwarded = parts.core.forward()
        self._slots_passed_on += forwarded.num_slots
        self._context.metrics.rollouts.inc(forwarded.num_slots)
        return PollResult(num_samples=forwarded.num_transitions, num_batches=forwarded.num_slots)

    @override
    def _rest(self) -> bool:
        """Receive slots, which keeps both streams alive, and keep them. Credits bound their number."""
        parts = self._parts
        assert parts is not None, "configured before it rests"
        self._context.join_session.check()
        parts.core.check()
        parts.core.receive(WAKE_SECONDS)
        return True

    @override
    def _shutdown(self) -> None:
        if self._parts is not None:
            with self._parts.resources:
                self._parts.core.close()
                self._parts.ledger.end()
                self._parts.core.sync()

    @override
    def _stats(self) -> Mapping[str, float]:
        return {"slots_passed_on": float(self._slots_passed_on)}
