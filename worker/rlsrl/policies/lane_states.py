"""The recurrent states of an actor's lanes, from one frame or slot to the next. numpy only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsrl.data.slots import state_field
from rlsrl.data.specs import Arrays, ArraySpec


class LaneStates:
    """The recurrent state with which each lane acts next. One thread uses it.

    A step that is not a transition leads to the first frame of an episode, which is seen with a state of zeros.
    """

    def __init__(self, specs: Mapping[str, ArraySpec], num_lanes: int) -> None:
        """Keep states of those specs, by name; none for a policy without memory."""
        self.arrays: dict[str, NDArray[Any]] = {
            name: np.zeros((num_lanes, *spec.shape), spec.dtype) for name, spec in specs.items()
        }
        """By name, each [N, ...]."""

    def __bool__(self) -> bool:
        """Return whether there is any state."""
        return bool(self.arrays)

    def begin(self, slot: Arrays) -> None:
        """Write the states into a slot that begins."""
        for name, array in self.arrays.items():
            slot[state_field(name)][...] = array

    def take(self, state: Arrays) -> None:
        """Take over the states after a frame, by name."""
        for name, array in self.arrays.items():
            array[...] = state[name]

    def forget(self, mask: NDArray[np.bool_]) -> None:
        """Set the states to zeros of the lanes whose last step is not a transition by its ``mask``, [N]."""
        if self.arrays and not mask.all():
            for array in self.arrays.values():
                array[~mask] = 0

    def restart(self) -> None:
        """Set all states to zeros: each lane begins an episode."""
        for array in self.arrays.values():
            array[...] = 0
