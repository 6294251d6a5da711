"""The half of an actor that evaluates nothing: it asks for distributions and draws from them. numpy only.

Who answers is the caller's affair: a policy in the same process, or a policy worker elsewhere. The noise is the
actor's own, so its actions do not depend on that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsrl.data.inference import RolloutRequest, RolloutResult
from rlsrl.data.slots import Slot
from rlsrl.data.specs import EnvSpec
from rlsrl.policies.sampling import sampler_for


class AskingActor:
    """Asks for and chooses the actions of one slot after another. One thread uses it."""

    def __init__(
        self, env_spec: EnvSpec, *, num_steps: int, num_lanes: int, rng: np.random.Generator, greedy: bool = False
    ) -> None:
        """Act for slots of ``num_steps`` steps and ``num_lanes`` lanes, with noise from ``rng``.

        ``greedy``: take the most probable action, as evaluation does.
        """
        self._paths = list(env_spec.observation)
        self._sampler = sampler_for(env_spec.action, num_steps=num_steps, num_lanes=num_lanes, rng=rng, greedy=greedy)

    def begin(self, slot: Slot) -> None:
        """Start on a slot: draw noise for all its steps."""
        self._arrays = slot.arrays
        self._min_version = slot.min_version
        self._sampler.begin()

    def ask(self, step: int) -> RolloutRequest:
        """What has to be known to act in that step; its arrays are the slot's own."""
        arrays = self._arrays
        return RolloutRequest(
            observation={path: arrays[path][step] for path in self._paths}, min_version=self._min_version
        )

    def act(self, step: int, answer: RolloutResult) -> NDArray[Any]:
        """Choose the actions of that step: writes ``action[step]`` and its version, and returns ``action[step]``."""
        arrays = self._arrays
        arrays["version_attempt"][step], arrays["version_step"][step] = answer.version
        self._sampler.parameters[step] = answer.distribution.T
        actions: NDArray[Any] = arrays["action"][step]
        self._sampler.choose(step, actions)
        return actions

    def finish(self) -> None:
        """Write ``behavior_log_prob`` of all steps; the slot is complete afterwards."""
        self._sampler.log_probs(self._arrays["action"], self._arrays["behavior_log_prob"])
