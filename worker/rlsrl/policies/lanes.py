"""Acting lane by lane, each in a thread of its own, by an exported program. numpy only."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsrl.data.slots import Slot
from rlsrl.data.specs import Arrays
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.exported import DenseStack, DenseWeights, ExportedActor, feature_major
from rlsrl.policies.sampling import Chooser, make_sampler


class NumpyLane:
    """Chooses the actions of one lane. One thread uses it at a time."""

    def __init__(self, program: ExportedActor, weights: DenseWeights, chooser: Chooser) -> None:
        self._program = program
        # Unlike dot it keeps the interpreter, which others wait for: handing that over and back takes longer.
        self._stack = DenseStack(weights, 1, product=np.matmul)
        self._chooser = chooser
        self._distributions = list(chooser.parameters)

    def begin(self, arrays: Arrays) -> None:
        """Start on the lane of a slot, given its arrays as those of a slot of one lane."""
        self._frames = [feature_major(arrays[path]) for path in self._program.observation]
        mask = self._program.head.mask
        self._masks = [None] * len(arrays["mask"]) if mask is None else list(feature_major(arrays[mask]))
        self._actions = arrays["action"]

    def act(self, step: int) -> NDArray[Any]:
        """Choose the action of that step: writes and returns ``action[step]``, shape [1, ...]."""
        self._stack.forward([frames[step] for frames in self._frames], self._distributions[step], self._masks[step])
        actions: NDArray[Any] = self._actions[step]
        self._chooser.choose(step, actions)
        return actions


class NumpyLanes:
    """Acts as ``NumpyActor`` does, from the same noise, but for what is done once a step: that is done by ``lanes``,
    each as far as it is. One thread owns this; a slot's lanes are filled between its ``begin`` and ``finish``.

    A matrix product of one lane is rounded otherwise than one of many, so that what both compute differs as that does.
    """

    def __init__(self, program: ExportedActor, *, num_steps: int, num_lanes: int, rng: np.random.Generator) -> None:
        """Act for slots of ``num_steps`` steps and ``num_lanes`` lanes, with noise from ``rng``."""
        self._weights = DenseWeights(program)
        self._sampler = make_sampler(
            program.head.kind,
            program.head.num_outputs,
            num_steps=num_steps,
            num_lanes=num_lanes,
            rng=rng,
            greedy=False,
        )
        self._choosers = [self._sampler.of_lane(lane) for lane in range(num_lanes)]
        self.lanes = tuple(NumpyLane(program, self._weights, chooser) for chooser in self._choosers)
        """By number."""

    def load(self, parameters: Parameters) -> None:
        """Act with these weights from the next ``begin`` on.

        Raises:
            LayoutMismatch: they are of another network.
        """
        self._weights.load(parameters)

    def begin(self, slot: Slot) -> None:
        """Start on a slot: draw noise for all its steps, and write which weights act."""
        if self._weights.version is None:
            raise RuntimeError("load() comes before begin()")
        arrays = self._arrays = slot.arrays
        arrays["version_attempt"][:], arrays["version_step"][:] = self._weights.version
        self._sampler.begin()

    def finish(self) -> None:
        """Write ``behavior_log_prob`` of all steps; the slot is complete afterwards."""
        np.concatenate([chooser.parameters for chooser in self._choosers], axis=2, out=self._sampler.parameters)
        self._sampler.log_probs(self._arrays["action"], self._arrays["behavior_log_prob"])
