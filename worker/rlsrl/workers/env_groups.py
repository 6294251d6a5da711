"""Groups of environments that fill slots: stepped together, or each environment in a thread of its own."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from typing_extensions import override

from rlsrl.data.slots import Slot
from rlsrl.data.specs import Arrays
from rlsrl.envs.returns import DiscountedReturns
from rlsrl.envs.threads import EnvironmentThreads, lane_of
from rlsrl.envs.vector import VectorEnv
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.acting import RolloutActor
from rlsrl.policies.lane_requests import RequestingLanes
from rlsrl.policies.numpy_policy import NumpyLanes
from rlsrl.runtime.activity import Stage
from rlsrl.workers.lane_evaluation import LaneEvaluation

WAIT_SECONDS = 0.2
"""How long ``ThreadedEnvGroup.advance`` waits by default."""


class EnvGroup(ABC):
    """Environments that fill one slot after another, in the order in which the slots began. One thread uses it."""

    def __init__(self, *, num_steps: int, returns: DiscountedReturns | None) -> None:
        """Fill slots of ``num_steps`` steps. ``returns`` computes their discounted returns where rewards are scaled."""
        self._num_steps = num_steps
        self._returns = returns

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether every slot that began is filled."""

    @property
    @abstractmethod
    def has_room(self) -> bool:
        """Whether another slot can begin, and some environment could work on it at once."""

    @abstractmethod
    def begin(self, slot: Slot) -> None:
        """Start on a slot. ``has_room`` is true."""

    @abstractmethod
    def advance(self, *, touch: Callable[[], None], still_wanted: Callable[[], bool]) -> Slot | None:
        """Work on the slot that began first, and return it if it is full.

        Returns None if the slot waits for an answer of a policy worker or for an environment, and when there is room
        for another slot. It also returns when ``still_wanted`` is false, which it asks once per step. It calls
        ``touch`` when every environment has taken another step, or less often.

        Raises:
            EnvironmentFailed: an environment failed more often than its budget allows.
        """

    @abstractmethod
    def take_spent(self) -> Mapping[Stage, float]:
        """Return the seconds spent by stage since the last call."""

    def abandon(self) -> None:  # noqa: B027 - a group without threads writes only within its calls
        """Write nothing into any slot after this call returns. Idempotent."""

    def _complete(self, slot: Slot) -> Slot:
        """Return a filled slot with all that is computed once per rollout."""
        if self._returns is not None:
            self._returns.write(slot.arrays)
        slot.num_transitions = int(slot.arrays["mask"].sum())
        return slot


class LockstepEnvGroup(EnvGroup):
    """Takes one step of all environments at a time, with actions from one evaluation of the policy."""

    def __init__(
        self, envs: VectorEnv, actor: RolloutActor, *, num_steps: int, returns: DiscountedReturns | None = None
    ) -> None:
        super().__init__(num_steps=num_steps, returns=returns)
        self._envs = envs
        self._actor = actor
        self._slot: Slot | None = None
        self._step = 0
        """The next step of the slot."""
        self._stepping = 0.0
        """Seconds within environments since the last ``take_spent``."""
        self._acting = 0.0
        """Seconds spent on requests and choices since then, waits for policy workers excluded."""

    @property
    @override
    def is_idle(self) -> bool:
        return self._slot is None

    @property
    @override
    def has_room(self) -> bool:
        return self._slot is None

    @override
    def begin(self, slot: Slot) -> None:
        began = time.monotonic()
        self._slot, self._step = slot, 0
        self._envs.begin(slot.arrays)
        self._actor.begin(slot)
        self._acting += time.monotonic() - began

    @override
    def advance(self, *, touch: Callable[[], None], still_wanted: Callable[[], bool]) -> Slot | None:
        """Take steps until the slot is full, the actor waits for an answer, or the slot is not wanted any more."""
        slot = self._slot
        if slot is None:
            return None
        envs, actor, arrays = self._envs, self._actor, slot.arrays
        now, stepping = time.monotonic, 0.0
        began = now()
        for step in range(self._step, self._num_steps):
            actions = actor.act(step)
            if actions is None:
                break
            chosen = now()
            envs.step(arrays, step, actions)
            stepping += now() - chosen
            self._step = step + 1
            touch()
            if not still_wanted():
                break
        if is_full := self._step == self._num_steps:
            actor.finish()
        self._stepping += stepping
        self._acting += now() - began - stepping
        if not is_full:
            return None
        self._slot = None
        return self._complete(slot)

    @override
    def take_spent(self) -> Mapping[Stage, float]:
        spent: Mapping[Stage, float] = {"environment": self._stepping, "inference": self._acting}
        self._stepping = self._acting = 0.0
        return spent


