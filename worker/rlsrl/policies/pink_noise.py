"""Pink noise for actions (Eberhard et al. 2023, "Pink noise is all you need"): slow changes are as strong as fast ones.

Independent noise averages out over some steps. Pink noise pushes an environment in one direction for a while, too.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

NUM_PROCESSES = 10
"""Processes that are added up. The slowest forgets within 2 ** 9 steps, the length of many episodes."""


class PinkProcess:
    """Pink noise of some outputs and lanes, which goes on from rollout to rollout.

    It is the sum of autoregressive processes of equal variance that forget within 1, 2, 4, ... steps. The power of
    their sum falls with the frequency f as 1 / f, between the slowest and the fastest. Each value by itself is a
    standard normal one.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        """Make noise of that shape for each step."""
        forgotten = 1.0 / 2.0 ** np.arange(NUM_PROCESSES, dtype=np.float32)
        self._kept = (1.0 - forgotten).reshape(-1, *[1] * len(shape))
        self._fresh = np.sqrt((1.0 - np.square(self._kept)) / NUM_PROCESSES)
        self._shape = (NUM_PROCESSES, *shape)
        self._states: Floats | None = None
        """Of each process; None before the first step."""

    def fill(self, out: Floats, rng: np.random.Generator) -> None:
        """Write the noise of the next steps, [T, *shape], drawn from ``rng``."""
        states = self._states
        if states is None:
            states = rng.standard_normal(self._shape, np.float32) / np.float32(np.sqrt(NUM_PROCESSES))
        fresh = rng.standard_normal((len(out), *self._shape), np.float32)
        fresh *= self._fresh
        for of_step, values in zip(out, fresh, strict=True):
            states = states * self._kept
            states += values
            states.sum(axis=0, out=of_step)
        self._states = states


class PinkNoise:
    """The pink noise of an actor's lanes: a process for each part of the actions. Actors that take turns share it."""

    def __init__(self) -> None:
        self._processes: dict[int, PinkProcess] = {}

    def of_part(self, number: int, shape: tuple[int, ...]) -> PinkProcess:
        """Return the process of that part of the actions, whose noise has the shape ``shape`` in each step."""
        return self._processes.setdefault(number, PinkProcess(shape))
