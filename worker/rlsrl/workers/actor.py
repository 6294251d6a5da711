"""The actor: steps environments and writes each transition into slots.

Its environments form one or more groups. Each group fills slots of its own, under one credit per slot. The actor
evaluates the policy itself, or asks policy workers: then it steps one group while another group waits for its answer.

One poll begins slots on groups with room, then advances the group that can go on. Its one thread waits for a credit
while all groups are idle, for weights as new as the credit asks for, and for the first answer of a policy worker.
Within a step it may wait for an environment's server, until it is asked to exit.

A paused actor fills the slots that it has begun. Then it disconnects from the consumers, so that other actors get its
credits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress

from typing_extensions import override

from rlsrl.api.resolved import ActorConfig
from rlsrl.data.slots import Slot
from rlsrl.data.version import INITIAL, Version
from rlsrl.envs.unreachable import WaitAbandoned
from rlsrl.parameters.protocols import SourceTimeout
from rlsrl.policies.remote import RemotePolicy
from rlsrl.runtime.activity import CREDIT
from rlsrl.runtime.worker import PollResult, Worker
from rlsrl.streams.protocols import StreamTimeout
from rlsrl.workers.build.actor import ActorParts, BuildActor, LocalPolicy, build_actor
from rlsrl.workers.context import WorkerContext
from rlsrl.workers.env_groups import EnvGroup

WAKE_SECONDS = 0.2
"""How long one wait for a credit, for weights or for an answer may take: between waits the actor checks for exit."""
NOTHING = PollResult()


class ActorWorker(Worker[ActorConfig]):
    """Fills slots while there are credits."""

    def __init__(self, context: WorkerContext, *, build: BuildActor = build_actor) -> None:
        super().__init__(report=context.report_stats, log=context.log, clock=context.clock)
        self._context = context
        self._build = build
        self._parts: ActorParts | None = None
        self._turns: deque[EnvGroup] = deque()
        """The groups in the order in which they get credits."""
        self._slot: Slot | None = None
        """A slot that waits for weights as new as its credit asks for."""
        self._version = INITIAL
        self._env_steps = 0
        self._is_disconnected = False
        """Whether the actor is paused and has no credits."""

    @override
    def _configure(self, config: ActorConfig) -> None:
        parts = self._parts = self._build(config, self._context, still_wanted=self._still_wanted)
        if parts is not None:
            self._turns.extend(parts.groups)

    def _still_wanted(self) -> bool:
        return not self.exiting

    @override
    def _poll(self) -> PollResult:
        parts = self._parts
        assert parts is not None, "without parts it is exiting"
        self._context.join_session.check()
        self._is_disconnected = False
        try:
            self._begin_slots(parts)
            return self._advance(parts)
        except WaitAbandoned:
            return NOTHING  # it exits: no poll follows

    @override
    def _rest(self) -> bool:
        parts = self._parts
        assert parts is not None, "without parts it is exiting"
        self._context.join_session.check()
        if not all(group.is_idle for group in parts.groups):
            with suppress(WaitAbandoned):  # it exits
                self._advance(parts)
            return False
        if not self._is_disconnected:
            try:
                parts.producer.flush(WAKE_SECONDS)
            except StreamTimeout:
                return False
            parts.producer.disconnect()
            self._is_disconnected = True
        return super()._rest()

    def _advance(self, parts: ActorParts) -> PollResult:
        group = self._next_group(parts)
        if group is None:
            return NOTHING
        slot = group.advance(touch=parts.producer.touch, still_wanted=self._still_wanted)
        return NOTHING if slot is None else self._post(parts, group, slot)

    def _begin_slots(self, parts: ActorParts) -> None:
        """Begin slots on groups with room, in turn. Wait for a credit and weights only while all groups are idle."""
        while (group := next((group for group in self._turns if group.has_room), None)) is not None:
            waits = all(each.is_idle for each in parts.groups)
            slot = self._slot = self._slot or self._acquire(parts, waits=waits)
            if slot is None or not self._refresh(parts, slot.min_version, waits=waits):
                return
            self._slot = None
            self._turns.rotate(-1 - self._turns.index(group))
            group.begin(slot)

    def _acquire(self, parts: ActorParts, *, waits: bool) -> Slot | None:
        try:
            if not waits:
                return parts.producer.acquire(timeout=0)
            with self._context.waiting(CREDIT):
                return parts.producer.acquire(timeout=WAKE_SECONDS)
        except StreamTimeout:
            return None

    def _refresh(self, parts: ActorParts, min_version: Version, *, waits: bool) -> bool:
        """Load the newest weights. Return whether they are as new as the slot asks for."""
        policy = parts.policy
        if not isinstance(policy, LocalPolicy):
            return True
        newer = policy.source.get(newer_than=self._version)
        if newer is None and self._version < min_version and waits:
            parts.producer.touch()  # keeps the slot's credit, however long a training step takes
            with self._context.waiting("parameters"):
                try:
                    newer = policy.source.wait(min_version, timeout=WAKE_SECONDS)
                except SourceTimeout:
                    return False
        if newer is not None:
            policy.load(newer)
            self._version = newer.version
            self._context.report_version(newer.version)
        return self._version >= min_version

    def _next_group(self, parts: ActorParts) -> EnvGroup | None:
        """Return the group that can go on; with policy workers, the group whose answer came first."""
        if not isinstance(parts.policy, RemotePolicy):
            return next((group for group in parts.groups if not group.is_idle), None)
        number = parts.policy.next_answered(WAKE_SECONDS)
        if number is None:
            parts.producer.touch()
            return None
        return parts.groups[number]

    def _post(self, parts: ActorParts, group: EnvGroup, slot: Slot) -> PollResult:
        began = self._clock.monotonic()
        self._count_dropped(parts)
        parts.producer.post(slot)
        self._context.spent({**group.take_spent(), "copy": self._clock.monotonic() - began})
        self._env_steps += slot.num_transitions
        self._context.metrics.env_steps.inc(slot.num_transitions)
        self._context.metrics.rollouts.inc()
        return PollResult(num_samples=slot.num_transitions, num_batches=1)

    def _count_dropped(self, parts: ActorParts) -> None:
        """Write into the ledger what the environments' faults have kept out of the slots."""
        if dropped := parts.faults.take_dropped():
            parts.ledger.discarded("non_finite", dropped)

    @override
    def _shutdown(self) -> None:
        if self._parts is not None:
            with self._parts.resources:
                self._count_dropped(self._parts)
                self._parts.ledger.end()

    @override
    def _stats(self) -> Mapping[str, float]:
        return {"env_steps": float(self._env_steps)}
