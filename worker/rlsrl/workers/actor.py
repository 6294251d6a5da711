"""The actor: steps environments and writes what happens into slots.

It acts by itself ("inline inference") with the newest weights that were published. One poll is one rollout: a credit,
weights at least as new as the credit asks for, T steps of N environments straight into the slot, and off it goes.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlsrl.api.resolved import ActorConfig
from rlsrl.data.slots import Slot
from rlsrl.data.version import INITIAL, Version
from rlsrl.parameters.protocols import SourceTimeout
from rlsrl.runtime.worker import PollResult, Worker
from rlsrl.streams.protocols import StreamTimeout
from rlsrl.workers.build.actor import ActorParts, build_actor
from rlsrl.workers.context import WorkerContext

WAKE_SECONDS = 0.2
"""How long the actor waits for its trainer before it looks whether it should exit."""
NOTHING = PollResult()


class ActorWorker(Worker[ActorConfig]):
    """Rolls out the policy for as long as there are credits."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(report=context.report_stats, log=context.log, clock=context.clock)
        self._context = context
        self._parts: ActorParts | None = None
        self._slot: Slot | None = None
        self._version = INITIAL
        self._env_steps = 0

    def _configure(self, config: ActorConfig) -> None:
        self._parts = build_actor(config, self._context, still_wanted=lambda: not self.exiting)

    def _poll(self) -> PollResult:
        parts = self._parts
        assert parts is not None, "without parts it is exiting"
        self._context.join_session.check()
        if parts.rollout.has_room:
            self._begin(parts)
        slot = parts.rollout.advance(touch=parts.producer.touch, still_wanted=lambda: not self.exiting)
        if slot is None:
            return NOTHING
        if parts.returns is not None:
            parts.returns.write(slot.arrays)
        slot.num_transitions = int(slot.arrays["mask"].sum())
        began = self._clock.monotonic()
        parts.producer.post(slot)
        self._context.spent({**parts.rollout.take_spent(), "copy": self._clock.monotonic() - began})
        self._env_steps += slot.num_transitions
        self._context.metrics.env_steps.inc(slot.num_transitions)
        self._context.metrics.rollouts.inc()
        return PollResult(num_samples=slot.num_transitions, num_batches=1)

    def _begin(self, parts: ActorParts) -> None:
        """Begin on another slot, if there is a credit and weights for it; waits for them only if all else is done."""
        waits = parts.rollout.is_idle
        slot = self._slot = self._slot or self._acquire(parts, waits=waits)
        if slot is not None and self._refresh(parts, slot.min_version, waits=waits):
            self._slot = None
            parts.rollout.begin(slot)

    def _acquire(self, parts: ActorParts, *, waits: bool) -> Slot | None:
        try:
            if not waits:
                return parts.producer.acquire(timeout=0)
            with self._context.waiting("credit"):
                return parts.producer.acquire(timeout=WAKE_SECONDS)
        except StreamTimeout:
            return None

    def _refresh(self, parts: ActorParts, min_version: Version, *, waits: bool) -> bool:
        """Take the newest weights; False while there are none as new as the slot asks for."""
        newer = parts.parameters.get(newer_than=self._version)
        if newer is None and self._version < min_version and waits:
            parts.producer.touch()  # the slot in hand is not forgotten, however long a training step takes
            with self._context.waiting("parameters"):
                try:
                    newer = parts.parameters.wait(min_version, timeout=WAKE_SECONDS)
                except SourceTimeout:
                    return False
        if newer is not None:
            parts.rollout.load(newer)
            self._version = newer.version
            self._context.report_version(newer.version)
        return self._version >= min_version

    def _shutdown(self) -> None:
        if self._parts is not None:
            with self._parts.resources:
                self._parts.ledger.end()

    def _stats(self) -> Mapping[str, float]:
        return {"env_steps": float(self._env_steps)}
