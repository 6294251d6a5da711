"""The two protocols of acting: a policy maps observations to distributions, an actor draws the actions of a rollout.

A ``Policy`` answers requests of any number of lanes; policy workers and trainers hold one. A ``RolloutActor`` fills
the slots of one group of lanes; actors and evaluators hold one or more. ``NumpyActor`` (``numpy_policy``) is the
fastest; ``PolicyActor``, here, acts by any policy in the process; ``RemoteActor`` (``remote``) asks policy workers.
numpy only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.data.inference import RolloutRequest, RolloutResult
from rlsrl.data.slots import Slot
from rlsrl.data.specs import ArraySpec, EnvSpec
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.exported import ExportedActor
from rlsrl.policies.lane_states import LaneStates
from rlsrl.policies.sampling import AS_DISTRIBUTED, Exploration, sampler_for


class Policy(ABC):
    """Maps observations to action distributions with the weights last loaded. One thread uses it."""

    state: Mapping[str, ArraySpec]
    """The spec of its recurrent state by name, per lane; empty for a policy without memory."""
    is_quick: bool
    """Whether ``predict`` takes less time than it takes to hand requests over to another thread."""

    @abstractmethod
    def load(self, parameters: Parameters) -> None:
        """Evaluate with these weights from now on.

        Raises:
            LayoutMismatch: the weights belong to another network.
        """

    @abstractmethod
    def predict(self, requests: Sequence[RolloutRequest]) -> list[RolloutResult]:
        """Return one result per request, in order, from one evaluation of all their lanes together.

        With a recurrent state each request has the state of its lanes, and each result their next one.
        """

    @abstractmethod
    def export(self) -> ExportedActor | None:
        """Return the policy in its torch-free form, or None if its network has none."""


class RolloutActor(Protocol):
    """Chooses the actions of one group of lanes, slot after slot. One thread uses it.

    Work that can be done once per rollout is not done per step: ``begin`` draws the noise of all steps, and ``finish``
    computes all log-probabilities.
    """

    def begin(self, slot: Slot) -> None:
        """Start on a slot whose frame 0 is written: draw noise for all its steps."""

    def act(self, step: int) -> NDArray[Any] | None:
        """Return the actions of that step, [N, ...], or None while a policy worker has not answered.

        Reads the frame ``observation...[step]`` of the slot. Writes ``action[step]``, ``version_attempt[step]`` and
        ``version_step[step]``, and returns ``action[step]``. After None, call it again for the same step.
        """

    def finish(self) -> None:
        """Write ``behavior_log_prob`` of all steps. The slot is complete afterwards.

        A policy with memory needs this call before the next slot begins: it reads the slot's ``mask``.
        """


class LocalActor(RolloutActor, Protocol):
    """An actor that evaluates its policy itself, with the weights last loaded."""

    def load(self, parameters: Parameters) -> None:
        """Act with these weights from the next step on.

        Raises:
            LayoutMismatch: the weights belong to another network.
        """

    @override
    def act(self, step: int) -> NDArray[Any]:
        """Return the actions of that step: never None."""

    def restart(self) -> None:
        """Forget what was observed: the first frame of the next slot begins an episode in each lane."""


class DistributionActor:
    """The part of acting that evaluates nothing: it builds requests and draws actions from the results.

    The noise is the actor's own, so its actions do not depend on where the policy is evaluated.
    """

    def __init__(
        self,
        env_spec: EnvSpec,
        *,
        num_steps: int,
        num_lanes: int,
        rng: np.random.Generator,
        greedy: bool = False,
        exploration: Exploration = AS_DISTRIBUTED,
        state: Mapping[str, ArraySpec] | None = None,
    ) -> None:
        """Act for slots of ``num_steps`` steps and ``num_lanes`` lanes, with noise from ``rng``.

        ``greedy``: take the most probable action, as evaluation does. ``exploration``: see ``Exploration``.
        ``state``: the spec of the policy's recurrent state by name, per lane; None: it has none.
        """
        self._paths = list(env_spec.observation)
        self._states = LaneStates(state or {}, num_lanes)
        self._sampler = sampler_for(
            env_spec.action, num_steps=num_steps, num_lanes=num_lanes, rng=rng, greedy=greedy, exploration=exploration
        )

    def begin(self, slot: Slot) -> None:
        """Start on a slot: draw noise for all its steps, and write the lanes' states."""
        self._arrays, self._min_version = slot.arrays, slot.min_version
        self._sampler.begin()
        self._states.begin(slot.arrays)

    def finish(self) -> None:
        """Write ``behavior_log_prob`` of all steps, and keep the lanes' states for the next slot."""
        self._states.forget(self._arrays["mask"][-1])
        self._sampler.log_probs(self._arrays["action"], self._arrays["behavior_log_prob"])

    def _request(self, step: int) -> RolloutRequest:
        """Return the request for that step. Its arrays are the slot's own."""
        arrays = self._arrays
        observation = {path: arrays[path][step] for path in self._paths}
        if step:
            self._states.forget(arrays["mask"][step - 1])
        return RolloutRequest(observation=observation, state=self._states.arrays, min_version=self._min_version)

    def _choose(self, step: int, result: RolloutResult) -> NDArray[Any]:
        """Draw the actions of that step: write ``action[step]`` and its version, and return ``action[step]``."""
        arrays = self._arrays
        arrays["version_attempt"][step], arrays["version_step"][step] = result.version
        self._states.take(result.state)
        self._sampler.parameters[step] = result.distribution.T
        actions: NDArray[Any] = arrays["action"][step]
        self._sampler.choose(step, actions)
        return actions


class PolicyActor(DistributionActor, LocalActor):
    """Acts by a policy in this process: for networks that have no torch-free form.

    Draws from the same noise as ``NumpyActor``: with equal generators both choose the same actions.
    """

    def __init__(
        self,
        policy: Policy,
        env_spec: EnvSpec,
        *,
        num_steps: int,
        num_lanes: int,
        rng: np.random.Generator,
        greedy: bool = False,
        exploration: Exploration = AS_DISTRIBUTED,
    ) -> None:
        """Act by ``policy``; the other arguments are those of ``DistributionActor``."""
        DistributionActor.__init__(
            self,
            env_spec,
            num_steps=num_steps,
            num_lanes=num_lanes,
            rng=rng,
            greedy=greedy,
            exploration=exploration,
            state=policy.state,
        )
        self._policy = policy

    @override
    def load(self, parameters: Parameters) -> None:
        self._policy.load(parameters)

    @override
    def act(self, step: int) -> NDArray[Any]:
        (result,) = self._policy.predict([self._request(step)])
        return self._choose(step, result)

    @override
    def restart(self) -> None:
        self._states.restart()
