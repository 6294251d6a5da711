"""An actor for one environment at a time: for programs of users, and for videos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlsrl.data.slots import Slot, rollout_layout
from rlsrl.data.specs import Arrays, ArraySpec, EnvSpec
from rlsrl.policies.acting import LocalActor


class OneStepActor:
    """Chooses the actions of one environment, step by step. One thread uses it."""

    def __init__(self, actor: LocalActor, spec: EnvSpec, state: Mapping[str, ArraySpec]) -> None:
        """Act by ``actor``, which has its weights, for slots of one step with one lane.

        ``state``: the spec of the policy's recurrent state by name; empty without one.
        """
        layout = rollout_layout(spec, num_steps=1, num_lanes=1, state=state)
        self._slot = Slot(arrays=layout.view(bytearray(layout.nbytes)))
        self._slot.arrays["mask"][...] = True
        self._actor = actor
        self._is_recurrent = bool(state)

    def restart(self) -> None:
        """Forget what was observed: the next observation is the first of an episode."""
        self._actor.restart()

    def act(self, observation: Arrays) -> np.ndarray[Any, Any]:
        """Return the action, [1, ...], for an observation, by path."""
        for path, array in observation.items():
            self._slot.arrays[path][0, 0] = array
        self._actor.begin(self._slot)
        action = self._actor.act(0)
        if self._is_recurrent:
            self._actor.finish()
        return action