class ThreadedEnvGroup(EnvGroup):
    """Steps each environment in its own thread, as fast as it goes.

    The thread also evaluates the policy for it, or requests evaluations, which the group answers while it waits. An
    environment that has filled its lane of a slot goes on to the next slot, which begins when the first environment
    gets there. So no environment waits for the slowest, unless that one is a whole slot behind. A lane's content
    depends on its environment, the weights and the noise, which ``begin`` draws. It does not depend on the order in
    which threads run.
    """

    def __init__(
        self,
        environments: EnvironmentThreads,
        actors: tuple[NumpyLanes, NumpyLanes] | tuple[RequestingLanes, RequestingLanes],
        *,
        num_steps: int,
        returns: DiscountedReturns | None = None,
        evaluation: LaneEvaluation | None = None,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        """Fill slots of ``num_steps`` steps.

        Args:
            environments: the threads.
            actors: take turns, since one slot begins while the one before is being filled. They share a generator.
            num_steps: steps of a slot.
            returns: computes discounted returns where rewards are scaled.
            evaluation: answers the requests of lanes; None: lanes evaluate the policy themselves.
            wait_seconds: how long ``advance`` waits for its threads before it returns to the worker's loop.
        """
        super().__init__(num_steps=num_steps, returns=returns)
        self._environments = environments
        self._actors = actors
        self._evaluation = evaluation
        self._wait_seconds = wait_seconds
        self._parameters: Parameters | None = None
        self._filling: deque[Slot] = deque()
        self._num_begun = 0
        self._steps_taken = [0] * environments.num_envs
        """By lane. Each thread writes only its own entry of this list and of the next two."""
        self._stepping = [0.0] * environments.num_envs
        """Seconds within the environment, by lane."""
        self._acting = [0.0] * environments.num_envs
        """Seconds spent on choosing actions, by lane."""
        self._reported: Mapping[Stage, float] = {"environment": 0.0, "inference": 0.0}
        """The means at the last ``take_spent``."""
        self._touched_at = 0
        """The least steps of any lane at the last ``touch``."""

    @property
    @override
    def is_idle(self) -> bool:
        return not self._filling

    @property
    @override
    def has_room(self) -> bool:
        a_thread_is_free = self._environments.num_done_by_first == self._num_begun
        return a_thread_is_free and len(self._filling) < len(self._actors)

    def load(self, parameters: Parameters) -> None:
        """Act with these weights in slots that begin from now on."""
        self._parameters = parameters

    @override
    def begin(self, slot: Slot) -> None:
        """Have every thread fill its lane of the slot.

        Raises:
            LayoutMismatch: the weights belong to another network.
        """
        actor = self._actors[self._num_begun % len(self._actors)]
        if self._parameters is not None:  # policy workers have weights of their own
            actor.load(self._parameters)
        actor.begin(slot)
        self._filling.append(slot)
        self._num_begun += 1
        self._environments.begin(partial(self._fill_lane, slot.arrays, actor.lanes))

    @override
    def advance(self, *, touch: Callable[[], None], still_wanted: Callable[[], bool]) -> Slot | None:
        """Wait up to ``wait_seconds`` for the first slot or for room."""
        del still_wanted  # the wait is short
        if not self._filling:
            return None
        number, had_room = self._num_begun - len(self._filling), self.has_room

        def is_due() -> bool:
            return self._environments.num_done > number or (self.has_room and not had_room)

        (self._evaluation or self._environments).wait(is_due, self._wait_seconds)
        if (fewest := min(self._steps_taken)) > self._touched_at:
            self._touched_at = fewest
            touch()
        if self._environments.num_done == number:
            return None
        self._actors[number % len(self._actors)].finish()
        return self._complete(self._filling.popleft())

    @override
    def take_spent(self) -> Mapping[Stage, float]:
        """Return means over the threads: some threads are ahead of others."""
        reported, num_envs = self._reported, self._environments.num_envs
        self._reported = {"environment": sum(self._stepping) / num_envs, "inference": sum(self._acting) / num_envs}
        return {stage: seconds - reported[stage] for stage, seconds in self._reported.items()}

    @override
    def abandon(self) -> None:
        if self._evaluation is not None:
            self._evaluation.close()
        self._environments.abandon()

    def _fill_lane(self, arrays: Arrays, actors: Sequence[RolloutActor], lane: int, envs: VectorEnv) -> None:
        """Fill one lane of a slot, in that lane's thread."""
        lane_arrays, actor, now = lane_of(arrays, lane), actors[lane], time.monotonic
        envs.begin(lane_arrays)
        actor.begin(Slot(arrays=lane_arrays))
        done = now()
        for step in range(self._num_steps):
            actions = actor.act(step)
            assert actions is not None, "lanes wait for their actions"
            chosen = now()
            envs.step(lane_arrays, step, actions)
            self._acting[lane] += chosen - done
            done = now()
            self._stepping[lane] += done - chosen
            self._steps_taken[lane] += 1
        actor.finish()
