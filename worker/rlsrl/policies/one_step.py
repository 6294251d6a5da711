"""An actor for one environment at a time: for programs of users, and for videos."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlsrl.data.slots import Slot, rollout_layout
from rlsrl.data.specs import Arrays, EnvSpec
from rlsrl.policies.acting import LocalActor


class OneStepActor:
    """Chooses the actions of one environment, step by step. One thread uses it."""

    def __init__(self, actor: LocalActor, spec: EnvSpec) -> None:
        """Act by ``actor``, which has its weights, for slots of one step with one lane."""
        layout = rollout_layout(spec, num_steps=1, num_lanes=1)
        self._slot = Slot(arrays=layout.view(bytearray(layout.nbytes)))
        self._actor = actor

    def act(self, observation: Arrays) -> np.ndarray[Any, Any]:
        """Return the action, [1, ...], for an observation, by path."""
        for path, array in observation.items():
            self._slot.arrays[path][0, 0] = array
        self._actor.begin(self._slot)
        return self._actor.act(0)
