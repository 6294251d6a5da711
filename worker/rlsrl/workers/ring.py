"""The actor whose policy is evaluated elsewhere: while one group's answer is on its way it steps another group.

Its environments are divided into groups, the ring. Each group fills a slot of its own under a credit of its own, and
asks a policy worker once a step. One thread: it waits for credits when no group has a slot, else for the first answer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

from rlsrl.api.resolved import ActorConfig
from rlsrl.data.inference import RolloutResult
from rlsrl.data.slots import Slot
from rlsrl.data.version import INITIAL
from rlsrl.runtime.worker import PollResult, Worker
from rlsrl.streams.inference import Answer, InferenceFailed
from rlsrl.streams.protocols import StreamTimeout
from rlsrl.workers.build.ring import GroupParts, RingParts, build_ring
from rlsrl.workers.context import WorkerContext

WAKE_SECONDS = 0.2
"""How long the actor waits for its trainer or a policy worker before it looks whether it should exit."""
MAX_FAILURES = 3
"""How often one request may fail before the actor fails. A policy worker whose policy raised ends and is started anew:
that is its own failure first, and only what fails again and again may be the actor's."""

NOTHING = PollResult()


class RingWorker(Worker[ActorConfig]):
    """Rolls out the policy for as long as there are credits."""

    def __init__(
        self, context: WorkerContext, *, build: Callable[[ActorConfig, WorkerContext], RingParts] = build_ring
    ) -> None:
        super().__init__(report=context.report_stats, log=context.log, clock=context.clock)
        self._context = context
        self._build = build
        self._parts: RingParts | None = None
        self._groups: list[_Group] = []
        self._turn = 0
        """The group that is first to get a credit."""
        self._groups_asking: dict[int, _Group] = {}
        """By the numbers of their requests."""
        self._answers: deque[Answer] = deque()
        """That came together with those of other groups."""
        self._version = INITIAL
        self._env_steps = 0
        self._stepping = 0.0
        """Seconds within environments since the last slot was posted."""
        self._asking = 0.0
        """Seconds that asking and choosing took since then; waiting is none of it."""

    def _configure(self, config: ActorConfig) -> None:
        parts = self._parts = self._build(config, self._context)
        self._groups = [_Group(group) for group in parts.groups]

    def _poll(self) -> PollResult:
        parts = self._parts
        assert parts is not None, "configured before it polls"
        self._context.join_session.check()
        self._hand_out_credits(parts)
        answer = self._next_answer(parts)
        if answer is None:
            return NOTHING
        group = self._groups_asking.pop(answer.number)
        if self._advance(parts, group, answer):
            return self._post(parts, group)
        self._ask(parts, group)
        return NOTHING

    def _hand_out_credits(self, parts: RingParts) -> None:
        """Start idle groups on the credits that are there, in turn; waits for one only if all groups are idle."""
        while idle := [group for group in self._groups[self._turn :] + self._groups[: self._turn] if not group.slot]:
            slot = self._acquire(parts, waits=len(idle) == len(self._groups))
            if slot is None:
                return
            group = idle[0]
            self._turn = (self._groups.index(group) + 1) % len(self._groups)
            group.begin(slot)
            self._ask(parts, group)

    def _acquire(self, parts: RingParts, *, waits: bool) -> Slot | None:
        try:
            if not waits:
                return parts.producer.acquire(timeout=0)
            with self._context.waiting("credit"):
                return parts.producer.acquire(timeout=WAKE_SECONDS)
        except StreamTimeout:
            return None

    def _ask(self, parts: RingParts, group: _Group) -> None:
        began = self._clock.monotonic()
        self._groups_asking[parts.client.submit(group.parts.actor.ask(group.step))] = group
        self._asking += self._clock.monotonic() - began

    def _next_answer(self, parts: RingParts) -> Answer | None:
        """The answer that came first; None if none comes in time, or nothing was asked."""
        if self._answers:
            # Sends what was asked since: sent after the next step, groups that were answered together would be so for
            # ever, and nobody would step while another's answer is on its way.
            self._answers.extend(parts.client.wait(0.0))
        elif self._groups_asking:
            with self._context.waiting("inference"):
                self._answers.extend(parts.client.wait(WAKE_SECONDS))
            if not self._answers:
                parts.producer.touch()
        return self._answers.popleft() if self._answers else None

    def _advance(self, parts: RingParts, group: _Group, answer: Answer) -> bool:
        """Take the group's next step with the answer that came; whether its slot is full."""
        result = self._read(group, answer)
        if result is None:
            return False
        began = self._clock.monotonic()
        stepping = group.take_step(result)
        self._stepping += stepping
        self._asking += self._clock.monotonic() - began - stepping
        parts.producer.touch()
        return group.step == parts.num_steps

    def _read(self, group: _Group, answer: Answer) -> RolloutResult | None:
        """What was answered; None if it has to be asked for again.

        Raises:
            InferenceFailed: it was asked for too often.
        """
        result = answer.result
        if isinstance(result, InferenceFailed):
            group.failures += 1
            self._context.log.warning("inference_failed", failures=group.failures, error=str(result))
            if group.failures >= MAX_FAILURES:
                raise result
            return None
        group.failures = 0
        if result.version > self._version:
            self._version = result.version
            self._context.report_version(result.version)
        return result

    def _post(self, parts: RingParts, group: _Group) -> PollResult:
        slot = group.finish()
        began = self._clock.monotonic()
        parts.producer.post(slot)
        posting = self._clock.monotonic() - began
        self._context.spent({"environment": self._stepping, "inference": self._asking, "copy": posting})
        self._stepping = self._asking = 0.0
        self._env_steps += slot.num_transitions
        self._context.metrics.env_steps.inc(slot.num_transitions)
        self._context.metrics.rollouts.inc()
        return PollResult(num_samples=slot.num_transitions, num_batches=1)

    def _shutdown(self) -> None:
        if self._parts is not None:
            with self._parts.resources:
                self._parts.ledger.end()

    def _stats(self) -> Mapping[str, float]:
        return {"env_steps": float(self._env_steps)}


class _Group:
    """How far a group of environments is with its slot."""

    def __init__(self, parts: GroupParts) -> None:
        self.parts = parts
        self.slot: Slot | None = None
        self.step = 0
        """The step whose actions are being asked for."""
        self.failures = 0
        """How often in a row the present request failed."""

    def begin(self, slot: Slot) -> None:
        """Start on a slot."""
        self.slot, self.step = slot, 0
        self.parts.envs.begin(slot.arrays)
        self.parts.actor.begin(slot)

    def take_step(self, answer: RolloutResult) -> float:
        """Act by the answer; returns how many seconds of it the environments took.

        Raises:
            RuntimeError: it was given by weights that are older than the slot allows.
        """
        slot, step = self.slot, self.step
        assert slot is not None, "a group that was answered has one"
        if answer.version < slot.min_version:
            raise RuntimeError(f"a policy worker answered with {answer.version} where {slot.min_version} was asked for")
        actions = self.parts.actor.act(step, answer)
        chosen = time.monotonic()
        self.parts.envs.step(slot.arrays, step, actions)
        self.step += 1
        return time.monotonic() - chosen

    def finish(self) -> Slot:
        """The slot, complete; the group is idle again."""
        slot, self.slot = self.slot, None
        assert slot is not None, "a group that is full has one"
        self.parts.actor.finish()
        if self.parts.returns is not None:
            self.parts.returns.write(slot.arrays)
        slot.num_transitions = int(slot.arrays["mask"].sum())
        return slot
