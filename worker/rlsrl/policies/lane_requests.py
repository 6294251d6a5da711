"""Acting lane by lane in threads of their own, by distributions that another thread gets. numpy only.

A lane's thread requests a distribution and waits. The owner of the lanes takes the requests of all that wait at that
moment and answers them: by one evaluation of a policy in this process, or through policy workers.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.data.inference import RolloutRequest, RolloutResult
from rlsrl.data.slots import Slot
from rlsrl.data.specs import EnvSpec
from rlsrl.data.version import INITIAL, Version
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.acting import RolloutActor
from rlsrl.policies.lane_states import LaneStates
from rlsrl.policies.sampling import AS_DISTRIBUTED, Exploration, Sampler, sampler_for


class LanesAbandoned(Exception):
    """The lanes' owner answers no more requests."""


class LaneRequest(NamedTuple):
    """The request of one lane, which waits for its answer."""

    lane: int
    slot: int
    """The number of the ``RequestingLanes`` that fill the slot."""
    request: RolloutRequest
    """Of one lane."""


def by_slot(requests: Sequence[LaneRequest]) -> list[list[LaneRequest]]:
    """Return the requests for each slot, oldest first."""
    slots = {each.slot for each in requests}
    return [[each for each in requests if each.slot == slot] for slot in sorted(slots)]


class LaneRequests:
    """The requests of lanes that wait. Each lane has at most one."""

    def __init__(self, num_lanes: int) -> None:
        self.on_request: Callable[[], None] = lambda: None
        """Called in a lane's thread after each request. The owner sets it before the first one."""
        self._waiting: deque[LaneRequest] = deque()
        self._answers: tuple[queue.SimpleQueue[RolloutResult | None], ...] = tuple(
            queue.SimpleQueue() for _ in range(num_lanes)
        )
        """By lane. None ends the present or the next wait without an answer."""

    def __bool__(self) -> bool:
        """Return whether a lane has asked since the last ``take``."""
        return bool(self._waiting)

    def ask(self, asked: LaneRequest) -> RolloutResult:
        """Return the answer to a request. Waits for it, in the lane's thread.

        Raises:
            LanesAbandoned: ``close`` was called.
        """
        self._waiting.append(asked)
        self.on_request()
        if (answer := self._answers[asked.lane].get()) is None:
            raise LanesAbandoned
        return answer

    def take(self) -> list[LaneRequest]:
        """Return the requests since the last call, oldest first. Owner only."""
        return [self._waiting.popleft() for _ in range(len(self._waiting))]

    def answer(self, lane: int, result: RolloutResult) -> None:
        """End the lane's wait. Owner only."""
        self._answers[lane].put(result)

    def close(self) -> None:
        """End each lane's wait, or its next one, without an answer. Idempotent."""
        for answers in self._answers:
            answers.put(None)


class RequestingLane(RolloutActor):
    """Chooses the actions of one lane of a ``RequestingLanes``. One thread uses it at a time."""

    def __init__(
        self, lanes: RequestingLanes, lane: int, requests: LaneRequests, sampler: Sampler, states: LaneStates
    ) -> None:
        self._lanes = lanes
        self._lane = lane
        self._requests = requests
        self._sampler = sampler
        self._states = states

    @override
    def begin(self, slot: Slot) -> None:
        """Start on a slot. The caller has drawn the noise."""
        self._arrays = slot.arrays
        self._states.begin(slot.arrays)

    @override
    def act(self, step: int) -> NDArray[Any]:
        """Return the actions of that step; wait for their distribution.

        Raises:
            LanesAbandoned: no distribution will come.
        """
        arrays, lanes = self._arrays, self._lanes
        observation = {path: arrays[path][step] for path in lanes.paths}
        if step:
            self._states.forget(arrays["mask"][step - 1])
        request = RolloutRequest(observation=observation, state=self._states.arrays, min_version=lanes.min_version)
        result = self._requests.ask(LaneRequest(self._lane, lanes.number, request))
        self._states.take(result.state)
        lanes.note_version(step, result.version)
        self._sampler.parameters[step] = result.distribution.T
        actions: NDArray[Any] = arrays["action"][step]
        self._sampler.choose(step, actions)
        return actions

    @override
    def finish(self) -> None:
        """Keep the lane's state for the next slot. ``RequestingLanes.finish`` writes the log-probabilities of all."""
        self._states.forget(self._arrays["mask"][-1])


class RequestingLanes:
    """Acts lane by lane, each lane in its own thread, from the noise that ``DistributionActor`` draws.

    Its owner calls ``load``, ``begin`` and ``finish``. In between, each thread calls ``begin`` and ``act`` of its lane.
    """

    def __init__(
        self,
        env_spec: EnvSpec,
        requests: LaneRequests,
        *,
        number: int = 0,
        num_steps: int,
        num_lanes: int,
        rng: np.random.Generator,
        load: Callable[[Parameters], None] = lambda _: None,
        exploration: Exploration = AS_DISTRIBUTED,
        states: Sequence[LaneStates] | None = None,
    ) -> None:
        """Act for slots of ``num_steps`` steps and ``num_lanes`` lanes, with noise from ``rng``.

        ``exploration``: see ``Exploration``.
        ``states``: the recurrent state of each lane, shared with the lanes that fill slots in turn with these. None:
        the policy has no state.
        ``load`` makes the policy that answers these lanes use new weights. The requests carry ``number``.
        """
        self.load = load
        self.number = number
        """In each request."""
        self.paths = tuple(env_spec.observation)
        """Of the observation arrays."""
        self.min_version = INITIAL
        """The oldest weights that may answer."""
        self._sampler = sampler_for(
            env_spec.action, num_steps=num_steps, num_lanes=num_lanes, rng=rng, greedy=False, exploration=exploration
        )
        self._samplers = [self._sampler.of_lane(lane) for lane in range(num_lanes)]
        kept = states if states is not None else [LaneStates({}, 1)] * num_lanes
        self.lanes = tuple(
            RequestingLane(self, lane, requests, sampler, kept[lane]) for lane, sampler in enumerate(self._samplers)
        )
        """By number of the lane."""
        self._lock = threading.Lock()
        self._oldest: list[Version | None] = [None] * num_steps
        """The oldest version that chose an action of each step."""

    def begin(self, slot: Slot) -> None:
        """Start on a slot: draw noise for all its steps."""
        self._arrays, self.min_version = slot.arrays, slot.min_version
        self._oldest = [None] * len(self._oldest)
        self._sampler.begin()

    def note_version(self, step: int, version: Version) -> None:
        """Note the version that chose a lane's action of that step. Thread-safe."""
        with self._lock:
            if (oldest := self._oldest[step]) is None or version < oldest:
                self._oldest[step] = version

    def finish(self) -> None:
        """Write ``behavior_log_prob`` of all steps, and the versions: of each step the oldest of its lanes."""
        arrays = self._arrays
        np.concatenate([sampler.parameters for sampler in self._samplers], axis=2, out=self._sampler.parameters)
        self._sampler.log_probs(arrays["action"], arrays["behavior_log_prob"])
        arrays["version_attempt"][:] = [version.attempt for version in self._oldest if version is not None]
        arrays["version_step"][:] = [version.step for version in self._oldest if version is not None]
