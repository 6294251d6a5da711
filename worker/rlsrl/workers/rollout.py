"""How an actor fills a slot: all environments step by step, or each environment in a thread of its own."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from rlsrl.data.slots import Slot
from rlsrl.data.specs import Arrays
from rlsrl.envs.threads import EnvironmentThreads
from rlsrl.envs.vector import VectorEnv
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.acting import RolloutActor
from rlsrl.policies.lanes import NumpyLane, NumpyLanes
from rlsrl.runtime.activity import Stage

LOOK_SECONDS = 0.2
"""How long the owner of environments in threads waits for them before it looks after other things."""


class Rollout(Protocol):
    """Fills slots, in the order in which they are begun. One thread uses it."""

    @property
    def is_idle(self) -> bool:
        """Whether no slot was begun that is not filled."""

    @property
    def has_room(self) -> bool:
        """Whether another slot can be begun, and somebody could work on it."""

    def load(self, parameters: Parameters) -> None:
        """Act with these weights in slots that are begun from now on."""

    def begin(self, slot: Slot) -> None:
        """Start on a slot; there is room. It may go on by itself."""

    def advance(self, *, touch: Callable[[], None], still_wanted: Callable[[], bool]) -> Slot | None:
        """The slot that was begun first, if it is full; None if it is not, or there is none, or nobody wants it.

        Waits for it, and returns without it where there comes to be room for another, or after ``LOOK_SECONDS``.
        ``touch`` is called whenever every environment has taken another step, or more rarely.

        Raises:
            EnvironmentFailed: an environment raised.
        """

    def take_spent(self) -> Mapping[Stage, float]:
        """Seconds by what they were spent on in slots that became full since the last call."""

    def abandon(self) -> None:
        """No slot is wanted any more: nothing is written into any of them from the return on. Idempotent."""


class LockstepRollout:
    """One step of all environments at a time, by one evaluation of the policy; all in ``advance``."""

    def __init__(self, envs: VectorEnv, actor: RolloutActor, *, num_steps: int) -> None:
        self._envs = envs
        self._actor = actor
        self._num_steps = num_steps
        self._slot: Slot | None = None
        self._spent: Mapping[Stage, float] = {}

    @property
    def is_idle(self) -> bool:
        """See ``Rollout``."""
        return self._slot is None

    @property
    def has_room(self) -> bool:
        """See ``Rollout``."""
        return self._slot is None

    def load(self, parameters: Parameters) -> None:
        """See ``Rollout``."""
        self._actor.load(parameters)

    def begin(self, slot: Slot) -> None:
        """See ``Rollout``."""
        self._slot = slot

    def advance(self, *, touch: Callable[[], None], still_wanted: Callable[[], bool]) -> Slot | None:
        """See ``Rollout``. Fills the whole slot unless it is not wanted any more, which it asks once a step."""
        slot = self._slot
        if slot is None:
            return None
        envs, actor, arrays = self._envs, self._actor, slot.arrays
        now, stepping = time.monotonic, 0.0
        began = now()
        envs.begin(arrays)
        actor.begin(slot)
        for step in range(self._num_steps):
            actions = actor.act(step)
            chosen = now()
            envs.step(arrays, step, actions)
            stepping += now() - chosen
            touch()
            if not still_wanted():
                return None
        actor.finish()
        self._spent = {"environment": stepping, "inference": now() - began - stepping}
        self._slot = None
        return slot

    def take_spent(self) -> Mapping[Stage, float]:
        """See ``Rollout``."""
        spent, self._spent = self._spent, {}
        return spent

    def abandon(self) -> None:
        """See ``Rollout``."""


class ThreadedRollout:
    """Each environment by itself, as fast as it goes; the policy is evaluated in its thread.

    An environment that is through with a slot goes on to the next one, which is begun when the first is there: so none
    waits for the slowest but where that is a slot behind. What a lane gets depends on its environment, the weights and
    the noise, which is drawn in ``begin``: not on who was faster.
    """

    def __init__(
        self, environments: EnvironmentThreads, actors: tuple[NumpyLanes, NumpyLanes], *, num_steps: int
    ) -> None:
        """``actors`` act in turns, as a slot is begun while the one before is filled; they draw from one generator."""
        self._environments = environments
        self._actors = actors
        self._num_steps = num_steps
        self._parameters: Parameters | None = None
        self._filling: deque[Slot] = deque()
        self._num_begun = 0
        self._steps_taken = [0] * environments.num_envs
        """By lane; each thread counts its own, here and below."""
        self._stepping = [0.0] * environments.num_envs
        """Seconds within the environment."""
        self._acting = [0.0] * environments.num_envs
        """Seconds that the choice of actions took."""
        self._told: Mapping[Stage, float] = {"environment": 0.0, "inference": 0.0}
        self._touched_at = 0
        """What the slowest had taken at the last sign of life."""

    @property
    def is_idle(self) -> bool:
        """See ``Rollout``."""
        return not self._filling

    @property
    def has_room(self) -> bool:
        """See ``Rollout``."""
        some_has_nothing_to_do = self._environments.num_done_by_first == self._num_begun
        return some_has_nothing_to_do and len(self._filling) < len(self._actors)

    def load(self, parameters: Parameters) -> None:
        """See ``Rollout``."""
        self._parameters = parameters

    def begin(self, slot: Slot) -> None:
        """See ``Rollout``.

        Raises:
            LayoutMismatch: the weights are of another network.
        """
        assert self._parameters is not None, "load() comes before begin()"
        actor = self._actors[self._num_begun % len(self._actors)]
        actor.load(self._parameters)
        actor.begin(slot)
        self._filling.append(slot)
        self._num_begun += 1
        self._environments.begin(partial(self._fill_lane, slot.arrays, actor.lanes))

    def advance(self, *, touch: Callable[[], None], still_wanted: Callable[[], bool]) -> Slot | None:  # noqa: ARG002
        """See ``Rollout``."""
        if not self._filling:
            return None
        number, had_room = self._num_begun - len(self._filling), self.has_room

        def is_due() -> bool:
            return self._environments.num_done > number or (self.has_room and not had_room)

        self._environments.wait(is_due, LOOK_SECONDS)
        if (fewest := min(self._steps_taken)) > self._touched_at:
            self._touched_at = fewest
            touch()
        if self._environments.num_done == number:
            return None
        self._actors[number % len(self._actors)].finish()
        return self._filling.popleft()

    def take_spent(self) -> Mapping[Stage, float]:
        """See ``Rollout``. Means over the threads, of whom some are ahead."""
        told = self._told
        num_envs = self._environments.num_envs
        self._told = {"environment": sum(self._stepping) / num_envs, "inference": sum(self._acting) / num_envs}
        return {stage: seconds - told[stage] for stage, seconds in self._told.items()}

    def abandon(self) -> None:
        """See ``Rollout``."""
        self._environments.abandon()

    def _fill_lane(self, arrays: Arrays, actors: Sequence[NumpyLane], lane: int, envs: VectorEnv) -> None:
        mine, actor, now = _lane_of(arrays, lane), actors[lane], time.monotonic
        envs.begin(mine)
        actor.begin(mine)
        done = now()
        for step in range(self._num_steps):
            actions = actor.act(step)
            chosen = now()
            envs.step(mine, step, actions)
            self._acting[lane] += chosen - done
            done = now()
            self._stepping[lane] += done - chosen
            self._steps_taken[lane] += 1


def _lane_of(arrays: Arrays, lane: int) -> Arrays:
    """What a slot has of a lane, as the arrays of a slot of one lane."""
    return {name: array[:, lane : lane + 1] for name, array in arrays.items() if array.ndim > 1}
